"""Room 5, the episode loop: nobody waits for the slowest, limits and seeds reach the policy,
failures stay where they are."""

from __future__ import annotations

import asyncio

import pytest
from conftest import ScriptedPolicy, call, fails_with, make_env_loop, question_row, task

from agent_r1.config.settings import EnvConfig
from agent_r1.core import (
    Generation,
    Observation,
    Sampling,
    Step,
    StepResult,
    StopReason,
    Trajectory,
)
from agent_r1.env import AgentEnv, HermesToolEnv, Outcome
from agent_r1.ground.errors import AgentR1Error
from agent_r1.rollout.episode import AgentEnvLoop, AgentFlowBase, Task, derive_seed
from agent_r1.rollout.rollouts import run_episodes
from agent_r1.rollout.training_rows import trajectory_rows
from agent_r1.tool import BaseTool

ANSWER = "<answer>Marn</answer>"


class Echo(BaseTool):
    name, description = "search", "Says what it was asked."
    parameters = {
        "type": "object",
        "properties": {"query": {"type": "string"}},
        "required": ["query"],
    }

    async def execute(self, args):
        return f"about {args['query']}"


def hermes_loop(policy, **limits) -> AgentEnvLoop:
    return make_env_loop(
        policy, lambda row: HermesToolEnv({"search": Echo()}, EnvConfig()), **limits
    )


def run(loop, *tasks: Task, sampling=Sampling(400), **options) -> list[Trajectory]:  # noqa: B008 (frozen)
    return asyncio.run(run_episodes(loop, tasks, sampling, **options))


def test_an_environment_is_closed_before_its_episode_is_over(chat):
    """A session with a server: what is not awaited stays open."""
    closed = []

    class Session(HermesToolEnv):
        async def close(self):
            await asyncio.sleep(0)
            closed.append(self.row["prompt"][-1]["content"])

    loop = make_env_loop(ScriptedPolicy(chat, [ANSWER]), lambda row: Session({}, EnvConfig()))
    played = asyncio.run(loop.run(task(), Sampling(400)))
    assert played.stop_reason is StopReason.ANSWERED and closed == ["Who founded Vexlor?"]


# ------------------------------------------------------------------------------------- side by side


def test_no_episode_waits_for_the_slowest(chat):
    """One episode cannot go on until all others have *finished*: in lockstep this would never
    end."""

    async def script(session, turn, prompt_ids):
        if session == "slow":
            await others_done.wait()
        return call(query="x") if turn < 2 else ANSWER

    def on_done(trajectory):
        order.append(trajectory.group_id)
        if len(order) == 5:
            others_done.set()

    async def main():
        nonlocal others_done
        others_done = asyncio.Event()
        tasks = [task(session=name, group=name) for name in ("a", "b", "slow", "c", "d", "e")]
        return await run_episodes(
            hermes_loop(ScriptedPolicy(chat, script)), tasks, Sampling(400), on_done
        )

    others_done, order = None, []
    trajectories = asyncio.run(asyncio.wait_for(main(), 20))
    assert order[-1] == "slow" and len(order) == 6
    # ... and they come back in the order of the tasks, whoever was first.
    assert [t.group_id for t in trajectories] == ["a", "b", "slow", "c", "d", "e"]
    assert all(t.stop_reason is StopReason.ANSWERED and len(t.steps) == 3 for t in trajectories)


# ---------------------------------------------------------------- what reaches the policy, and when


def test_each_turn_sees_everything_so_far(chat):
    policy = ScriptedPolicy(chat, [call(query="one"), call(query="two"), ANSWER])
    [trajectory] = run(hermes_loop(policy), task())
    assert [session for session, _, _ in policy.seen] == ["s"] * 3
    assert [ids for _, ids, _ in policy.seen] == [s.observation_ids for s in trajectory.steps]
    for earlier, later in zip(trajectory.steps, trajectory.steps[1:], strict=False):
        so_far = earlier.observation_ids + earlier.action_ids
        assert later.observation_ids[: len(so_far)] == so_far
    assert "about two" in chat.decode(trajectory.steps[2].observation_ids)
    assert policy.released == ["s"]


def test_a_turn_may_take_its_limit_or_what_the_context_leaves(chat):
    policy = ScriptedPolicy(chat, [call(query="x" * 20), ANSWER])
    first = len(chat.prompt_ids(question_row()["prompt"], [Echo().schema()]))
    [done] = run(hermes_loop(policy, max_tokens_per_turn=60, max_context=first + 100), task())
    second = len(done.steps[1].observation_ids)
    assert [s.max_tokens for _, _, s in policy.seen] == [60, min(60, first + 100 - second)]
    assert policy.seen[1][2].max_tokens < 60


def test_every_turn_has_a_seed_of_its_own_that_depends_on_the_task_alone(chat):
    def seeds(number):
        policy = ScriptedPolicy(chat, [call(query="x"), ANSWER])
        run(hermes_loop(policy), task(seed=number))
        return [sampling.seed for _, _, sampling in policy.seen]

    assert seeds(7) == seeds(7) and len({*seeds(7), *seeds(8)}) == 4
    assert seeds(None) == [None, None]


def test_derived_seeds_are_fixed_and_unrelated():
    assert derive_seed(0, "rollout", 1, 2, 3) == derive_seed(0, "rollout", 1, 2, 3)
    seeds = {
        derive_seed(run, step, sample)
        for run in range(10)
        for step in range(10)
        for sample in range(10)
    }
    assert len(seeds) == 1000 and all(0 <= s < 2**64 for s in seeds)
    assert derive_seed(1, 23) != derive_seed(12, 3)


# ------------------------------------------------------------ context management: rewritten context


class Forgetful(AgentEnv):
    """Shows only the newest word: its observations replace what came before."""

    def reset(self, row):
        self.turn = 0
        return Observation([{"role": "user", "content": "word 0"}])

    async def step(self, action):
        self.turn += 1
        if self.turn == 3:
            return StepResult(None, 1.0, done=True, stop_reason=StopReason.ANSWERED)
        return StepResult(
            Observation([{"role": "user", "content": f"word {self.turn}"}], rewrite=True), 1.0
        )


def test_a_rewritten_context_begins_a_new_prompt_and_a_new_row(chat):
    [done] = run(
        make_env_loop(ScriptedPolicy(chat, ["a", "b", "c"]), lambda row: Forgetful()), task()
    )
    prompts = [chat.prompt_ids([{"role": "user", "content": f"word {i}"}]) for i in range(3)]
    assert [s.observation_ids for s in done.steps] == prompts
    rows = trajectory_rows(done, 0)
    assert [row.input_ids for row in rows] == [
        p + s.action_ids for p, s in zip(prompts, done.steps, strict=True)
    ]
    assert [sum(row.rewards) for row in rows] == [1.0, 1.0, 1.0]


# ----------------------------------------------------------------------------------------- failures


class Failing(HermesToolEnv):
    """Raises where the row says so."""

    def reset(self, row):
        observation = super().reset(row)
        if row["extra_info"].get("fail") == "reset":
            raise RuntimeError("no connection")
        return observation

    async def step(self, action):
        if self.row["extra_info"].get("fail") == "step":
            raise RuntimeError("lost connection")
        if self.row["extra_info"].get("fail") == "silence":
            return StepResult(None)
        return await super().step(action)


def failing_tasks(*where: str | None) -> list[Task]:
    return [
        task(question_row(extra_info={"fail": fail}), session=str(i))
        for i, fail in enumerate(where)
    ]


def test_what_an_environment_raises_stays_in_its_trajectory(chat):
    policy = ScriptedPolicy(chat, lambda session, turn, ids: ANSWER)
    loop = make_env_loop(policy, lambda row: Failing({}, EnvConfig()))
    fine, reset, step, _ = run(loop, *failing_tasks(None, "reset", "step", None))
    assert (fine.stop_reason, fine.error) == (StopReason.ANSWERED, None)
    assert (reset.stop_reason, reset.error, reset.steps) == (
        StopReason.ERROR,
        "RuntimeError: no connection",
        [],
    )
    assert (step.stop_reason, step.error) == (StopReason.ERROR, "RuntimeError: lost connection")
    assert len(step.steps) == 1 and step.steps[0].done
    assert sorted(policy.released) == ["0", "1", "2", "3"]


def test_a_step_without_an_observation_ends_its_episode_and_no_other(chat):
    policy = ScriptedPolicy(chat, lambda session, turn, ids: ANSWER)
    loop = make_env_loop(policy, lambda row: Failing({}, EnvConfig()))
    silent, fine = run(loop, *failing_tasks("silence", None))
    assert silent.stop_reason is StopReason.ERROR
    assert silent.error == "step returned no observation, and the episode goes on"
    assert fine.stop_reason is StopReason.ANSWERED


class Broken(Echo):
    async def execute(self, args):
        raise ConnectionError("index gone")


def test_when_most_tool_calls_fail_the_run_stops_with_the_reason(chat):
    """Each agent gets to read the error, so no episode fails; trained on, all would learn not to
    search."""
    policy = ScriptedPolicy(chat, lambda session, turn, ids: (call(query="x"), ANSWER)[turn])
    loop = make_env_loop(policy, lambda row: HermesToolEnv({"search": Broken()}, EnvConfig()))
    assert run(loop, task())[0].metrics["failed_calls"] == 1
    with fails_with("tools_failed"):
        run(loop, *(task(session=str(i)) for i in range(6)))


def test_when_most_episodes_fail_the_run_stops_with_the_reason(chat):
    loop = make_env_loop(
        ScriptedPolicy(chat, lambda s, t, i: ANSWER), lambda row: Failing({}, EnvConfig())
    )
    with fails_with("episodes_failed"):
        run(loop, *failing_tasks("reset", None, "reset", "step"))


def test_a_failing_policy_stops_everything_with_its_own_error(chat):
    """One line for the user, not a group of exceptions; and the others do not go on in the
    background."""

    async def script(session, turn, prompt_ids):
        if session == "bad":
            raise AgentR1Error("the engine is out of memory")
        await asyncio.Event().wait()

    policy = ScriptedPolicy(chat, script)
    with pytest.raises(AgentR1Error, match="^the engine is out of memory$"):
        run(hermes_loop(policy), task(session="waits"), task(session="bad"))
    assert sorted(policy.released) == ["bad", "waits"]


def test_an_episode_that_takes_too_long_keeps_what_it_has(chat):
    async def script(session, turn, prompt_ids):
        if turn == 1:
            await asyncio.Event().wait()
        return call(query="x")

    policy = ScriptedPolicy(chat, script)
    done = asyncio.run(hermes_loop(policy, timeout_s=0.05).run(task(), Sampling(400)))
    assert done.stop_reason is StopReason.TIME_OUT and len(done.steps) == 1
    assert done.steps[0].done and done.reward == pytest.approx(-0.2)
    assert policy.released == ["s"]


def test_a_run_of_nothing_but_time_outs_ends_with_the_reason(chat):
    """Each would be paid as wrong, and training would go on as if the agent had chosen to be
    slow."""
    policy = ScriptedPolicy(chat, lambda session, turn, ids: asyncio.Event().wait())
    with fails_with("episodes_failed"):
        run(hermes_loop(policy, timeout_s=0.02), *(task(session=str(i)) for i in range(3)))


def test_a_time_out_of_the_policys_own_is_no_time_out_of_the_episode(chat):
    """A socket's, or Ray's: it is raised as any failure of a policy, and not scored as the agent's
    slowness."""

    async def script(session, turn, prompt_ids):
        raise TimeoutError("the rollout server does not answer")

    policy = ScriptedPolicy(chat, script)
    with pytest.raises(TimeoutError, match="the rollout server does not answer"):
        run(hermes_loop(policy), task())
    assert policy.released == ["s"]


def test_the_outcome_is_asked_for_exactly_once(chat):
    class Once(HermesToolEnv):
        def outcome(self, stop_reason):
            asked.append(stop_reason)
            return Outcome(1.0)

    asked = []
    [done] = run(
        make_env_loop(
            ScriptedPolicy(chat, [call(query="x"), ANSWER]), lambda r: Once({}, EnvConfig())
        ),
        task(),
    )
    assert asked == [StopReason.ANSWERED] and done.reward == 1.0


# ---------------------------------------------------------------------- full control: AgentFlowBase


class BestOfTwo(AgentFlowBase):
    """An example of a flow of one's own: sample two answers, keep the longer one."""

    async def run(self, task: Task, sampling: Sampling) -> Trajectory:
        prompt = self.chat.prompt_ids(list(task.row["prompt"]))
        tries = await asyncio.gather(
            *(self.policy.generate(prompt, sampling, f"{task.session}-{i}") for i in range(2))
        )
        best: Generation = max(tries, key=lambda g: len(g.token_ids))
        step = Step(prompt, best.token_ids, best.logprobs, reward=1.0, done=True)
        return Trajectory([step], task.group_id, StopReason.ANSWERED, task.row)


def test_a_flow_of_ones_own_runs_like_the_generic_one(chat):
    policy = ScriptedPolicy(
        chat, lambda session, turn, ids: "short" if session.endswith("0") else "much longer"
    )
    flow = BestOfTwo(policy, chat, hermes_loop(policy).limits)
    done = run(flow, task(session="x"), task(session="y"))
    assert [chat.decode(t.steps[0].action_ids) for t in done] == ["much longer<|im_end|>"] * 2
