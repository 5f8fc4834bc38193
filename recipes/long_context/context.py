"""Limit what a long episode's agent sees. Both wrappers rewrite any environment's observations.

    Window    the prompt and the last k results; from result k+1 on each turn sees its own context
    Summary   after k results the agent writes a summary, and continues from the prompt and that
              summary

In: the observations of an environment. Out: some of them with `Observation.rewrite`. Next: training
begins a row at each rewrite, so a token is trained on exactly what the policy saw when it sampled
it. A summary is an ordinary turn: sampled, mask 1, and credited with the episode's outcome,
although the environment never sees it. Its text comes back as data, which cannot contain control
tokens.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import TYPE_CHECKING

from agent_r1 import Action, AgentEnv, Message, Observation, Row, StepResult, StopReason

if TYPE_CHECKING:
    from agent_r1_recipes.long_context.settings import ContextSettings

ASK = "Write down what you know and what is left to do. All else will be forgotten."
NOTES_PREFIX = "Your notes: "


class Window(AgentEnv):
    """Show the prompt and the last `k` results, without the turns that caused them."""

    def __init__(self, env: AgentEnv, k: int):
        self.env = env
        self.k = k
        self.results: list[list[Message]] = []

    async def reset(self, row: Row) -> Observation:
        first = self.env.reset(row)
        if inspect.isawaitable(first):  # an environment's `reset` may be a coroutine
            first = await first
        self.first = first
        return first

    async def step(self, action: Action) -> StepResult:
        result = await self.env.step(action)
        observation = result.observation
        if observation is None:  # the episode is over
            return result
        self.results.append(observation.messages)
        if len(self.results) > self.k:
            messages = list(self.first.messages)
            for last_result in self.results[-self.k :]:
                messages += last_result
            result.observation = self.rewrite(messages, observation)
        return result

    def rewrite(self, messages: list[Message], observation: Observation) -> Observation:
        """Replace everything so far by `messages`; the tools are shown again."""
        return replace(observation, messages=messages, tools=self.first.tools, rewrite=True)

    def outcome(self, stop_reason: StopReason):
        return self.env.outcome(stop_reason)

    def close(self):
        return self.env.close()


class Summary(Window):
    """Ask for a summary after every `k` results.

    Such turns do not count against `env.max_turns`.
    """

    plain_request = ASK
    last_observation: Observation | None = None
    """The observation that the summary is about, while the next turn is a summary."""

    async def step(self, action: Action) -> StepResult:
        if self.last_observation is not None:
            # The action is the summary. It stands in the prompt's last message: the environment
            # never sees it, and no row contains both it and the results that it replaces.
            *others, last = self.first.messages
            content = f"{last['content']}\n{NOTES_PREFIX}{action.text.strip()}"
            observation = self.rewrite(
                [*others, last | {"content": content}], self.last_observation
            )
            self.last_observation = None
            return StepResult(observation)
        result = await self.env.step(action)
        observation = result.observation
        if observation is None:  # the episode is over
            return result
        self.results.append(observation.messages)
        if len(self.results) % self.k == 0:
            self.last_observation = observation
            extra = dict(observation.extra)
            if "state" in extra:
                # Writing notes is another decision than acting, so gigpo must not compare the two:
                # it gets its own state.
                extra["state"] = f"{extra['state']}\n{ASK}"
            asking = [*observation.messages, {"role": "user", "content": ASK}]
            result.observation = replace(observation, messages=asking, extra=extra)
        return result


def wrap(env: AgentEnv, config: ContextSettings) -> AgentEnv:
    """Wrap `env` in the context of `env.context`."""
    return {"window": Window, "summary": Summary}[config.context](env, config.window_results)
