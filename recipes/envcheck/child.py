"""Play the policies in a process of their own: `python -m agent_r1_recipes.envcheck.child`.

In: a plan in JSON on stdin. Out: events, a line of JSON each, on the descriptor that the plan
names. Next: `command.py`, the parent, which ends this process at a limit and still has the events.

The environment's own output goes to stdout and stderr, which the parent reads and limits.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import importlib
import inspect
import json
import os
import random
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent_r1 import (
    Action,
    AgentEnv,
    AgentR1Error,
    BaseTool,
    Config,
    ConfigError,
    HermesToolEnv,
    Message,
    Observation,
    Outcome,
    Row,
    StepResult,
    StopReason,
    Workspace,
    load_config,
    make_env,
    maybe_await,
    read_file,
)
from agent_r1_recipes.envcheck.episodes import SHOWN_CHARACTERS, Episode, play_episode
from agent_r1_recipes.envcheck.policies import FAMILIES, Case, Policy
from agent_r1_recipes.envcheck.verdicts import AFTER, ORACLE

ROUNDS = (4, 4, 8, 16, 16, 32)
"""Questions of each round: all policies have played as many when the time is over."""
ORACLE_PLAYS = 8
"""Plays of a question by a demonstrator, of which the best is the oracle's."""
REPLAYED_EPISODES = 8
"""Episodes whose turns are played again, to compare."""
REPLAY_POLICY = "random calls, then a random answer"
"""The policy whose turns are played again."""
ORACLE_FUNCTIONS = ("expert", "demonstrate", "play")
"""Names of a file's function that plays well, the best one first."""
SHORT = 60
"""Characters of a turn that may be a word of the environment's own form."""


# ------------------------------------------------------------------------------- what to check


def configuration(name: str | None, preset: str | None, settings: list[str], n: int) -> Config:
    """Load the settings of a preset, a folder, a class or an environment.

    Raises ConfigError for a name that is none of these.
    """
    if preset or not name:
        return load_config(preset, settings, trains=False)
    rows = [f"data.train={n}", "data.val=1", "data.test=1"]
    if (Path(name) / "preset.yaml").is_file():
        return load_config(str(Path(name) / "preset.yaml"), settings, trains=False)
    if (Path(name) / "task.toml").is_file():
        return load_config("harbor", [f"data.source={name}", *settings], trains=False)
    if ":" in name:
        own = own_functions(name)
        return load_config("small", [f"env.name={name}", *rows, *own, *settings], trains=False)
    try:
        return load_config(name, settings, trains=False)
    except ConfigError as error:
        if error.code != "unknown_preset":
            raise
    world = [f"env.name={name}", "env.tools=[]", "data.name=seeds", *rows]
    try:
        config = load_config("small", [*world, *settings], trains=False)
        Workspace(config).dialect  # noqa: B018 - this resolves env.name
        return config
    except ConfigError as error:
        if error.code != "unknown_name":
            raise
    raise ConfigError(
        f"env check {name}: there is no preset, folder, environment or FILE.py:CLASS of that name; "
        "`agent-r1 env check --help` has examples",
        code="unknown_name",
    )


def own_functions(name: str) -> list[str]:
    """Name the rows and the demonstrator that the class's own file has."""
    rest = name.partition(":")[2]
    place = name.rpartition(":")[0]
    if ":" in rest or not place.endswith(".py"):
        return []  # gym:FILE.py:Class brings its own
    try:
        tree = ast.parse(read_file(Path(place)).decode())
    except (OSError, SyntaxError, ValueError):
        return ["data.name=seeds", "env.tools=[]"]  # loading it reports the fault
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    rows = f"{place}:questions" if "questions" in functions else "seeds"
    settings = ["env.tools=[]", f"data.name={rows}"]
    for function in ORACLE_FUNCTIONS:
        if function in functions:
            settings.append(f"cold_start.demonstrator={place}:{function}")
            break
    return settings


def load_function(name: str) -> Callable[..., str]:
    """Import FILE.py:FUNCTION or MODULE:FUNCTION, which the user or a preset of the user named.

    Raises ConfigError if there is none.
    """
    place, _, attribute = name.rpartition(":")
    if place.endswith(".py"):
        path = Path(place).resolve()
        sys.path.insert(0, str(path.parent))
        place = path.stem
    try:
        function = getattr(importlib.import_module(place), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"the oracle {name} cannot be imported: {error}", code="missing_code"
        ) from None
    return function


def floor_of(config: Config, env: AgentEnv) -> tuple[float | None, str]:
    """Return the declared floor and its reason: of the settings, else of the user's class.

    Raises ConfigError for a floor that is no share.
    """
    if config.env.floor is not None:
        return config.env.floor, config.env.floor_reason
    world = getattr(env, "cls", type(env))
    floor = getattr(world, "floor", None)
    if floor is None:
        return None, ""
    if not isinstance(floor, int | float) or not 0 <= floor < 1:
        raise ConfigError(
            f"{world.__name__}.floor is {floor!r}; it is a share from 0 to below 1",
            code="out_of_range",
        )
    return float(floor), str(getattr(world, "floor_reason", ""))


def oracle_of(named: str | None, config: Config) -> tuple[Callable[..., str] | None, str]:
    """Return the function that plays well, and its name; None if there is none.

    A demonstrator errs on purpose. If its module has a function `expert`, that is the oracle.
    """
    if named:
        return load_function(named), named
    name = config.cold_start.demonstrator
    if not name:
        return None, "the row's answer"
    demonstrator = load_function(name)
    expert: Any = getattr(sys.modules[demonstrator.__module__], "expert", None)
    if expert is not None:
        return expert, f"{name.rpartition(':')[0]}:expert"
    return demonstrator, f"{name}, the best of {ORACLE_PLAYS} plays"


# ------------------------------------------------------------------------------------- playing


@dataclass
class Run:
    """One check: its configuration, and what has been played."""

    config: Config
    rows: list[Row]
    tools: dict[str, BaseTool]
    send: Callable[[dict[str, Any]], None]
    oracle: Callable[..., str] | None
    deadline: float
    oracles: dict[int, Episode] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)
    replayed: list[Episode] = field(default_factory=list)
    moves: dict[int, int] = field(default_factory=dict)
    """Of the episodes that are played in turns."""
    best: float = float("-inf")
    """The oracle's highest reward so far."""

    def __post_init__(self) -> None:
        self.dialect = Workspace(self.config).dialect

    def row(self, question: int) -> Row:
        return self.rows[question % len(self.rows)]

    async def play(
        self, name: str, question: int, write: Callable[[Any], Any], in_turns: bool = False
    ) -> Episode:
        """Play an episode. `write` gets the environment and returns the function of turns.

        With `in_turns`, episodes that are played at the same time take their steps in turn.
        """
        episode = Episode(name, question)
        row = self.row(question)

        def report(text: str) -> None:
            self.send({"turn": text[:SHOWN_CHARACTERS], "policy": name, "question": question})

        env: Any = make_env(row, self.tools, self.config.env)
        write_turn = write(env)
        if not in_turns:
            return await play_episode(env, row, episode, write_turn, report)
        self.moves[id(episode)] = 0
        try:
            env = InTurns(env, self.moves, id(episode))
            return await play_episode(env, row, episode, write_turn, report)
        finally:
            del self.moves[id(episode)]

    async def by_policy(self, name: str, policy: Policy, question: int) -> Episode:
        """Play a policy of `policies.py`, and send the record."""
        other = self.oracles.get(question - 1)
        mine = self.oracles.get(question)
        rng = random.Random(f"{name}/{question}")
        case = Case(self.row(question), question, self.dialect, rng, words=self.words)
        case.oracle = mine.turns if mine else []
        case.other = other.turns if other else []

        def write(env: Any) -> Callable[[list[Message]], str]:
            def turn(history: list[Message]) -> str:
                case.tools = getattr(env, "tools", None)  # a server's are known after `reset`
                case.stateful = getattr(env, "stateful", False)
                return policy(case, history)

            return turn

        return await self.play(name, question, write)

    async def by_oracle(self, question: int) -> None:
        """Play a question as well as possible, and keep the best play."""
        row = self.row(question)
        plays: list[Callable[[random.Random], Callable[[list[Message]], str]]] = []
        answers = list((row.get("reward_model") or {}).get("ground_truth") or [])
        if answers:
            turn = self.dialect.write_turn(str(answers[0])) or str(answers[0])
            plays.append(lambda rng: lambda history: turn)
        if self.oracle:
            plays += [_oracle_play(self.oracle, row)] * ORACLE_PLAYS
        best: Episode | None = None
        for number, play in enumerate(plays):
            write = play(random.Random(f"oracle/{question}/{number}"))
            episode = await self.play(ORACLE, question, lambda env, write=write: write)
            # With equal rewards the play with calls is kept: other policies repeat its calls.
            if best is None or episode.reward >= best.reward:
                best = episode
            if best.reward >= self.best and number > 0:
                break
        if best:
            self.best = max(self.best, best.reward)
            self.oracles[question] = best
            self.words += [turn for turn in best.turns if len(turn) <= SHORT]
            self.send({"episode": best.record()})

    def is_another(self, question: int) -> bool:
        """Return whether the question before has another text, answer and solution."""
        mine, other = self.oracles.get(question), self.oracles.get(question - 1)
        if not mine or not other or mine.turns == other.turns:
            return False
        rows = [self.row(question), self.row(question - 1)]
        texts = [row["prompt"][-1]["content"] for row in rows]
        answers = [list((row.get("reward_model") or {}).get("ground_truth") or []) for row in rows]
        return texts[0] != texts[1] and (not answers[0] or answers[0] != answers[1])

    async def play_question(self, question: int) -> None:
        """Play all policies: empty ones first, then the oracle, then the others."""
        for name, policy in FAMILIES["empty"].items():
            self.send({"episode": (await self.by_policy(name, policy, question)).record()})
        await self.by_oracle(question)
        for name, policy in FAMILIES["empty"].items():
            if question in self.oracles:
                again = await self.by_policy(name, policy, question)
                again.policy = AFTER + name
                self.send({"episode": again.record()})
        for family, policies in FAMILIES.items():
            for name, policy in policies.items():
                if family == "empty" or (family == "another's" and not self.is_another(question)):
                    continue
                episode = await self.by_policy(name, policy, question)
                self.send({"episode": episode.record()})
                if name == REPLAY_POLICY and len(self.replayed) < REPLAYED_EPISODES:
                    self.replayed.append(episode)

    async def all_rounds(self, n: int) -> None:
        """Play rounds until the questions or the time are over."""
        question = 0
        for size in rounds(n):
            if question and time.monotonic() > self.deadline:
                self.send({"late": question})
                break
            for _ in range(size):
                await self.play_question(question)
                question += 1
        for episode in self.replayed:
            self.send({"replay": episode.turns, "question": episode.question})
            await self.play_again(episode.turns, episode.question)

        # Training plays many episodes side by side, so what they share would mix them up.
        for number in range(0, len(self.replayed), 2):
            first = self.replayed[number]
            second = self.replayed[(number + 1) % len(self.replayed)]
            plays = [self.replay(one.turns, one.question, True) for one in (first, second)]
            for episode in await asyncio.gather(*plays):
                self.send({"interleaved": episode.record()})

    async def play_again(self, turns: list[str], question: int) -> None:
        """Play given turns, and send the trace."""
        episode = await self.replay(turns, question)
        self.send({"again": episode.record()})

    async def replay(self, turns: list[str], question: int, in_turns: bool = False) -> Episode:
        rest = iter(turns)
        name = "the same turns"
        return await self.play(name, question, lambda env: lambda h: next(rest, ""), in_turns)


class InTurns:
    """An environment that waits until the other episodes have made as many moves.

    Worlds have threads of their own, so on a busy machine one could end before the other begins.
    """

    def __init__(self, env: AgentEnv, moves: dict[int, int], name: int):
        self.env = env
        self.moves = moves
        self.name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)

    async def reset(self, row: Row) -> Observation:
        return await self.move(self.env.reset, row)

    async def step(self, action: Action) -> StepResult:
        return await self.move(self.env.step, action)

    async def outcome(self, stop: StopReason) -> Outcome:
        return await self.move(self.env.outcome, stop)

    async def move(self, function: Callable[[Any], Any], argument: Any) -> Any:
        await asyncio.sleep(0)  # the others count their moves, too, from here on
        while min(self.moves.values()) < self.moves[self.name]:
            await asyncio.sleep(0.001)
        try:
            return await maybe_await(function(argument))
        finally:
            self.moves[self.name] += 1


def _oracle_play(
    oracle: Callable[..., str], row: Row
) -> Callable[[random.Random], Callable[[list[Message]], str]]:
    """Return a function from a generator to one play of the oracle."""
    takes_rng = len(inspect.signature(oracle).parameters) > 2

    def play(rng: random.Random) -> Callable[[list[Message]], str]:
        def turn(history: list[Message]) -> str:
            arguments: list[Any] = [row, list(history)]
            if takes_rng:
                arguments.append(rng)
            try:
                return str(oracle(*arguments))
            except Exception as error:
                raise ConfigError(
                    f"the oracle failed: {type(error).__name__}: {error}", code="broken_code"
                ) from error

        return turn

    return play


def rounds(n: int) -> Iterator[int]:
    """Yield the sizes of rounds, `n` in all."""
    rest = n
    for size in [*ROUNDS, n]:
        if rest <= 0:
            return
        yield min(size, rest)
        rest -= size


# ------------------------------------------------------------------------------------ the process


def limit_process(memory: int) -> None:
    """Limit data and files of this process; the parent limits time and output."""
    limits = {"RLIMIT_FSIZE": 256 << 20, "RLIMIT_CORE": 0, "RLIMIT_DATA": memory}
    for name, most in limits.items():
        with contextlib.suppress(ValueError, OSError, AttributeError):
            resource.setrlimit(getattr(resource, name), (most, most))


def main() -> None:
    plan = json.loads(sys.stdin.readline())
    limit_process(plan["memory"])

    def send(event: dict[str, Any]) -> None:
        os.write(plan["events"], json.dumps(event).encode() + b"\n")

    try:
        config = configuration(plan["name"], plan["preset"], plan["settings"], plan["questions"])
        workspace = Workspace(config)
        workspace.make_task()
        rows = workspace.load_rows("train")
        random.Random(0).shuffle(rows)
        oracle, title = oracle_of(plan["oracle"], config)
        late = time.monotonic() + plan["seconds"]
        run = Run(config, rows, workspace.load_tools(), send, oracle, late)
        env = make_env(rows[0], run.tools, config.env)
        answers = getattr(type(env), "outcome", None) is HermesToolEnv.outcome
        floor, reason = floor_of(config, env)
        send({
            "ready": True, "oracle": title, "floor": floor, "floor_reason": reason,
            "format_penalty": config.env.format_penalty if answers else 0.0,
        })  # fmt: skip
        if plan["replay"]:
            for turns, question in plan["replay"]:
                asyncio.run(run.play_again(turns, question))
        else:
            asyncio.run(run.all_rounds(plan["questions"]))
        send({"end": True})
    except AgentR1Error as error:
        send({"refused": " ".join(str(error).split()), "exit_code": error.exit_code})
    except MemoryError:
        send({"refused": "out of memory; raise --memory-gb", "exit_code": 1})


if __name__ == "__main__":
    main()
