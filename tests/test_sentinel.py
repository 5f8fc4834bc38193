"""Room 7: the sentinel names what goes wrong, on runs in which it really does."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace

import pytest
from conftest import random_model
from lab.experiments import sentinel
from letters import LetterEnv, SilentEnv, letters_run
from qa_files import a_step_of_maths
from runs import ROOT, main

from agent_r1.core import SAMPLER_GAP, StepResult, StopReason
from agent_r1.ground.errors import AgentR1Error
from agent_r1.model.sampler import LocalPolicy, SamplerStats
from agent_r1.training.run import stop_and_roll_back
from agent_r1.training.run_dir import RunDir
from agent_r1.watch.causes import BY_SIGN, CAUSES
from agent_r1.watch.log import HOST_FREE, STEP_KEY
from agent_r1.watch.sentinel import Sign, is_solved, new_signs, signs, solved_step
from agent_r1_recipes.diagnose.causes import TESTS


def test_each_cause_of_the_table_has_a_test_in_the_sentinel_or_in_diagnose():
    names_of_diagnose = {name for _, name, _ in TESTS}
    assert names_of_diagnose <= set(CAUSES)
    without_sign = {cause.name for cause in CAUSES.values() if not cause.sign}
    assert without_sign <= names_of_diagnose


class EndingEnv(LetterEnv):
    """Ends every episode in its first turn, as `ends` says, and pays nothing."""

    ends = StopReason.MAX_TOKENS

    async def step(self, action):
        return StepResult(None, done=True, stop_reason=self.ends)


class MisreadEnv(SilentEnv):
    """Each turn is a call that cannot be parsed."""

    async def step(self, action):
        call = {
            "name": "",
            "arguments": {},
            "ok": False,
            "error": "malformed_call",
            "content": "error",
        }
        return replace(await super().step(action), info={"tool_calls": [call]})


class WrongEnv(SilentEnv):
    """Each turn makes a call that works, and nothing is right."""

    async def step(self, action):
        call = {"name": "look", "arguments": {}, "ok": True, "error": None, "content": "a book"}
        return replace(await super().step(action), info={"tool_calls": [call]})


def lines_of(record) -> list[dict]:
    return [{STEP_KEY: step} | metrics for step, metrics in enumerate(record.metrics, start=1)]


@pytest.mark.parametrize("reason", ["max_tokens", "invalid_calls"])
def test_why_the_reward_is_zero(chat, monkeypatch, reason):
    monkeypatch.setattr(EndingEnv, "ends", StopReason(reason))
    found = signs(lines_of(letters_run(chat, monkeypatch, "ppo", "trainer.steps=3", env=EndingEnv)))
    assert [sign.name for sign in found] == [f"zero: {reason}", "zero: no call", "groups agree"]
    assert (found[0].step, found[0].stop_reason) == (3, reason)


@pytest.mark.parametrize(
    ("env", "why"), [(MisreadEnv, "zero: invalid calls"), (WrongEnv, "zero: wrong")]
)
def test_calls_that_nobody_understands_and_answers_that_are_all_wrong(chat, monkeypatch, env, why):
    found = signs(lines_of(letters_run(chat, monkeypatch, "grpo", "trainer.steps=3", env=env)))
    assert [(sign.name, sign.collapse) for sign in found] == [(why, False), ("groups agree", True)]


def test_a_run_that_learns_has_no_sign_and_a_solved_one_has_not_collapsed(chat, monkeypatch):
    found = signs(lines_of(letters_run(chat, monkeypatch, "grpo", "trainer.steps=14")))
    assert not [sign.name for sign in found if sign.collapse or sign.name.startswith("zero")]


def test_a_run_that_cannot_get_better_has_agreed_and_not_collapsed(chat, monkeypatch):
    class PaidEnv(LetterEnv):
        async def step(self, action):
            return StepResult(None, 1.0, done=True, stop_reason=StopReason.ANSWERED)

    found = signs(lines_of(letters_run(chat, monkeypatch, "grpo", "trainer.steps=3", env=PaidEnv)))
    assert [sign.collapse for sign in found if sign.name == "groups agree"] == [False]


def scored(scores: list[float], more: dict[str, list[float]] | None = None) -> list[dict]:
    """Lines of a run with these scores, one a step, and with other metrics."""
    columns = {"critic/score/mean": scores, **(more or {})}
    return [
        {STEP_KEY: n + 1} | {name: values[n] for name, values in columns.items()}
        for n in range(len(scores))
    ]


def test_a_run_that_collapses_is_ended_and_its_healthy_checkpoint_is_kept(tmp_path):
    grows = {
        "tool_calls/mean": [1.0] * 5 + [9.0] * 5,
        "response_length/mean": [8.0] * 5 + [40.0] * 5,
    }
    lines = scored([1.0] * 5 + [0.0] * 5, grows)
    found = {sign.name: sign for sign in signs(lines)}
    assert {"reward falls", "calls per episode", "tokens per episode"} <= set(found) and found[
        "reward falls"
    ].step == 10
    run = RunDir(tmp_path / "run")
    for step in (4, 8):
        (run.checkpoints / f"step_{step:06d}").mkdir(parents=True)
    for line in lines[:9]:
        run.metrics.append(line)
    stop_and_roll_back(run)  # not yet
    run.metrics.append(lines[9])
    with pytest.raises(AgentR1Error, match="step_000004"):
        stop_and_roll_back(run)
    assert [checkpoint.name for checkpoint in run.checkpoints.iterdir()] == ["step_000004"]


def test_a_fall_that_is_over_is_not_told_as_if_it_lasted():
    lines = scored([1.0] * 5 + [0.0] * 5 + [1.0] * 6)
    assert [(s.name, s.step, s.over) for s in signs(lines) if s.collapse] == [
        ("reward falls", 10, 15)
    ]


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
    lines = [
        {STEP_KEY: 5 * i + k, "critic/score/mean": level}
        for i, level in enumerate(levels)
        for k in range(1, 6)
    ]
    assert [sign.name for sign in new_signs(lines)] == ["reward falls"] * falls


@pytest.mark.parametrize(("swing", "falls"), [(0.05, True), (0.2, False)])
def test_a_fall_is_held_against_the_runs_own_noise(swing, falls):
    """The same fall of .2, in a run whose steps differ little and in one whose steps differ
    much."""
    lines = [
        {STEP_KEY: n, "critic/score/mean": (0.6 if n <= 10 else 0.4) + swing * (-1) ** n}
        for n in range(1, 21)
    ]  # means of five steps move by a fifth of the swing
    assert [sign.name for sign in new_signs(lines)] == ["reward falls"] * falls


def test_recorded_runs_that_were_held_back():
    """The runs that no threshold was chosen on: `lab/experiments/sentinel.py`, whose table
    docs/lab/estimators.md prints."""
    page = (ROOT / "docs/lab/estimators.md").read_text()
    assert sentinel.table(sentinel.HELD_BACK) in page and sentinel.table(sentinel.CHOSEN_ON) in page
    alarms = {
        (arm, seed): [sign for sign in signs(lines) if sign.collapse]
        for arm, cold, seed, lines in sentinel.read_records()
        if cold == sentinel.HELD_BACK
    }
    healthy = [found for (arm, _), found in alarms.items() if arm == sentinel.HEALTHY]
    assert len(healthy) == 10 and not any(healthy)
    assert all(found for (arm, _), found in alarms.items() if arm != sentinel.HEALTHY)


def test_the_setting_ends_a_run_of_the_command_line(tmp_path, monkeypatch, micro_model, capsys):
    """A model that nobody has taught answers nothing: all groups agree."""
    monkeypatch.setenv("AGENT_R1_HOME", str(tmp_path))
    longer = ["trainer.steps=5", "trainer.save_every=1", "trainer.stop_on_collapse=true"]
    assert main("train", *a_step_of_maths(tmp_path, micro_model, "gsm8k", *longer), "--plain") == 1
    assert (
        "stopped after step 3 (trainer.stop_on_collapse); no checkpoint is older"
        in capsys.readouterr().err
    )
    assert len((tmp_path / "runs/maths/metrics.jsonl").read_text().splitlines()) == 3


def test_a_policy_that_tries_nothing_new(chat, monkeypatch):
    """A policy without any doubt has no entropy left; the world changes, and it cannot."""

    class ChangingEnv(LetterEnv):
        begun = 0

        async def step(self, action):
            ChangingEnv.begun += 1
            return replace(
                await super().step(action), reward=0.5 * (ChangingEnv.begun <= 2 * 16 * 5)
            )

    sure = random_model(len(chat.tokenizer), seed=2)
    sure.embed.weight.data *= 100
    overrides = ["trainer.steps=10", "actor.lr=0", "rollout.temperature=0.01"]
    record = letters_run(chat, monkeypatch, "ppo", *overrides, env=ChangingEnv, model=sure)
    assert {"entropy", "reward falls"} <= {
        sign.name for sign in signs(lines_of(record)) if sign.collapse
    }


def test_a_sampler_that_keeps_its_old_weights(chat, monkeypatch):
    def forgets(policy: LocalPolicy, actor) -> None:
        policy.stats = SamplerStats()

    monkeypatch.setattr(LocalPolicy, "sync", forgets)
    overrides = [
        "trainer.dtype=bfloat16",
        "trainer.steps=10",
        "actor.lr=0.05",
        "rollout.samples_per_prompt=128",
    ]
    lines = lines_of(letters_run(chat, monkeypatch, "grpo", *overrides))
    assert lines[0][SAMPLER_GAP] < 0.05  # rounding, in the eight rows that are recomputed
    assert [sign.name for sign in signs(lines) if sign.name == "sampler"]


# -------------------------------------------------------------------------------------- host memory


def memory_signs(free: list[float]) -> list[Sign]:
    return [
        s
        for s in signs([{STEP_KEY: n, HOST_FREE: gib} for n, gib in enumerate(free, 1)])
        if s.name == "host memory"
    ]


def test_a_leak_of_host_memory_is_named_before_it_ends_the_run():
    noise = random.Random(0)
    (sign,) = memory_signs([180 - 1.5 * n + noise.gauss(0, 2) for n in range(60)])
    assert 30 <= sign.step <= 60 and not sign.collapse
    rate, left = map(
        float,
        re.search(
            r"falls by (\d+) MiB per step, and ([\d.]+) GiB are left", sign.evidence
        ).groups(),
    )
    assert rate == pytest.approx(1.5 * 1024, rel=0.1) and left == pytest.approx(136, abs=10)


@pytest.mark.parametrize(
    ("speed", "length", "reported"),
    [(300.0, 100.0, True), (600.0, 100.0, False), (300.0, 50.0, False), (None, 100.0, False)],
)
def test_a_sampler_that_slows_down_is_reported(speed, length, reported):
    """Shorter turns explain fewer tokens per second; step 1 compiles and does not count."""
    lines = []
    for step in range(1, 41):
        late = step > 25
        line = {STEP_KEY: step, "response_length/mean": length if late else 100.0}
        if speed is not None:
            line["perf/agent_tokens_per_s"] = 50.0 if step == 1 else speed if late else 1000.0
        lines.append(line)
    assert ("slow sampling" in [sign.name for sign in signs(lines)]) is reported


def test_advice_about_slow_sampling_names_no_engine():
    """A run on a CPU has neither vLLM nor verl."""
    assert not re.search("vllm|verl", str(BY_SIGN["slow sampling"]), re.IGNORECASE)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "free",
    [
        lambda n, noise: 180 - 3 * (n % 20) + noise.gauss(0, 1),  # given back with each checkpoint
        lambda n, noise: (
            180 - 40 * (n > 50) + noise.gauss(0, 1)
        ),  # another program starts, and stays
        lambda n, noise: 180 - 0.01 * n,  # 10 MiB a step
    ],
)
def test_memory_that_is_given_back_is_no_leak(seed, free):
    noise = random.Random(seed)
    assert memory_signs([free(n, noise) for n in range(200)]) == []


def agreed(em: list[float]) -> list[dict]:
    """Lines of a run in whose steps all groups agree, at these scores."""
    return scored(em, {"groups/zero_advantage": [1.0] * len(em), "reward/em": em})


def test_a_run_whose_groups_agree_on_the_right_answer_is_solved_and_has_no_sign():
    lines = scored([0.4, 0.6], {"groups/zero_advantage": [0.5] * 2}) + agreed([1.0, 0.97, 1.0])
    lines = [line | {STEP_KEY: n} for n, line in enumerate(lines, start=1)]
    assert signs(lines) == [] and is_solved(lines) and solved_step(lines) == 5
    assert not is_solved(lines[:4]) and solved_step(lines[:4]) is None


def test_a_recorded_run_of_sprint_is_solved_and_nothing_went_wrong():
    """Seed 0 at ee27c2e3: in steps 96 to 98 all groups agree, at reward 1.00."""
    columns = json.loads((ROOT / "tests" / "sprint_run.json").read_text())
    lines = scored(columns["critic/score/mean"], columns)
    assert signs(lines) == [] and solved_step(lines) == 98
    # With the same agreement at half the reward it would be a sign.
    halves = [line | {"reward/em": 0.5 * line["reward/em"]} for line in lines]
    assert [sign.name for sign in signs(halves)] == ["groups agree"]


def test_groups_that_agree_on_wrong_answers_are_a_sign_and_not_solved():
    lines = agreed([0.5, 0.5, 0.5])
    assert [sign.name for sign in signs(lines)] == ["groups agree"]
    assert solved_step(lines) is None


def test_a_penalty_that_costs_more_than_answers_earn_is_a_sign():
    """A tenth of the plays run out of turns, at .2 each; two in a hundred are right."""
    columns = {"reward/em": [0.01] * 5, "reward/format": [-0.02] * 5}
    [sign] = new_signs(scored([-0.01] * 5, columns))
    assert (sign.name, sign.collapse) == ("penalty", False)
    assert sign.evidence == ("right answers earned 0.010 per episode, malformed endings cost 0.020")
    columns["reward/em"] = [0.03] * 5
    assert new_signs(scored([0.01] * 5, columns)) == []
