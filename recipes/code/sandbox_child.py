"""Confine this process and run one program: the inner side of a sandbox.

In: a plan (argv); then, on stdin, a number of bytes and a program of that size. Out: one line of
JSON, then what the program prints. The rest of stdin is the program's input.

`sandbox.py` starts this file with `python -c`, so it uses only the standard library. It gives up
every right that the program must not have, reports what the kernel has agreed to, and waits for the
program. Neither can undo that: limits are hard, and Landlock and seccomp last until the process
ends.

Landlock (kernel 5.13) decides which files may be opened, seccomp which system calls exist.
"""

import code
import contextlib
import ctypes
import json
import linecache
import os
import resource
import struct
import sys
import types

# prctl(2)
PR_SET_PDEATHSIG = 1
PR_SET_SECCOMP = 22
PR_SET_NO_NEW_PRIVS = 38
# System calls, with the same numbers on every architecture.
LANDLOCK_CREATE_RULESET = 444
LANDLOCK_ADD_RULE = 445
LANDLOCK_RESTRICT_SELF = 446
# Landlock's rights
WRITE_FILE = 1 << 1
READ_FILE = 1 << 2
READ_DIR = 1 << 3
TRUNCATE = 1 << 14


def system_call(number: int, *arguments: object) -> int:
    """Make a system call and return its result. Raises OSError."""
    words: list[object] = [ctypes.c_long(number)]
    for argument in arguments:
        # ctypes passes an int as a C int, of 32 bits; the kernel reads 64.
        words.append(ctypes.c_long(argument) if isinstance(argument, int) else argument)
    result = LIBC.syscall(*words)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def limit(limits: dict[str, int]) -> None:
    for name, most in limits.items():
        resource.setrlimit(getattr(resource, name), (most, most))


def around(path: str, hidden: list[str]) -> list[tuple[str, int]]:
    """Return rules for `path` without its hidden parts.

    Landlock cannot exclude a part of a folder, so each sibling gets a rule.
    """
    real = os.path.realpath(path)
    if real in hidden:
        return []
    if not any(one.startswith(f"{real}/") for one in hidden):
        return [(path, READ_FILE | READ_DIR)]
    if os.path.islink(path):  # its rule would be one for all of the folder
        return []
    rules = [(path, READ_DIR)]
    for name in os.listdir(path):
        rules += around(f"{path}/{name}", hidden)
    return rules


def landlock(readable: list[str], hidden: list[str], writable: list[str]) -> int:
    """Refuse every file except those below these paths, without the hidden ones.

    Returns the version of Landlock, or 0 if there is none that refuses enough.
    """
    try:
        abi = system_call(LANDLOCK_CREATE_RULESET, None, 0, 1)
    except OSError:
        return 0
    if abi < 3:  # older versions do not refuse truncate(2)
        return 0
    all_file_rights = (1 << 15) - 1
    if abi >= 5:  # ioctl(2) on devices
        all_file_rights = (1 << 16) - 1
    # Refused: all on files; TCP; abstract sockets and signals.
    everything = struct.pack("QQQ", all_file_rights, 3 * (abi >= 4), 3 * (abi >= 6))
    ruleset = system_call(LANDLOCK_CREATE_RULESET, everything, len(everything), 0)
    rules: list[tuple[str, int]] = []
    for path in readable:
        rules += around(os.path.realpath(path), hidden)
    rules += [(path, all_file_rights) for path in writable]
    for path, rights in rules:
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        if not os.path.isdir(path):
            rights &= READ_FILE | WRITE_FILE | TRUNCATE
        system_call(LANDLOCK_ADD_RULE, ruleset, 1, struct.pack("=Qi", rights, place), 0)
        os.close(place)
    system_call(LANDLOCK_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)
    return abi


def seccomp(program: bytes) -> None:
    buffer = ctypes.create_string_buffer(program, len(program))
    pointer = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    if LIBC.prctl(PR_SET_SECCOMP, 2, ctypes.c_char_p(pointer), 0, 0):
        raise OSError(ctypes.get_errno(), "the kernel refuses the filter")


def run_program(source: str) -> int:
    """Run the program and return its exit code.

    An exception gives 1, and its traceback is printed.
    """
    linecache.cache["<code>"] = len(source), None, source.splitlines(keepends=True), "<code>"
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    interpreter = code.InteractiveInterpreter(vars(main))
    failures: list[str] = []

    def write(data: str) -> None:
        """Print a traceback, and remember that there was one."""
        failures.append(data)
        sys.stdout.write(data)

    interpreter.write = write
    try:
        interpreter.runcode(compile(source, "<code>", "exec"))
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):
        # Errors of `compile`. This report excludes the frames of this file.
        interpreter.showsyntaxerror("<code>")
    except SystemExit as end:
        if isinstance(end.code, int | None):
            return end.code or 0
        interpreter.write(f"{end.code}\n")  # sys.exit("a message")
        return 1
    return int(bool(failures))


if __name__ == "__main__":
    plan = json.loads(sys.argv[1])
    sys.argv = ["<code>"]
    active = {}
    limit(plan["limits"])
    if sys.platform == "linux":
        LIBC = ctypes.CDLL(None, use_errno=True)
        LIBC.prctl(PR_SET_PDEATHSIG, 9, 0, 0, 0)
        if plan["filter"]:
            LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
            active["Landlock"] = landlock(plan["readable"], plan["hidden"], plan["writable"])
            seccomp(bytes.fromhex(plan["filter"]))
            active["seccomp"] = True
    sys.path += plan["packages"]
    sys.stderr = sys.stdout
    os.write(1, json.dumps(active).encode() + b"\n")
    size = sys.stdin.buffer.readline()
    if size:  # it is empty if the parent discards this process
        status = run_program(sys.stdin.buffer.read(int(size)).decode())
        with contextlib.suppress(Exception):  # the program may have closed it
            if sys.__stdout__ is not None:
                sys.__stdout__.flush()
        os._exit(status & 255)  # Python's normal exit takes ten times as long as most programs
