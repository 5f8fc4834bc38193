"""Room 7: the sentinel names what goes wrong, on runs in which it really does."""

from __future__ import annotations

import html
import json
import math
import random
import re
from dataclasses import replace

import pytest
from benchmarks import sentinel
from conftest import random_model
from letters import LetterEnv, SilentEnv, letters_run
from qa_files import a_step_of_maths
from runs import ROOT, main

from agent_r1.config import load_config, to_yaml
from agent_r1.core import StepResult, StopReason
from agent_r1.ground.errors import AgentR1Error
from agent_r1.rollout.sampler import LocalPolicy, SamplerStats
from agent_r1.training.log import HOST_FREE, STEP
from agent_r1.training.metrics import SAMPLER_GAP
from agent_r1.training.run import RunDir, refuse_collapse
from agent_r1.training.sentinel import Sign, new_signs, signs
from agent_r1.viewer.report import write_report


class EndingEnv(LetterEnv):
    """Ends every episode in its first turn, as `ends` says, and pays nothing."""

    ends = StopReason.MAX_TOKENS

    async def step(self, action):
        return StepResult(None, done=True, stop_reason=self.ends)


class MisreadEnv(SilentEnv):
    """Each turn is a call that cannot be parsed."""

    async def step(self, action):
        call = {"name": "", "arguments": {}, "ok": False, "error": "malformed_call", "content": "error"}
        return replace(await super().step(action), info={"tool_calls": [call]})


class WrongEnv(SilentEnv):
    """Each turn makes a call that works, and nothing is right."""

    async def step(self, action):
        call = {"name": "look", "arguments": {}, "ok": True, "error": None, "content": "a book"}
        return replace(await super().step(action), info={"tool_calls": [call]})


class GrowingEnv(LetterEnv):
    """A right answer at first takes two turns; after five steps of 16 episodes none is right, and the agent calls on."""

    begun = 0

    def reset(self, row):
        GrowingEnv.begun += 1
        self.wanted = 2 if GrowingEnv.begun <= 5 * 16 else 10
        return super().reset(row)

    async def step(self, action):
        self.turns += 1
        call = {"name": "look", "arguments": {}, "ok": True, "error": None, "content": "again"}
        result = StepResult(None, float(self.wanted == 2 and self.turns == 2), info={"tool_calls": [call]})
        if self.turns == self.wanted:
            return replace(result, done=True, stop_reason=StopReason.ANSWERED)
        return replace(result, observation=self.reset_observation())

    def reset_observation(self):
        return super().reset({"prompt": [{"role": "tool", "content": "again"}]})


class DippingEnv(LetterEnv):
    """Pays every episode of 5 steps, none of the next 5, and every one of the rest, as where a tool was down for a while."""

    begun = 0

    async def step(self, action):
        step, DippingEnv.begun = DippingEnv.begun // 16, DippingEnv.begun + 1
        return StepResult(None, float(not 5 <= step < 10), done=True, stop_reason=StopReason.ANSWERED)


def lines_of(record) -> list[dict]:
    return [{STEP: step} | metrics for step, metrics in enumerate(record.metrics, start=1)]


@pytest.mark.parametrize("reason", ["max_tokens", "no_answer", "context_overflow", "invalid_calls", "max_turns"])
def test_why_the_reward_is_zero(chat, monkeypatch, reason):
    monkeypatch.setattr(EndingEnv, "ends", StopReason(reason))
    found = signs(lines_of(letters_run(chat, monkeypatch, "ppo", "trainer.steps=3", env=EndingEnv)))
    assert [sign.name for sign in found] == [f"zero: {reason}", "zero: no call", "groups agree"]
    assert found[0].seen.startswith("100% of the episodes ") and (found[0].step, found[0].stop_reason) == (3, reason)


def test_calls_that_nobody_understands_and_groups_that_agree(chat, monkeypatch):
    found = signs(lines_of(letters_run(chat, monkeypatch, "grpo", "trainer.steps=3", env=MisreadEnv)))
    assert [sign.name for sign in found] == ["zero: invalid calls", "groups agree"] and found[1].collapse
    assert found[0].seen == "100% of the calls could not be run"


def test_answers_that_are_read_and_all_wrong(chat, monkeypatch):
    found = signs(lines_of(letters_run(chat, monkeypatch, "grpo", "trainer.steps=3", env=WrongEnv)))
    assert [sign.name for sign in found] == ["zero: wrong", "groups agree"]
    assert found[0].seen == "no episode was paid" and not found[0].collapse


def test_a_sampler_with_broken_weights_is_a_reason(chat, monkeypatch):
    def breaks(policy: LocalPolicy, actor) -> None:
        policy.stats = SamplerStats()
        policy.model.embed.weight.data *= 30

    monkeypatch.setattr(LocalPolicy, "sync", breaks)
    overrides = ["trainer.dtype=bfloat16", "trainer.steps=3"]
    found = signs(lines_of(letters_run(chat, monkeypatch, "grpo", *overrides, env=SilentEnv)))
    assert "sampler" in [sign.name for sign in found] and found[0].step == 3


def test_a_run_that_learns_has_no_sign_and_a_solved_one_has_not_collapsed(chat, monkeypatch):
    found = signs(lines_of(letters_run(chat, monkeypatch, "grpo", "trainer.steps=14")))
    assert not [sign.name for sign in found if sign.collapse or sign.name.startswith("zero")]


def test_a_run_that_cannot_get_better_has_agreed_and_not_collapsed(chat, monkeypatch):
    class PaidEnv(LetterEnv):
        async def step(self, action):
            return StepResult(None, 1.0, done=True, stop_reason=StopReason.ANSWERED)

    found = signs(lines_of(letters_run(chat, monkeypatch, "grpo", "trainer.steps=3", env=PaidEnv)))
    assert [sign.collapse for sign in found if sign.name == "groups agree"] == [False]


def test_a_run_that_collapses_is_ended_and_its_healthy_checkpoint_is_kept(chat, monkeypatch, tmp_path):
    GrowingEnv.begun = 0
    record = letters_run(
        chat, monkeypatch, "ppo", "trainer.steps=11", "actor.lr=0", "rollout.max_tokens_per_turn=4", env=GrowingEnv
    )
    lines = lines_of(record)
    found = {sign.name: sign for sign in signs(lines)}
    assert {"reward falls", "calls an episode", "tokens an episode"} == set(found) and found["reward falls"].step == 10
    assert found["reward falls"].seen == "the reward fell from 1.00 to 0.00 in 5 steps' mean"
    run = RunDir(tmp_path / "run")
    for step in (4, 8):
        (run.checkpoints / f"step_{step:06d}").mkdir(parents=True)
    (run.path / "rollouts").mkdir()
    run.config.write_text(to_yaml(load_config("smoke")))
    for line in lines[:9]:
        run.metrics.append(line)
    refuse_collapse(run)  # not yet
    run.metrics.append(lines[9])
    with pytest.raises(
        AgentR1Error, match=r"stopped after step 10 .*checkpoint is \S+step_000004\. the reward fell from"
    ):
        refuse_collapse(run)
    assert [checkpoint.name for checkpoint in run.checkpoints.iterdir()] == ["step_000004"]
    page = write_report(run.path).read_text()
    assert "After step 10: the reward fell from 1.00 to 0.00" in page


def test_a_fall_that_is_over_is_not_told_as_if_it_lasted(chat, monkeypatch, tmp_path):
    DippingEnv.begun = 0
    lines = lines_of(letters_run(chat, monkeypatch, "ppo", "trainer.steps=16", "actor.lr=0", env=DippingEnv))
    assert [(sign.name, sign.step, sign.over) for sign in signs(lines)] == [("reward falls", 10, 15)]
    assert str(signs(lines[:12])[0]).startswith(
        "the reward fell from 1.00 to 0.00 in 5 steps' mean: updates were too large"
    )
    run = RunDir(tmp_path / "run")
    (run.path / "rollouts").mkdir(parents=True)
    run.config.write_text(to_yaml(load_config("smoke")))
    for line in lines:
        run.metrics.append(line)
    page = html.unescape(write_report(run.path).read_text())
    assert "Something went wrong here, and was over at the end." in page and "Something is wrong here." not in page
    assert "After step 10: the reward fell from 1.00 to 0.00 in 5 steps' mean; over after step 15<" in page


@pytest.mark.parametrize(
    ("levels", "falls"),
    [
        ((0.1, 1.0, 0.8), False),  # more than a tenth, less than half of what was gained
        ((0.5, 0.5, 0.45), False),  # more than half of what was gained (nothing), less than a tenth
        ((0.1, 1.0, 0.4), True),
        ((0.5, 0.5, 0.3), True),
    ],
)
def test_a_fall_is_half_of_the_rise_and_a_tenth(levels, falls):
    lines = [{STEP: 5 * i + k, "critic/score/mean": level} for i, level in enumerate(levels) for k in range(1, 6)]
    assert [sign.name for sign in new_signs(lines)] == ["reward falls"] * falls


@pytest.mark.parametrize(("swing", "falls"), [(0.05, True), (0.2, False)])
def test_a_fall_is_held_against_the_runs_own_noise(swing, falls):
    """The same fall of .2, in a run whose steps differ little and in one whose steps differ much."""
    lines = [
        {STEP: n, "critic/score/mean": (0.6 if n <= 10 else 0.4) + swing * (-1) ** n} for n in range(1, 21)
    ]  # means of five steps move by a fifth of the swing
    assert [sign.name for sign in new_signs(lines)] == ["reward falls"] * falls


def test_recorded_runs_that_were_held_back():
    """The runs that no threshold was chosen on: `benchmarks/sentinel.py`, whose table docs/lab/estimators.md prints."""
    page = (ROOT / "docs/lab/estimators.md").read_text()
    assert sentinel.table(sentinel.HELD_BACK) in page and sentinel.table(sentinel.CHOSEN_ON) in page
    alarms = {
        (arm, seed): [sign for sign in signs(lines) if sign.collapse]
        for arm, cold, seed, lines in sentinel.recorded()
        if cold == sentinel.HELD_BACK
    }
    healthy = [found for (arm, _), found in alarms.items() if arm == sentinel.HEALTHY]
    assert len(healthy) == 10 and not any(healthy)
    assert all(found for (arm, _), found in alarms.items() if arm != sentinel.HEALTHY)


def test_the_setting_does_not_end_a_healthy_run_that_dips(tmp_path):
    """Steps of a recorded run, one by one, as training writes them."""
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    (lines,) = (lines for *which, lines in sentinel.recorded() if which == [sentinel.HEALTHY, 1, 1])
    for line in lines:
        run.metrics.append(line)
        refuse_collapse(run)
    assert len(run.metrics.read()) == len(lines) == 32


def test_the_setting_ends_a_run_of_the_command_line(tmp_path, monkeypatch, micro_model, capsys):
    """A model that nobody has taught answers nothing: all groups agree."""
    monkeypatch.setenv("AGENT_R1_HOME", str(tmp_path))
    longer = ["trainer.steps=5", "trainer.save_every=1", "trainer.stop_on_collapse=true"]
    assert main("train", *a_step_of_maths(tmp_path, micro_model, "gsm8k", *longer), "--plain") == 1
    said = capsys.readouterr()
    assert (
        "stopped after step 3 (trainer.stop_on_collapse); no checkpoint is older than that. 3 steps in a row"
        in said.err
    )
    assert len((tmp_path / "runs/maths/metrics.jsonl").read_text().splitlines()) == 3


def test_a_policy_that_tries_nothing_new(chat, monkeypatch):
    """A policy without any doubt has no entropy left; the world changes, and it cannot."""

    class ChangingEnv(LetterEnv):
        begun = 0

        async def step(self, action):
            ChangingEnv.begun += 1
            return replace(await super().step(action), reward=0.5 * (ChangingEnv.begun <= 2 * 16 * 5))

    sure = random_model(len(chat.tokenizer), seed=2)
    sure.embed.weight.data *= 100
    record = letters_run(
        chat,
        monkeypatch,
        "ppo",
        "trainer.steps=10",
        "actor.lr=0",
        "rollout.temperature=0.01",
        env=ChangingEnv,
        model=sure,
    )
    assert {"entropy", "reward falls"} <= {sign.name for sign in signs(lines_of(record)) if sign.collapse}


def test_a_sampler_that_keeps_its_old_weights(chat, monkeypatch):
    def forgets(policy: LocalPolicy, actor) -> None:
        policy.stats = SamplerStats()

    monkeypatch.setattr(LocalPolicy, "sync", forgets)
    overrides = ["trainer.dtype=bfloat16", "trainer.steps=10", "actor.lr=0.05"]
    lines = lines_of(letters_run(chat, monkeypatch, "grpo", *overrides))
    assert lines[0][SAMPLER_GAP] < 0.05
    assert [sign.name for sign in signs(lines) if sign.name == "sampler"]


def test_an_example_of_a_cut_off_turn_stands_in_the_report(tmp_path):
    run = RunDir(tmp_path / "run")
    (run.path / "rollouts").mkdir(parents=True)
    run.config.write_text(to_yaml(load_config("smoke")))
    for step in (1, 2, 3):
        run.metrics.append({STEP: step, "critic/score/mean": 0.0, "stop/max_tokens": 0.75, "tool_calls/mean": 1.0})
    record = {
        "step": 1, "group_id": "1-0", "question": "Who?", "ground_truth": ["x"], "kind": "", "stop_reason": "max_tokens",
        "reward": 0.0, "reward_parts": {}, "metrics": {}, "rows": [], "steps": [{"text": "and so on and <so>", "info": {}}],
    }  # fmt: skip
    (run.path / "rollouts" / "step_000001.jsonl").write_text(json.dumps(record) + "\n")
    page = write_report(run.path).read_text()
    assert "75% of the episodes were cut off in the middle of a turn" in page
    assert "For example: and so on and &lt;so&gt;" in page


# ---------------------------------------------------------------------------------------------------------- host memory


def memory_signs(free: list[float]) -> list[Sign]:
    return [s for s in signs([{STEP: n, HOST_FREE: gib} for n, gib in enumerate(free, 1)]) if s.name == "host memory"]


def test_a_leak_of_host_memory_is_named_before_it_ends_the_run():
    noise = random.Random(0)
    (sign,) = memory_signs([180 - 1.5 * n + noise.gauss(0, 2) for n in range(60)])
    assert 30 <= sign.step <= 60 and not sign.collapse
    rate, left = map(float, re.search(r"falls by (\d+) MiB a step, and ([\d.]+) GiB are left", sign.seen).groups())
    assert rate == pytest.approx(1.5 * 1024, rel=0.1) and left == pytest.approx(136, abs=10)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "free",
    [
        lambda n, noise: 180 + noise.gauss(0, 10),  # other programs come and go
        lambda n, noise: 180 - 60 * (1 - math.exp(-n / 8)) + noise.gauss(0, 1),  # workers warm up
        lambda n, noise: 180 - 3 * (n % 20) + noise.gauss(0, 1),  # given back with each checkpoint
        lambda n, noise: 180 - 40 * (n > 50) + noise.gauss(0, 1),  # another program starts, and stays
        lambda n, noise: 180 - 0.01 * n,  # 10 MiB a step
    ],
)
def test_memory_that_is_given_back_is_no_leak(seed, free):
    noise = random.Random(seed)
    assert memory_signs([free(n, noise) for n in range(200)]) == []
