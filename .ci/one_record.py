"""Take one record out of a proposed change: `python .ci/one_record.py BASE HEAD > record.json`.

In: two commits of this repository. Out: the bytes of the record that HEAD adds. The change must be
one ordinary file in recipes/browser/records/, of at most 4,096 bytes. Nothing of HEAD is checked
out, so no code of it can run. Next: `agent-r1 record`, with the code of BASE.
"""

from __future__ import annotations

import re
import subprocess
import sys

PLACE = re.compile(r"recipes/browser/records/[\w-]{1,60}\.json", re.ASCII)
LARGEST = 4096
FILE = "100644"
"""Git's mode of an ordinary file: no link, no program."""


def git(*words: str) -> bytes:
    return subprocess.run(["git", *words], check=True, capture_output=True).stdout


def one_record(base: str, head: str) -> bytes:
    """Return the record's bytes. Raises SystemExit, with the reason, for any other change."""
    fields = git("diff", "--raw", "--no-renames", "--no-abbrev", "-z", f"{base}...{head}")
    parts = fields.decode().rstrip("\0").split("\0")
    if len(parts) != 2:
        raise SystemExit(f"the change has {len(parts) // 2} files; a record is proposed alone")
    facts, path = parts
    _, mode, _, blob, status = facts.split()
    if not PLACE.fullmatch(path):
        raise SystemExit("the changed file is not recipes/browser/records/NAME.json")
    if status != "A" or mode != FILE:
        raise SystemExit("the record is not a new ordinary file")
    if int(git("cat-file", "-s", blob)) > LARGEST:
        raise SystemExit(f"the record has more than {LARGEST} bytes")
    return git("cat-file", "blob", blob)


if __name__ == "__main__":
    sys.stdout.buffer.write(one_record(*sys.argv[1:3]))
