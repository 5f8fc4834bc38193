"""Print the SHA-256 of each file that an installation may take for a pinned package.

    pip install uv; python .ci/hashes.py > requirements/hashes.txt

Run it after a changed pin. uv asks the package index for the files of the pinned versions. Kept are
those for Python 3.11 and 3.12 on Linux (x86-64, arm64) and macOS. The source is kept where no wheel
serves every machine.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import tomllib
from pathlib import Path
from typing import Any

REQUIREMENTS = Path(__file__).parents[1] / "requirements"
FILES = {
    "dev.txt": "3.11",
    "constraints.txt": "3.11",
    "verl-cpu.txt": "3.11",
    "verl-gpu.txt": "3.12",
}
"""Requirements file with pins -> the oldest Python it is for. Included files count, too."""
WITHOUT_HASH = {"torch": "its builds for a CPU come from another index, in the same version"}
HEAD = """\
# The SHA-256 of each pinned package but torch, for each file that an installation may take. A line
# that ends in "# source" has no wheel. An installation takes these first, and pip refuses any other
# file: `verify` in packages.sh.
# Made by: pip install uv; python .ci/hashes.py > requirements/hashes.txt
"""
SYSTEM = re.compile(r"any|manylinux\w*_(x86_64|aarch64)|macosx_\w+")


def read_lines(name: str) -> list[str]:
    """Read the pins of a requirements file and its inclusions, as `name==version ;marker`."""
    lines = []
    for line in (REQUIREMENTS / name).read_text().splitlines():
        line = re.sub(r"(^|\s+)#.*", "", line)
        if line.startswith("-r "):
            lines += read_lines(line.removeprefix("-r "))
        elif "==" in line:
            pin, _, marker = line.partition(";")
            pin = re.sub(r"\[.*\]|\s", "", pin).replace("_", "-").lower()
            lines.append(pin + f" ;{marker}" * bool(marker))
    return [line for line in lines if line.partition("==")[0] not in WITHOUT_HASH]


def read_pins() -> dict[str, str]:
    """Map each `name==version` of all files to its marker, or to nothing."""
    pins: dict[str, str] = {}
    for name in FILES:
        for line in read_lines(name):
            pin, _, marker = line.partition(" ;")
            pins[pin] = pins.get(pin) or marker.strip()
    return pins


def serves(wheel: str) -> bool:
    """Tell whether a wheel is for one of our Pythons and systems, by its name."""
    pythons, abis, systems = wheel.removesuffix(".whl").rsplit("-", 3)[1:]
    for python in pythons.split("."):
        version = re.fullmatch(r"(py|cp)3(\d*)", python)
        if not version:
            continue
        minor = int(version[2] or 0)
        exact = version[1] == "cp" and "abi3" not in abis
        if minor in (11, 12) or (minor < 11 and not exact):
            return any(SYSTEM.fullmatch(system) for system in systems.split("."))
    return False


def hashes_of(package: dict[str, Any]) -> tuple[list[str], bool]:
    """Return the hashes of a locked package's files, and whether it has only its source."""
    wheels = {wheel["url"].rpartition("/")[2]: wheel for wheel in package.get("wheels", [])}
    files = [wheels[name] for name in sorted(wheels) if serves(name)]
    if not any(name.endswith("-any.whl") for name in wheels if serves(name)):
        files += [package["sdist"]] if "sdist" in package else []
    return [file["hashes"]["sha256"] for file in files], not any(map(serves, wheels))


def lock(pins: list[str], python: str) -> list[dict[str, Any]]:
    """Ask the package index for the files of these versions, with uv."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder, "pins.txt")
        wanted.write_text("\n".join(pins))
        out = Path(folder, "pylock.toml")
        options = ["--no-deps", "--universal", "--python-version", python, "--quiet"]
        command = ["uv", "--no-config", "pip", "compile", *options, "--format", "pylock.toml"]
        subprocess.run([*command, str(wanted), "-o", str(out)], check=True)
        return tomllib.loads(out.read_text())["packages"]


def page() -> str:
    """Write the file. A package that two files pin in two versions has two lines."""
    markers = read_pins()
    lines: dict[str, str] = {}
    for name, python in FILES.items():
        for package in lock(read_lines(name), python):
            pin = f"{package['name']}=={package['version']}"
            hashes, from_source = hashes_of(package)
            marker = f" ; {markers[pin]}" if markers[pin] else ""
            text = " ".join(f"--hash=sha256:{digest}" for digest in hashes)
            lines.setdefault(pin, f"{pin}{marker} {text}" + " # source" * from_source + "\n")
    return HEAD + "".join(line for _, line in sorted(lines.items()))


if __name__ == "__main__":
    print(page(), end="")
