"""lab/experiments/ablation.sh: the commands that it gives are recorded, and those of one seed are
run."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess

import pytest
import torch
from conftest import micro_config, random_model, trajectory_of
from lab.experiments import ablation, summary
from runs import ROOT, TINY, curve, main

from agent_r1.ground.errors import ConfigError
from agent_r1.rollout.training_rows import Batch, collate, trajectory_rows
from agent_r1.training import loop
from agent_r1.training.learner import Learner
from agent_r1.training.losses import policy_loss, token_ratios

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
    environment = {"AGENT_R1_VENV": str(tmp_path), "PRESET": "small", "PATH": "/usr/bin:/bin"}
    subprocess.run(
        ["bash", ROOT / "lab/experiments/ablation.sh", "0 1 2", *tiny], env=environment, check=True
    )
    return [line.split() for line in log.read_text().splitlines()]


@pytest.mark.slow
def test_three_arms_from_one_cold_start_for_each_seed(
    produced, commands, tmp_path, monkeypatch, capsys
):
    *agents, table = commands
    assert table == [
        "lab/experiments/summary.py",
        *(f"ablation-{arm}-s{seed}" for seed in range(3) for arm in ARMS),
    ]
    cold = [argv[argv.index("--seed") + 1] for argv in agents if argv[0] == "cold-start"]
    assert cold == ["0", "1", "2"] and len(agents) == 3 * (3 + 3 * 3)

    monkeypatch.setenv("AGENT_R1_HOME", str(tmp_path))
    shutil.copytree(produced / "artifacts", tmp_path / "artifacts")
    for argv in agents[:12]:
        by_script = argv[0] == "lab/experiments/ablation.py"
        assert (ablation.main(*argv[1:]) if by_script else main(*argv)) == 0, argv
    curves = [curve(tmp_path / "runs" / name) for name in table[1:4]]
    assert [[line["training/global_step"] for line in lines] for lines in curves] == [[1, 2]] * 3
    first = [lines[0] for lines in curves]  # sampled before any update: the same in all arms
    assert (
        first[0]["critic/score/mean"]
        == first[1]["critic/score/mean"]
        == first[2]["critic/score/mean"]
    )
    assert len({line["actor/grad_norm"] for line in first}) == 3
    capsys.readouterr()
    summary.main(table[1:4])
    assert [line.split(" | ")[0] for line in capsys.readouterr().out.splitlines()[2:5]] == [
        f"| ablation-{arm}-s0" for arm in ARMS
    ]


# ---------------------------------------------------------------------------------------- the patch


def test_with_tool_tokens_by_hand():
    rows = trajectory_rows(trajectory_of(([1, 2], [3, 4], 0.0), ([1, 2, 3, 4, 5, 6], [7], 1.0)), 0)
    batch = collate(rows + trajectory_rows(trajectory_of(([1], [2], 0.0)), 1))
    batch.advantages_BT = torch.tensor([[0, 0, 0.5, 0.5, 0, 0, 2.0], [0, -1.0, 0, 0, 0, 0, 0]])
    batch.logprobs_BT[0, 2] = -0.7
    wide = ablation.with_tool_tokens(batch, lambda wide: -2 * wide.mask_BT.bool())
    assert wide.mask_BT.bool().tolist() == [[0, 0, 1, 1, 1, 1, 1], [0, 1, 0, 0, 0, 0, 0]]
    assert (wide.mask_BT == 1).tolist() == batch.mask_BT.bool().tolist()
    assert wide.advantages_BT.tolist() == [[0, 0, 1, 1, 1, 1, 1], [0, -1, 0, 0, 0, 0, 0]]
    assert wide.logprobs_BT[0].tolist() == pytest.approx(
        [0, 0, -0.7, -0.2, -2, -2, -0.1]
    )  # the sampler's stay


def sampled() -> Batch:
    """Eight episodes with a tool's tokens in the middle, sampled by `random_model` as far as the
    clip can tell."""
    g = torch.Generator().manual_seed(0)
    episodes = []
    for _ in range(8):
        prompt, first, tool, last = (
            torch.randint(0, 50, (n,), generator=g).tolist() for n in (4, 5, 9, 3)
        )
        episodes.append(trajectory_of((prompt, first, 0.0), (prompt + first + tool, last, 0.0)))
    batch = collate([row for i, t in enumerate(episodes) for row in trajectory_rows(t, i)])
    batch.advantages_BT = torch.randn(8, 1, generator=g) * batch.mask_BT
    return batch


def gradient(arm: str | None, batch: Batch, monkeypatch, *settings: str) -> torch.Tensor:
    """What one update with plain SGD moves, in an arm of the ablation (None: as always)."""
    config = micro_config(
        "grpo", "actor.minibatches=1", "actor.lr=1", "actor.grad_clip=1e9", *settings
    )
    model = random_model(vocab=50, seed=7, tied=False, max_position=128)
    before = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    learner = Learner(model, torch.optim.SGD(model.parameters(), lr=1.0))
    with monkeypatch.context() as patch:
        patch.setattr(loop, "loss_normalizer", ablation.NORMALIZERS[arm or "tool-tokens"])
        update = ablation.update_on_all if arm else loop.update_actor
        update(learner, batch, config, 1, torch.float32, token_ratios)
    return before - torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def test_the_two_normalisers_differ_by_their_counts_alone(monkeypatch):
    """The confound of the figure: more tokens in the loss also make its denominator larger."""
    batch = sampled()
    both, alone = (gradient(arm, batch, monkeypatch) for arm in ablation.NORMALIZERS)
    torch.testing.assert_close(
        alone, both * (17 / 8), rtol=1e-3, atol=1e-6
    )  # 5 + 9 + 3 tokens against 5 + 3
    assert (gradient(None, batch, monkeypatch) - both).abs().max() > 1e-2 * both.abs().max()
    with pytest.raises(ConfigError, match="set actor.kl_coef=0"):
        gradient("tool-tokens", batch, monkeypatch, "actor.kl_coef=0.1")


def test_tool_tokens_meet_the_clip(monkeypatch):
    """Their old log-probabilities are those before the first optimiser step: the ratio is 1 there,
    and not in the second."""
    moved = []

    def watching(logprobs_BT, old_BT, advantages_BT, mask_BT, **bounds):
        tool_BT = mask_BT == ablation.TOOL
        moved.append((logprobs_BT - old_BT)[tool_BT].abs().max().item())
        return policy_loss(logprobs_BT, old_BT, advantages_BT, mask_BT, **bounds)

    monkeypatch.setattr(loop, "policy_loss", watching)
    gradient(
        "tool-tokens",
        dataclasses.replace(sampled()),
        monkeypatch,
        "actor.minibatches=2",
        "actor.lr=0.05",
    )
    assert len(moved) == 2 and moved[0] < 1e-4 and moved[1] > 0.01
