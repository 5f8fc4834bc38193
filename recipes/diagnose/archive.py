"""Keep recorded runs in one archive, and check it before it is read.

In: a folder with a folder for each run. Out: NAME.zip, and NAME.sha256 with its hash in the form of
`sha256sum -c`. The runs of the museum and of the own tasks are 299 small files, which no one reads
one by one. `python -m zipfile -e recipes/museum/recorded.zip FOLDER` unpacks them, too.
"""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

from agent_r1 import AgentR1Error


def pack(folder: Path, archive: Path) -> None:
    """Write all files of `folder` to `archive`, and the hash next to it.

    Equal files give equal archives.
    """
    with zipfile.ZipFile(archive, "w") as out:  # stored: its files are compressed themselves
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                # ZipInfo's date is that of 1980, whenever the file was written.
                name = file.relative_to(folder).as_posix()
                out.writestr(zipfile.ZipInfo(name), file.read_bytes())
    _hash_file(archive).write_text(f"{_hash(archive)}  {archive.name}\n")


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack `archive` into `folder`, and return the folder.

    Raises AgentR1Error if the archive has not the hash of the file next to it.
    """
    right_hash = _hash_file(archive).read_text().split()[0]
    own_hash = _hash(archive)
    if own_hash != right_hash:
        raise AgentR1Error(
            f"{archive} has the hash {own_hash[:12]}..., and {_hash_file(archive).name} says "
            f"{right_hash[:12]}...: check both out again (`git checkout -- {archive.parent}`)",
            code="archive_hash_differs",
        )
    with zipfile.ZipFile(archive) as zip_file:
        zip_file.extractall(folder)
    return folder


def _hash_file(archive: Path) -> Path:
    return archive.with_suffix(".sha256")


def _hash(archive: Path) -> str:
    return hashlib.sha256(archive.read_bytes()).hexdigest()
