"""Play each episode with an agent of its own, through the gateway.

In: a task. Out: its trajectory, as from the episode loop. `agents.py` starts the agent, `server.py`
reads its requests, `episode.py` answers them from the policy, `matching.py` makes the rows,
`books.py` counts every token.

    agent (its own process)  --HTTP-->  GatewayEpisode  -->  Policy.generate(ids)
                                              |
                                         Trajectory  -->  rows, advantages, update: as always
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from agent_r1 import (
    AgentEnv,
    AgentFlowBase,
    BaseToolEnv,
    ChatFormat,
    ConfigError,
    Generation,
    Hermes,
    Outcome,
    Policy,
    Row,
    Sampling,
    StopReason,
    Task,
    Trajectory,
    WorldEnv,
    check_reward,
    maybe_await,
)
from agent_r1_recipes.gateway.agents import Ended, agents_of
from agent_r1_recipes.gateway.books import Books, Entry
from agent_r1_recipes.gateway.episode import GatewayEpisode, count_names, find_turn
from agent_r1_recipes.gateway.matching import Answer
from agent_r1_recipes.gateway.server import Reply, Request, serving
from agent_r1_recipes.gateway.settings import GatewaySettings
from agent_r1_recipes.gateway.wire import Refusal


@dataclass
class _Open:
    """What lives as long as episodes run in an event loop."""

    port: int
    gate: asyncio.Semaphore


class AgentFlow(AgentFlowBase):
    """A flow whose turns come from the policy, and everything between them from an agent."""

    def __init__(
        self,
        policy: Policy,
        chat: ChatFormat,
        limits: Any,
        make_env: Callable[[Row], AgentEnv],
        rollout: GatewaySettings,
    ):
        super().__init__(policy, chat, limits, make_env)
        self.rollout = rollout
        self.books = Books()
        self.counts: Counter[str] = Counter()
        self.causes: Counter[str] = Counter()
        self.agents = agents_of(
            rollout.agent, rollout.agent_python, tuple(rollout.agent_environment)
        )
        self.episodes: dict[str, GatewayEpisode] = {}
        self._users = 0

    # ---------------------------------------------------------------------------------- the gateway

    @asynccontextmanager
    async def _gateway(self) -> AsyncIterator[_Open]:
        """Share one server among the episodes of an event loop; then close the books."""
        self._users += 1
        if self._users == 1:
            self._opening = asyncio.create_task(self._open())
        try:
            yield await asyncio.shield(self._opening)
        except BaseException:
            # Its books are open, and the first error is the one to show.
            self._is_interrupted = True
            raise
        finally:
            self._users -= 1
            if self._users == 0:
                await self._stack.aclose()
                if not self._is_interrupted:
                    self._close_books()

    async def _open(self) -> _Open:
        self._is_interrupted = False
        self._stack = AsyncExitStack()
        self.agents.start()
        self._count_before = self._count_sampled()
        port = await self._stack.enter_async_context(serving(self.handle, admit=self.admit))
        self.agents.listen()
        self._stack.callback(self.agents.unlisten)
        return _Open(port, asyncio.Semaphore(self.rollout.agent_processes))

    def _count_sampled(self) -> int:
        """Return the sampler's own count of tokens; 0 for a policy without one (a demonstrator)."""
        stats = getattr(self.policy, "stats", None)
        return 0 if stats is None else stats.decode_tokens

    def _close_books(self) -> None:
        sampler_count = self._count_sampled() - self._count_before
        counts = getattr(self.policy, "stats", None) is not None
        self.causes.update(self.books.causes())
        self.counts.update(self.books.close(sampler_count if counts else None))

    def take_counts(self) -> tuple[Counter[str], Counter[str]]:
        """Return and empty the counts of the closed books, and the causes of losses."""
        counts = self.counts
        causes = self.causes
        self.counts = Counter()
        self.causes = Counter()
        return counts, causes

    def admit(self, request: Request) -> Reply | None:
        """Refuse a request without a key before its body is read."""
        try:
            self._route(request)
        except Refusal as refusal:
            return Reply.of(refusal.body(), refusal.status)
        return None

    async def handle(self, request: Request) -> Reply:
        """Answer one request of any agent."""
        episode: GatewayEpisode | None = None
        try:
            episode, path = self._route(request)
            if request.method == "GET" and path == "models":
                return Reply.of({"object": "list", "data": [{"id": "agent", "object": "model"}]})
            if request.method == "GET" and path == "tools":
                return Reply.of(episode.tools())
            if request.method != "POST":
                raise Refusal("use POST", 405)
            if path == "chat/completions":
                return await episode.complete(request)
            if path == "reward" and self.rollout.agent_reward == "agent":
                return episode.post_reward(request)
            if path.startswith("tools/"):
                return await episode.run_tool(path.removeprefix("tools/"), request.body)
            raise Refusal(
                f"the gateway has no {path[:60]!r}: it speaks chat completions. For openai-agents, "
                'call set_default_openai_api("chat_completions")',
                404,
            )
        except Refusal as refusal:
            if episode is not None:
                episode.events[f"refused_{refusal.status}"] += 1
                episode.refusals.append(str(refusal)[:300])
            return Reply.of(refusal.body(), refusal.status)
        except asyncio.CancelledError:
            raise
        except RecursionError:
            return Reply.of(Refusal("the body is nested too deeply").body(), 400)
        except Exception as error:
            # `finish` raises a policy's failure in the episode, too.
            message = f"the policy failed: {type(error).__name__}"
            return Reply.of(Refusal(message, 500, "server_error").body(), 500)

    def _route(self, request: Request) -> tuple[GatewayEpisode, str]:
        """Return a request's episode, by address or key, and the rest of its path."""
        words = request.words
        if words[0] == "episode" and len(words) > 1:
            key = words[1]
            words = words[2:]
        else:
            key = request.headers.get("authorization", "").removeprefix("Bearer ")
        if words[:1] == ["v1"]:
            words = words[1:]
        if key not in self.episodes:
            raise Refusal("unknown key, or its episode has ended", 401, "invalid_api_key")
        return self.episodes[key], "/".join(words)

    # ----------------------------------------------------------------------------------- an episode

    async def run(self, task: Task, sampling: Sampling) -> Trajectory:
        """Play one episode with its own agent; see `AgentFlowBase.run`."""
        async with self._gateway() as gateway, gateway.gate:
            env = self._environment(task.row)
            observation = await maybe_await(env.reset(task.row))
            episode = self._begin(task, sampling, env)
            self.episodes[episode.key] = episode
            try:
                end = await self.agents.play(
                    self._variables(episode, gateway.port),
                    task_of(task.row, observation.messages),
                    self.limits.timeout_s,
                )
                self._read_rewards(episode, end)
            finally:
                del self.episodes[episode.key]
                # Also after Ctrl-C: the sampler finishes what it samples, then its slot is free.
                await episode.finish()
            try:
                return await self._trajectory(episode, end)
            finally:
                await maybe_await(env.close())

    def _begin(self, task: Task, sampling: Sampling, env: BaseToolEnv) -> GatewayEpisode:
        return GatewayEpisode(
            task, sampling, self.policy, self.chat, env.dialect, self.limits.max_context, env
        )

    def _environment(self, row: Row) -> BaseToolEnv:
        env = self.make_env(row)
        if not (isinstance(env, BaseToolEnv) and isinstance(env.dialect, Hermes)):
            raise ConfigError(
                "rollout.agent requires an environment with tools in the Hermes dialect, such as "
                "env.name=hermes: the gateway reads calls and answers with it",
                code="agent_needs_hermes",
            )
        return env

    def _variables(self, episode: GatewayEpisode, port: int) -> dict[str, str]:
        """Return the agent's environment variables.

        Command lines are public, so no key is there.
        """
        base = f"http://127.0.0.1:{port}/episode/{episode.key}"
        variables = {
            "OPENAI_BASE_URL": f"{base}/v1",
            "OPENAI_API_BASE": f"{base}/v1",
            "OPENAI_API_KEY": episode.key,
            "AGENT_R1_TOOLS_URL": f"{base}/tools",
        }
        if self.rollout.agent_reward == "agent":
            variables["AGENT_R1_REWARD_URL"] = f"{base}/reward"
            variables["AGENT_R1_REWARD_KEY"] = episode.reward_key
        return variables

    async def _trajectory(self, episode: GatewayEpisode, end: Ended) -> Trajectory:
        """Score a finished episode, and enter it into the books."""
        task = episode.task
        conversations = episode.conversations
        answer, error = self._answer(episode, end)
        if error is None and answer is not None and answer.loss is not None:
            # Its outcome would be paid to another turn, which did not earn it.
            error = f"the scored turn is not trained: {CAUSES[answer.loss]}"
        stop = StopReason.ERROR
        outcome = Outcome()
        if error is None:
            stop = stop_of(answer, episode)
            try:
                outcome = await self._outcome(episode, answer, stop)
            except Exception as failure:
                error = f"outcome: {type(failure).__name__}: {failure}"
                stop = StopReason.ERROR
        if end.timed_out and error is not None:
            stop = StopReason.TIME_OUT
        steps, last = conversations.steps()
        if error is not None:
            steps = []
        elif last is not None:
            # As in the loop: the outcome is for the last action.
            last.reward += outcome.reward
            last.done = True
        calls = sum(len(step.info["tool_calls"]) for step in steps)
        counts = {"tool_calls": calls, "invalid_calls": 0, "failed_calls": 0}
        trajectory = Trajectory(
            steps,
            task.group_id,
            stop,
            task.row,
            reward_parts=outcome.parts,
            metrics=outcome.metrics | counts,
            error=error,
            score_name=outcome.score_name,
            truncated=outcome.truncated,
        )
        self._enter(trajectory, episode, end)
        return trajectory

    def _answer(self, episode: GatewayEpisode, end: Ended) -> tuple[Answer | None, str | None]:
        """Return the turn with the agent's answer, or why the episode failed."""
        sampled_answers = [one for one in episode.conversations.answers if one.turn is not None]
        last = f"; the last line of its standard error: {end.last_line}" if end.last_line else ""
        if end.timed_out:
            seconds = self.limits.timeout_s
            return None, f"the agent exceeded {seconds:g} s (env.episode_timeout_s){last}"
        if not sampled_answers and episode.refusals and not episode.has_overflow:
            return None, (
                f"the gateway refused all {len(episode.refusals)} requests of the agent: "
                f"{episode.refusals[0]}{last}"
            )
        if not sampled_answers and not episode.has_overflow:
            return None, (
                "the agent made no call that the gateway captured. It must use OPENAI_BASE_URL, "
                f"and make its client inside the function, not at import{last}"
            )
        if end.status and not episode.has_overflow:
            return None, f"the agent ended with exit code {end.status}{last}"
        reported_answers = [report["answer"] for report in end.reports if "answer" in report]
        if not reported_answers or not str(reported_answers[0]).strip():
            return (sampled_answers[-1] if sampled_answers else None), None
        answer, episode.argument = find_turn(str(reported_answers[0]), episode.conversations)
        if answer is None and not episode.has_overflow:
            return None, (
                f"not captured: the agent's answer {str(reported_answers[0])[:80]!r} occurs in no "
                "turn that the policy sampled, so its reward says nothing about the policy"
            )
        return answer, None

    async def _outcome(
        self, episode: GatewayEpisode, answer: Answer | None, stop: StopReason
    ) -> Outcome:
        """Return the outcome: by our environment's scorer, or as the agent's side reported it."""
        env = episode.env
        if isinstance(env, WorldEnv) and env.broken:  # a method hung, so the world is unknown
            raise RuntimeError(env.broken)
        if self.rollout.agent_reward == "agent":
            return self._read_outcome(episode)
        env.turns = len(episode.conversations.answers)
        if stop in (StopReason.ANSWERED, StopReason.NO_ANSWER):
            if answer is None:
                raise RuntimeError(f"the episode ended as {stop.value}, without a turn")
            env.final_turn = self.chat.turn_text(answer.require_generation().token_ids)
            if episode.argument is not None:  # the answer of a call such as final_answer
                env.final_turn = env.dialect.write_turn(episode.argument)
        outcome = await maybe_await(env.outcome(stop))
        check_reward(outcome.reward)
        return outcome

    def _read_outcome(self, episode: GatewayEpisode) -> Outcome:
        if episode.reward is None:
            episode.events["refused_reward"] += 1
            raise ValueError(
                "no reward was reported: POST it to AGENT_R1_REWARD_URL with AGENT_R1_REWARD_KEY, "
                'or write {"reward": 1.0} to file descriptor 3'
            )
        return Outcome(episode.reward, {"reported": episode.reward})

    def _read_rewards(self, episode: GatewayEpisode, end: Ended) -> None:
        """Take the reward from file descriptor 3.

        Standard output is never read: the model's text is printed there.
        """
        for report in end.reports:
            if "reward" not in report:
                continue
            if self.rollout.agent_reward == "environment":
                episode.events["ignored_reward"] += 1
                continue
            with suppress(Refusal):
                episode.set_reward(report["reward"])

    def _enter(self, trajectory: Trajectory, episode: GatewayEpisode, end: Ended) -> None:
        """Enter an episode into the books."""
        losses: dict[str, list[Generation]] = {}
        cause = trajectory.error or ""
        if trajectory.error is not None:
            losses["failed"] = [generation for _, generation in episode.generations]
            kind = "time_outs" if end.timed_out else "failures"
            self.books.events[kind] += 1
        else:
            for answer in episode.conversations.answers:
                if answer.turn is not None and answer.loss is not None:
                    losses.setdefault(answer.loss, []).append(answer.require_generation())
                    cause = CAUSES[answer.loss]
        count_names(self.books.events, episode.events)
        self.books.events["calls"] += len(episode.generations)
        for name, count in episode.conversations.cuts.items():
            self.books.events[f"cuts_{name}"] += count
        self.books.entries.append((trajectory, Entry(episode.generations, losses, cause)))


CAUSES = {
    "edited": "the agent sent a turn of the model back in other words",
    "undelivered": "the agent did not read an answer to its end, and never asked again",
}


def stop_of(answer: Answer | None, episode: GatewayEpisode) -> StopReason:
    """Return why the episode ended, as our loop would name it."""
    if answer is None:
        return StopReason.CONTEXT_OVERFLOW
    generation = answer.require_generation()
    if generation.finish_reason == "length":
        room = episode.max_context - len(answer.prompt_ids)
        small_room = room < episode.sampling.max_tokens
        return StopReason.CONTEXT_OVERFLOW if small_room else StopReason.MAX_TOKENS
    if episode.argument is not None:
        return StopReason.ANSWERED
    text = episode.chat.turn_text(generation.token_ids)
    stop = episode.env.stop(text, episode.env.extract_tool_calls(text))
    if stop is not None:
        return stop
    # It ended on a call: its own limit of turns, or a full context.
    return StopReason.CONTEXT_OVERFLOW if episode.has_overflow else StopReason.MAX_TURNS


def task_of(row: Row, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what an agent is given: the question, never the answer."""
    extra = row.get("extra_info") or {}
    return {
        "question": row["prompt"][-1]["content"],
        "messages": messages,
        "data_source": row["data_source"],
        "index": extra.get("index"),
    }
