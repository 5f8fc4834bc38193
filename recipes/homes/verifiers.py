"""Play our environments in verifiers: a taskset, and a harness that plays our episode loop.

In: a preset. Out: two classes, for a module that verifiers loads by its name:

    from agent_r1_recipes.homes.verifiers import verifiers_home

    SupportTaskset, SupportHarness = verifiers_home("support")
    __all__ = ["SupportTaskset", "SupportHarness"]

A harness of verifiers usually starts a program for each episode. It may also play in the process,
as long as each call of the model goes through the endpoint that verifiers gives it. Ours does so,
with the client of recipes/api. So questions, tools, limits and reward are those of training here;
the model, the sampling and the update are the other trainer's.
"""

from __future__ import annotations

import importlib
import random
import tempfile
from dataclasses import dataclass
from typing import Any

from agent_r1 import (
    BaseTool,
    ChatFormat,
    Config,
    Row,
    Sampling,
    Task,
    Trajectory,
    Workspace,
    load_config,
    make_loop,
    train_tokenizer,
)
from agent_r1_recipes.api.client import Client


@dataclass
class Home:
    """A preset's questions and its episodes."""

    config: Config
    rows: list[Row]
    tools: dict[str, BaseTool]
    chat: ChatFormat
    """Only for our own record of an episode: the tokens of the model are verifiers' business."""

    async def play(self, number: int, endpoint: str, secret: str, model: str) -> Trajectory:
        """Play one question with the model at an address. Errors are in the trajectory."""
        with tempfile.TemporaryDirectory(prefix="agent-r1-calls-") as folder:
            # The thoughts are sent back: verifiers takes an earlier turn without its thought for
            # an edited one, and begins another branch.
            changes = {"api": endpoint, "api_records": folder, "api_thoughts": True}
            rollout = self.config.rollout.model_copy(update=changes)
            client = Client(model, rollout)
            client.key = secret  # of this episode only, so it is in no environment variable
            try:
                loop = make_loop(client, self.chat, self.tools, rollout, self.config.env)
                session = f"{number}-{random.getrandbits(64):x}"
                task = Task(self.rows[number], str(number), session, number)
                limit = rollout.max_tokens_per_turn
                return await loop.play(task, Sampling(limit, temperature=rollout.temperature))
            finally:
                client.ledger.close()


def open_home(preset: str, *settings: str, split: str = "train") -> Home:
    """Open a preset with settings. Its data is made if it does not exist."""
    config = load_config(preset, list(settings), algorithm="grpo")
    workspace = Workspace(config)
    workspace.make_task()
    rows = [dict(row) for row in workspace.load_rows(split)]
    # A token for each byte, nearly: nothing that is counted by tokens is used.
    chat = ChatFormat(train_tokenizer(["-"], 300))
    return Home(config, rows, workspace.load_tools(), chat)


def verifiers_home(preset: str, *settings: str, split: str = "train") -> tuple[type, type]:
    """Return a taskset class and a harness class of a preset, for verifiers 0.4."""
    # Verifiers loads the callers of this function; our own environment lacks it.
    vf: Any = importlib.import_module("verifiers.v1")
    home = open_home(preset, *settings, split=split)

    class EpisodeResult(vf.State):
        """The result of an episode."""

        reward: float = 0.0
        metrics: dict[str, float] = {}

    class HomeTask(vf.Task[vf.TaskData, EpisodeResult]):
        """One question. The row with its answer stays here: a trace has the question only."""

        @vf.reward
        async def outcome(self, trace: Any) -> float:
            return trace.state.reward

        @vf.metric
        async def facts(self, trace: Any) -> dict[str, float]:
            return trace.state.metrics

    class HomeTaskset(vf.Taskset[HomeTask, vf.TasksetConfig]):
        """The questions of a split."""

        def load(self) -> Any:
            for row in home.rows:
                yield HomeTask(vf.TaskData(prompt=row["prompt"][-1]["content"]), self.config.task)

    class HomeHarnessConfig(vf.HarnessConfig):
        """No settings of its own: they are the preset's."""

    class HomeHarness(vf.Harness[HomeHarnessConfig]):
        """Our episode loop, in the process of verifiers."""

        APPENDS_SYSTEM_PROMPT = True
        EXECUTES_CODE = False
        NEEDS_CONTAINER = False

        async def launch(
            self,
            ctx: Any,
            trace: Any,
            runtime: Any,
            endpoint: str,
            secret: str,
            mcp_urls: dict[str, str],
            data: Any,
        ) -> Any:
            trajectory = await home.play(data.idx, endpoint, secret, ctx.model)
            if trajectory.error is not None:
                return vf.ProgramResult(1, "", trajectory.error)
            trace.state.reward = float(trajectory.reward)
            trace.state.metrics = numbers_of(trajectory)
            return vf.ProgramResult(0, "", "")

    return HomeTaskset, HomeHarness


def numbers_of(trajectory: Trajectory) -> dict[str, float]:
    """Return what verifiers records of an episode besides its reward."""
    numbers: dict[str, float] = {}
    for name, value in (trajectory.metrics | trajectory.reward_parts).items():
        if isinstance(value, int | float):
            numbers[name] = float(value)
    return numbers
