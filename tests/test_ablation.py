"""benchmarks/ablation.sh: the commands that it gives are recorded, and those of one seed are run."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from runs import ROOT, TINY, curve, main

from benchmarks import summary

ARMS = ("masked", "tool-tokens", "tool-tokens-agent-n")


@pytest.fixture
def commands(tmp_path) -> list[list[str]]:
    """What the script asks `agent-r1` and `python` to do for three seeds, with a tiny model."""
    log = tmp_path / "log"
    for name in ("agent-r1", "python"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\necho "$@" >> {log}\n')
        program.chmod(0o755)
    tiny = [*TINY[1:], "actor.kl_coef=0", "trainer.steps=2", "trainer.eval_every=0"]
    environment = {"AGENT_R1_VENV": str(tmp_path), "PRESET": "smoke", "PATH": "/usr/bin:/bin"}
    subprocess.run(["bash", ROOT / "benchmarks" / "ablation.sh", "0 1 2", *tiny], env=environment, check=True)
    return [line.split() for line in log.read_text().splitlines()]


def test_three_arms_from_one_cold_start_for_each_seed(produced, commands, tmp_path, monkeypatch, capsys):
    *agents, table = commands
    assert table == ["benchmarks/summary.py", *(f"ablation-{arm}-s{seed}" for seed in range(3) for arm in ARMS)]
    cold = [argv[argv.index("--seed") + 1] for argv in agents if argv[0] == "cold-start"]
    assert cold == ["0", "1", "2"] and len(agents) == 3 * (3 + 3 * 3)

    monkeypatch.setenv("AGENT_R1_HOME", str(tmp_path))
    shutil.copytree(produced / "artifacts", tmp_path / "artifacts")
    for argv in agents[:12]:
        assert main(*argv) == 0, argv
    curves = [curve(tmp_path / "runs" / name) for name in table[1:4]]
    assert [[line["training/global_step"] for line in lines] for lines in curves] == [[1, 2]] * 3
    first = [lines[0] for lines in curves]  # sampled before any update: the same in all arms
    assert first[0]["critic/score/mean"] == first[1]["critic/score/mean"] == first[2]["critic/score/mean"]
    assert len({line["actor/grad_norm"] for line in first}) == 3
    capsys.readouterr()
    summary.main(table[1:4])
    assert [line.split(" | ")[0] for line in capsys.readouterr().out.splitlines()[2:5]] == [
        f"| ablation-{arm}-s0" for arm in ARMS
    ]
