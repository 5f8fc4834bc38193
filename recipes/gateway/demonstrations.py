"""Play a demonstrator through the gateway: the cold start clones what the agent shows.

In: a function that writes the next turn (`cold_start.demonstrator`), in the sampler's place. Out:
conversations with the system message and the tools of the agent itself. `cold_start/stage.py`
clones them.

    agent (its own process)  --HTTP-->  ScriptedEpisode  -->  the function
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from agent_r1 import (
    AgentEnv,
    ChatFormat,
    Generation,
    Message,
    Policy,
    Row,
    Sampling,
    Task,
    Trajectory,
    derive_seed,
)
from agent_r1_recipes.gateway.episode import GatewayEpisode
from agent_r1_recipes.gateway.flow import AgentFlow
from agent_r1_recipes.gateway.matching import Answer, as_text
from agent_r1_recipes.gateway.settings import GatewaySettings

WriteTurn = Callable[[Row, list[Message], random.Random], str]


@dataclass
class Play:
    """What was said in one episode."""

    contexts: list[list[Message]] = field(default_factory=list)
    """A conversation each. Messages that the agent wrote in the model's name have `given`."""
    tools: list[dict[str, Any]] | None = None


class NoModel(Policy):
    """Stands in for a model that is not asked."""

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, session: str | None = None
    ) -> Generation:
        raise RuntimeError("a demonstration asks no model")


class ScriptedEpisode(GatewayEpisode):
    """An episode whose turns a function writes."""

    write_turn: WriteTurn
    rng: random.Random

    async def _generate(self, answer: Answer, turn: Sampling) -> Generation:
        text = self.write_turn(self.task.row, self.history(answer), self.rng)
        ids = self.chat.turn_ids(text, self.dialect)
        # Log-probabilities of 0 do no harm: cloning is supervised.
        return Generation(ids, [0.0] * len(ids), "stop")

    def history(self, answer: Answer) -> list[Message]:
        """Return the conversation before an answer, with the turns as they were written."""
        messages: list[Message] = []
        if answer.parent is not None:
            messages = [*self.history(answer.parent), self.turn(answer.parent)]
        for message in answer.rest:
            text: Message = {"role": message["role"], "content": as_text(message)}
            if message["role"] == "assistant":
                text["given"] = True
            messages.append(text)
        return messages

    def turn(self, answer: Answer) -> Message:
        text = self.chat.turn_text(answer.require_generation().token_ids)
        return {"role": "assistant", "content": text}

    def play(self) -> Play:
        """Return the conversations. One that others continue is part of them."""
        answers = [one for one in self.conversations.answers if one.turn and one.loss is None]
        parents = [id(one.parent) for one in answers]
        last_turns = [one for one in answers if id(one) not in parents]
        contexts = [[*self.history(one), self.turn(one)] for one in last_turns]
        return Play(contexts, last_turns[-1].tools if last_turns else None)


class DemonstrationFlow(AgentFlow):
    """Play episodes with an agent and a function instead of a model."""

    def __init__(
        self,
        write_turn: WriteTurn,
        chat: ChatFormat,
        limits: Any,
        make_env: Callable[[Row], AgentEnv],
        rollout: GatewaySettings,
        seed: int,
    ):
        super().__init__(NoModel(), chat, limits, make_env, rollout)
        self.write_turn = write_turn
        self.seed = seed
        self.plays: dict[str, Play] = {}
        """Session -> what was said."""

    def _begin(self, task: Task, sampling: Sampling, env: Any) -> ScriptedEpisode:
        episode = ScriptedEpisode(
            task, sampling, self.policy, self.chat, env.dialect, self.limits.max_context, env
        )
        episode.write_turn = self.write_turn
        episode.rng = random.Random(derive_seed(self.seed, task.session))
        return episode

    def _enter(self, trajectory: Trajectory, episode: GatewayEpisode, end: Any) -> None:
        super()._enter(trajectory, episode, end)
        play = Play()
        if isinstance(episode, ScriptedEpisode) and trajectory.error is None:
            play = episode.play()
        self.plays[episode.task.session] = play
