"""Build the CPU image with buildah, and run the smoke speedrun and a chat.

It needs no Docker engine, but root, `apt-get install mmdebstrap podman buildah`, and 8 GB of disk.
An ordinary user runs the image. The base is Debian's minbase by mmdebstrap, with the name in the
Dockerfile; it is not Docker Hub's image. Package indexes, certificates and apt's mirror are this
machine's, as volumes of the build, so no layer contains them. Of the GPU stage those lines run that
need neither a GPU nor Ubuntu: the pins, by a python3.12 (or PYTHON312), and the package's
installation.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lab.rehearsals import gpu_pins

ROOT = Path(__file__).parents[2]
BASE, IMAGE = "debian:bookworm-slim", "agent-r1:cpu"
USER = 1000
"""Id of the ordinary user; speedrun.sh passes the caller's."""
STORAGE = "--storage-driver=vfs"  # overlayfs needs rights that a container often lacks


def run() -> dict[str, Any]:
    """Build the image, run it, and return the figures."""
    for tool in ("mmdebstrap", "podman", "buildah"):
        assert shutil.which(tool), (
            f"{tool} is not installed: apt-get install mmdebstrap podman buildah"
        )
    with tempfile.TemporaryDirectory(prefix="agent-r1-image-") as folder:
        root = Path(folder)
        root.chmod(0o755)  # the ordinary user goes through it
        figures = build(root)
        with container() as name:
            figures |= speedrun(name, root / "home") | question(name, root / "home")
        return figures | {"base": "mmdebstrap's minbase, not Docker Hub's"} | gpu_stage(root)


def build(root: Path) -> dict[str, Any]:
    """Make the base and the image."""
    began = time.monotonic()
    print("  the base ...", flush=True)
    call(["mmdebstrap", "--quiet", "--variant=minbase", "bookworm", root / "base.tar"])
    call(["podman", STORAGE, "import", "--quiet", root / "base.tar", f"docker.io/library/{BASE}"])
    base_s = round(time.monotonic() - began)
    print("  the image ...", flush=True)
    command = ["buildah", STORAGE, "bud", "--isolation=chroot", "--layers=false", "--format=docker"]
    call([*command, "--build-arg", "STACK=cpu", *volumes(root), "-t", IMAGE, ROOT])
    [image] = json.loads(call(["buildah", STORAGE, "images", "--json", IMAGE]))
    return {
        "size": image["size"],
        "base_s": base_s,
        "build_s": round(time.monotonic() - began) - base_s,
    }


def volumes(root: Path) -> list[str]:
    """List options that mount this machine's package index, local wheels and certificates."""
    settings = dict(
        re.findall(
            r"^(?:global|:env:)\.([a-z-]+)='(.*)'$", call(["pip", "config", "list"]), re.MULTILINE
        )
    )
    folders, lines = [], ["[global]"]
    for key in ("index-url", "extra-index-url", "find-links", "trusted-host"):
        if key in settings:
            lines.append(f"{key} = {settings[key]}")
            local = [word.removeprefix("file://") for word in settings[key].split()]
            folders += [Path(*Path(place).parts[:3]) for place in local if place.startswith("/")]
    certificates = Path(settings.get("cert", "/etc/ssl/certs/ca-certificates.crt"))
    if certificates.is_file():  # under another name: the build writes this one itself
        lines.append("cert = /run/build/certificates.crt")
    (root / "pip.conf").write_text("\n".join(lines) + "\n")
    pairs = {str(place): str(place) for place in folders if place.exists()}
    pairs |= {
        str(root / "pip.conf"): "/etc/pip.conf",
        str(certificates): "/run/build/certificates.crt",
    }
    return [
        word for inside, outside in pairs.items() for word in ("--volume", f"{inside}:{outside}:ro")
    ]


@contextmanager
def container() -> Iterator[str]:
    """Start a container of the image; remove both, and the base, at the end."""
    name = call(["buildah", STORAGE, "from", IMAGE]).strip()
    try:
        yield name
    finally:
        call(["buildah", STORAGE, "rm", name])
        call(["buildah", STORAGE, "rmi", IMAGE, BASE])


def inside(name: str, home: Path, *words: str) -> str:
    """Run a command in the container, with speedrun.sh's folders and user; return its output."""
    options = [
        word
        for each in ("runs", "artifacts")
        for word in ("--volume", f"{home / each}:{home / each}")
    ]
    command = [
        "buildah",
        STORAGE,
        "run",
        "--isolation=chroot",
        "--user",
        f"{USER}:{USER}",
        *options,
    ]
    return call([*command, "--env", f"AGENT_R1_HOME={home}", name, "--", *words])


def speedrun(name: str, home: Path) -> dict[str, Any]:
    """Run the smoke speedrun, and check that every file it leaves belongs to the user."""
    for each in ("runs", "artifacts"):
        (home / each).mkdir(parents=True)
        os.chown(home / each, USER, USER)
    print("  the smoke speedrun in it ...", flush=True)
    began = time.monotonic()
    inside(name, home, "bash", "speedrun-nodocker.sh", "grpo", "--preset", "smoke")
    seconds = round(time.monotonic() - began)
    files = [path for folder in ("runs", "artifacts") for path in (home / folder).rglob("*")]
    foreign = [path.name for path in files if path.lstat().st_uid != USER]
    assert files and not foreign, f"not owned by the caller: {foreign[:3]}"
    before, after = (
        json.loads((home / "runs/smoke-grpo" / f"{card}.json").read_text())["em"]
        for card in ("eval_before", "eval")
    )
    return {
        "speedrun_s": seconds,
        "em_before_after": f"{before:.3f}, {after:.3f}",
        "files_of_the_caller": len(files),
    }


def question(name: str, home: Path) -> dict[str, str]:
    """Ask one question of the test set in the chat."""
    output = inside(
        name,
        home,
        "agent-r1",
        "chat",
        "--run",
        "smoke-grpo",
        "--backend",
        "transformers",
        "--question",
        "1",
        "--json",
    )
    exchange = json.loads(output.strip().splitlines()[-1])
    assert exchange["stop_reason"] == "answered", exchange["stop_reason"]
    return {"chat_stop_reason": exchange["stop_reason"]}


def gpu_stage(root: Path) -> dict[str, str]:
    """Run the lines of the GPU stage that this machine can; name the others."""
    omissions = "apt-get (Ubuntu's archive), imports (need a GPU's driver)"
    try:
        gpu_pins.install(root)
    except RuntimeError as error:
        if "PYTHON312" not in str(error):
            raise
        return {"gpu_stage": "skipped: no python3.12 runs here"}
    copy = root / "source"
    shutil.copytree(
        ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv*", "runs", "artifacts", "build")
    )
    python = root / "venv" / "bin" / "python"
    call([python, "-m", "pip", "install", "--quiet", "--no-deps", "-e", copy])
    assert "discover" in call([root / "venv" / "bin" / "agent-r1", "train", "--help"])
    return {"gpu_stage": f"pins and package installed; skipped: {omissions}"}


def call(command: Sequence[str | Path]) -> str:
    """Return standard output.

    Raises with the last line of what the command printed when it fails.
    """
    done = subprocess.run([str(word) for word in command], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        print(done.stdout[-3000:] + done.stderr[-3000:], flush=True)
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise RuntimeError(f"{command[0]} {command[2]}: {' '.join(last)}")
    return done.stdout
