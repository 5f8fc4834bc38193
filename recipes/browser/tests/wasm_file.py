"""Read a WebAssembly file far enough to list its imports, exports and instructions.

In: the bytes of a module. Out: names, and the number of each instruction. The format is section 5
of the WebAssembly specification.
"""

from __future__ import annotations

from collections import Counter

IMPORTS, EXPORTS, CODE = 2, 7, 10
SIMD = 0xFD00
"""Instructions with the prefix FD have this number plus their own.

From FD00 + 100 on, they are the relaxed ones.
"""

ONE_NUMBER = {0x0C, 0x0D, 0x10, 0x20, 0x21, 0x22, 0x23, 0x24, 0xD2, 0x3F, 0x40, 0x41, 0x42}
"""Branches, calls, variables, memory size, whole constants."""
SIMD_MEMORY = {*range(0, 12), 92, 93}
SIMD_LANE_OF_MEMORY = set(range(84, 92))
SIMD_LANE = set(range(21, 35))


class Reader:
    def __init__(self, data: bytes):
        self.data, self.place = data, 0

    def take(self, count: int) -> bytes:
        self.place += count
        return self.data[self.place - count : self.place]

    def number(self) -> int:
        """A LEB128 number; signed ones are as long, and their value does not matter here."""
        value = shift = 0
        while True:
            [byte] = self.take(1)
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    def name(self) -> str:
        return self.take(self.number()).decode()


def sections(data: bytes) -> dict[int, bytes]:
    reader = Reader(data)
    assert reader.take(8) == b"\0asm\1\0\0\0"
    found = {}
    while reader.place < len(data):
        [kind] = reader.take(1)
        found[kind] = reader.take(reader.number())
    return found


def import_count(data: bytes) -> int:
    return Reader(sections(data).get(IMPORTS, b"\0")).number()


def export_names(data: bytes) -> set[str]:
    reader = Reader(sections(data)[EXPORTS])
    names = set()
    for _ in range(reader.number()):
        names.add(reader.name())
        reader.take(1)
        reader.number()
    return names


def instructions(data: bytes) -> Counter[int]:
    """Count the instructions. Raises AssertionError if the code does not end where it should."""
    reader, found = Reader(sections(data)[CODE]), Counter()
    for _ in range(reader.number()):
        size = reader.number()
        end = reader.place + size
        for _ in range(reader.number()):  # groups of local variables
            reader.number()
            reader.take(1)
        while reader.place < end:
            found[_instruction(reader)] += 1
        assert reader.place == end
    return found


def _instruction(reader: Reader) -> int:
    [code] = reader.take(1)
    if code in (0xFC, 0xFD):
        return _prefixed(reader, code)
    if code in ONE_NUMBER or code in (0x02, 0x03, 0x04):  # a block's type is one number too
        reader.number()
    elif code in (0x11, *range(0x28, 0x3F)):  # an indirect call; a memory access
        reader.number()
        reader.number()
    elif code == 0x0E:  # a table of branches
        for _ in range(reader.number() + 1):
            reader.number()
    elif code in (0x43, 0x44):
        reader.take(4 if code == 0x43 else 8)
    else:
        assert code in (0x00, 0x01, 0x05, 0x0B, 0x0F, 0x1A, 0x1B) or 0x45 <= code <= 0xC4, hex(code)
    return code


def _prefixed(reader: Reader, prefix: int) -> int:
    code = reader.number()
    if prefix == 0xFC:
        assert code in (*range(8), 10, 11), code  # saturating conversions; memory.copy and fill
        reader.take({10: 2, 11: 1}.get(code, 0))
        return 0xFC00 + code
    if code in SIMD_MEMORY or code in SIMD_LANE_OF_MEMORY:
        reader.number()
        reader.number()
    if code in SIMD_LANE_OF_MEMORY or code in SIMD_LANE:
        reader.take(1)
    if code in (12, 13):  # a constant; a shuffle
        reader.take(16)
    return SIMD + code
