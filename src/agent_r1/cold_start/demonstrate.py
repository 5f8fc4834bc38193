"""Collect demonstrations of a task, played by a user-defined function or recorded in a file.

In: a function from a row and the conversation so far to the agent's next turn, or recorded
conversations. Out: training sequences for `clone.py`, and texts for the tokenizer. Next:
`cold_start/stage.py`.

    from agent_r1 import Hermes

    def demonstrate(row, history, rng):
        if history[-1]["role"] != "tool":
            return Hermes.call("calculator", expression=row["prompt"][-1]["content"])
        return Hermes.answer(history[-1]["content"])

It may make mistakes on purpose: RL learns from the difference between better and worse turns, and a
clone of a perfect player shows none.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from agent_r1.chat.format import ChatFormat
from agent_r1.cold_start.recorded import HARMLESS, read_conversation, schema_name
from agent_r1.config import plugins, tables
from agent_r1.config.settings import EnvConfig, RolloutConfig
from agent_r1.core import (
    Generation,
    Message,
    Observation,
    Policy,
    Row,
    Sampling,
    Step,
    StopReason,
    Trajectory,
)
from agent_r1.data.json_files import json_records
from agent_r1.env import AgentEnv, Dialect, brings_tools, dialect_of, make_env
from agent_r1.env.hermes import HERMES
from agent_r1.ground import bounds
from agent_r1.ground.errors import AgentR1Error, ConfigError
from agent_r1.ground.fields import describe_counts
from agent_r1.ground.ui import say
from agent_r1.rollout.episode import AgentEnvLoop, AgentFlowBase, Limits, Task, derive_seed
from agent_r1.tool import BaseTool

if TYPE_CHECKING:
    from agent_r1.rollout.training_rows import TrainingRow  # PyTorch comes with it

Demonstrate = Callable[..., str]
"""Maps (row, history) or (row, history, rng) to the agent's next turn as text, tags included."""

WriteTurn = Callable[[Row, list[Message], random.Random], str]
"""Maps (row, history, rng) to the next turn, or raises ConfigError: a checked demonstrator."""

FEW = 1000
"""Questions below which a cold start plays them again, and holds some of them out.

A tiny model learns 200 demonstrations by heart in 650 steps. Afterwards all samples of a question
agree, and RL has nothing to compare."""
MOST_PLAYS = 8
"""Plays of a question, at most."""
BEST_SHARE = 0.8
"""Share of the best plays in what the second phase clones: of few demonstrations, wrong ones would
cover up what the first phase has learned."""
MOST_REPEATS = 3
"""Times that the best plays are added for this share, at most."""

RECORDED_EXAMPLE = (
    '{"messages": [{"role": "user", "content": "..."}, '
    '{"role": "assistant", "content": "<answer>...</answer>"}]}'
)
"""One line of recorded demonstrations."""


CAPITALISED_NAME = re.compile(r"[A-Z]\w*(?:[ '-][A-Z]\w*)*")
"""Matches a name: consecutive words with capitals."""


@dataclass(frozen=True)
class Demonstration:
    """One demonstration as messages."""

    messages: list[Message]
    """Assistant turns are cloned, except those with `given`, which the agent's program wrote."""
    tools: list[dict[str, Any]] | None  # schemas of the agent's tools
    score: float | None = None  # by the environment; None if recorded elsewhere
    question: str = ""
    """What the demonstrations of one question have in common.

    Held-out ones share none with the cloned ones.
    """
    place: str = ""
    """File and line of a recorded one. Its text is somebody else's."""


# ------------------------------------------------------------------------------------------- played


class _Played(AgentEnvLoop, Policy):
    """One episode of the usual loop, with the function as its policy."""

    def __init__(
        self,
        write_turn: WriteTurn,
        chat: ChatFormat,
        limits: Limits,
        make_env: Callable[[Row], AgentEnv] | None,
        row: Row,
        rng: random.Random,
    ):
        super().__init__(self, chat, limits, make_env)
        self.write_turn = write_turn
        self.row = row
        self.rng = rng
        self.history: list[Message] = []
        self.contexts: list[list[Message]] = []
        """Messages in the context, from one rewrite to the next."""
        self.tools: list[dict[str, Any]] | None = None

    def observe(self, steps: list[Step], observation: Observation) -> list[int]:
        self.history += observation.messages
        if not steps or observation.rewrite:
            self.contexts.append([])
        self.contexts[-1] += observation.messages
        self.tools = self.tools if steps else observation.tools
        return super().observe(steps, observation)

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, session: str | None = None
    ) -> Generation:
        text = self.write_turn(self.row, list(self.history), self.rng)
        for messages in (self.history, self.contexts[-1]):
            messages.append({"role": "assistant", "content": text})
        ids = self.chat.turn_ids(text, HERMES)  # `byte_chat` has its tags
        return Generation(ids, [0.0] * len(ids), "stop")

    def release(self, session: str) -> None:
        """Do nothing: a function keeps no session."""


def make_writer(demonstrate: Demonstrate) -> WriteTurn:
    """Return `demonstrate` with checks. Its faults become a ConfigError with the question."""
    # Here and not in each turn: it takes 19 microseconds, and thousands of turns are written.
    takes_rng = len(inspect.signature(demonstrate).parameters) > 2

    def write_turn(row: Row, history: list[Message], rng: random.Random) -> str:
        rest = (rng,) if takes_rng else ()
        question = row["prompt"][-1]["content"]
        try:
            text = demonstrate(row, history, *rest)
        except Exception as error:
            raise ConfigError(
                f"the demonstrator failed on {question[:80]!r}: "
                f"{plugins.error_location(error)}{type(error).__name__}: {error}",
                code="broken_code",
            ) from error
        if not isinstance(text, str) or not text.strip():
            raise ConfigError(
                f"the demonstrator ({plugins.source_location(demonstrate)}) returned {text!r} "
                f"on {question[:80]!r}; it returns the agent's next turn as text, such as "
                "Hermes.call('search', query='...') or Hermes.answer('...')",
                code="wrong_return_value",
            )
        return text

    return write_turn


def demonstrator_of(name: str) -> Demonstrate:
    """Load the demonstrator `name`. Raise ConfigError if it is not one."""
    demonstrator = plugins.load_trusted(name, "cold_start.demonstrator")
    if not callable(demonstrator) or not 2 <= len(inspect.signature(demonstrator).parameters) <= 3:
        raise ConfigError(
            f"cold_start.demonstrator={name} is not a demonstrator; write `def demonstrate(row, "
            "history, rng)`, which returns the agent's next turn",
            code="wrong_code",
        )
    return demonstrator


class _Plays(AgentFlowBase):
    """A flow with a separate player for every episode."""

    def __init__(
        self,
        write_turn: WriteTurn,
        chat: ChatFormat,
        limits: Limits,
        make_env: Callable[[Row], AgentEnv],
        seed: int,
    ):
        super().__init__(None, chat, limits, make_env)
        self.write_turn = write_turn
        self.seed = seed
        self.plays: dict[str, _Played] = {}

    async def run(self, task: Task, sampling: Sampling) -> Trajectory:
        rng = random.Random(derive_seed(self.seed, task.session))
        # A row of its own for the function, too: it may cross off what it has done.
        row = copy.deepcopy(task.row)
        player = _Played(self.write_turn, self.chat, self.limits, self.make_env, row, rng)
        self.plays[task.session] = player
        return await player.run(task, sampling)


def limit_of(reason: StopReason, env: EnvConfig) -> str:
    """Describe the setting of a stop reason, to complete "the demonstrator must answer"."""
    limits = {
        StopReason.MAX_TURNS: f"within env.max_turns={env.max_turns} turns",
        StopReason.TOOL_BUDGET: f"with env.max_tool_calls={env.max_tool_calls} calls at most",
        StopReason.INVALID_CALLS: (
            f"before env.max_invalid_calls={env.max_invalid_calls} invalid calls in a row; write "
            "its calls as the tools' schemas say (`agent-r1 tools --schema`)"
        ),
        StopReason.TIME_OUT: f"within env.episode_timeout_s={env.episode_timeout_s:g} seconds",
        StopReason.NO_ANSWER: "with an answer in the environment's form, or call a tool",
    }
    return limits.get(reason, "before the episode ends")


def play_demonstrations(
    name: str,
    rows: list[Row],
    tools: dict[str, BaseTool],
    rollout: RolloutConfig,
    env: EnvConfig,
    seed: int,
    plays: int = 1,
) -> list[Demonstration]:
    """Play `plays` episodes per row with the function `name`, in the real environment.

    A further play of a row has another `rng`. Plays that all repeat the first ones are left out.
    Raises ConfigError if the function fails, answers a request for notes with a turn, or leaves
    most episodes without an answer.
    """
    demonstrate = demonstrator_of(name)
    # No tokenizer has been trained yet: a byte is a token, and context limits do not apply.
    from agent_r1.chat.tokenizer import byte_chat
    from agent_r1.rollout.rollouts import run_episodes

    chat = byte_chat()
    limits = replace(
        Limits.from_settings(rollout, env), max_tokens_per_turn=10**6, max_context=10**7
    )
    requests: set[str | None] = set()

    def make_and_watch(row: Row) -> AgentEnv:
        world = make_env(row, tools, env)
        requests.add(world.plain_request)
        return world

    writer = make_writer(demonstrate)
    flow = _Plays(writer, chat, limits, make_and_watch, seed)
    # With a program of the user as the agent (recipes/gateway), the function answers instead of the
    # model. Then the program's own system message and tools are cloned.
    for make in tables.for_changed_settings("demonstrations", rollout=rollout):
        flow = make(writer, chat, limits, make_and_watch, rollout, seed)
    tasks: list[Task] = []
    for again in range(plays):
        for i, row in enumerate(rows):
            session = f"demonstration-{i}" + (f"-again-{again}" if again else "")
            # A row without tools has the number of the same row with tools.
            number = row["extra_info"].get("index", i)
            tasks.append(Task(row, str(number), session))
    trajectories = asyncio.run(
        run_episodes(
            flow, tasks, Sampling(max_tokens=10**6), max_concurrent=rollout.max_concurrent_episodes
        )
    )
    episodes: list[Demonstration] = []
    replies: list[str] = []  # to requests for plain text
    for task, trajectory in zip(tasks, trajectories, strict=True):
        play = flow.plays[task.session]
        for messages in play.contexts:
            demonstration = Demonstration(
                messages, play.tools, trajectory.score, question=task.group_id
            )
            episodes.append(demonstration)
            for request, reply in pairwise(messages):
                if request["content"] in requests:
                    replies.append(reply["content"])
    for text in replies:
        if any(part.kind in ("tool_call", "answer") for part in dialect_of(env).parts(text)):
            raise ConfigError(
                f"the demonstrator ({plugins.source_location(demonstrate)}) was asked for plain "
                f"text and returned {text[:80]!r}; "
                f"return text where history[-1]['content'] is {min(filter(None, requests))!r}",
                code="wrong_return_value",
            )
    other_ends = [t.stop_reason for t in trajectories if t.stop_reason is not StopReason.ANSWERED]
    if 2 * len(other_ends) > len(trajectories):
        raise ConfigError(
            f"{len(other_ends)} of {len(trajectories)} demonstrations ended without an answer "
            f"({other_ends[0]}); the demonstrator "
            f"({plugins.source_location(demonstrate)}) must answer "
            f"{limit_of(other_ends[0], env)}",
            code="unfinished_demonstration",
        )
    first_plays = len(episodes) // plays
    contents = [episode.messages for episode in episodes]
    if contents == contents[:first_plays] * plays:
        # A demonstrator without chance. Its plays stand for all, and are cloned as often.
        return episodes[:first_plays]
    return episodes


# ----------------------------------------------------------------------------------------- recorded


def read_episodes(path: Path, tools: dict[str, BaseTool], env: EnvConfig) -> list[Demonstration]:
    """Read recorded demonstrations, one per line (RECORDED_EXAMPLE).

    Raise AgentR1Error naming the line.

    A line may have `tools` in addition to `messages`; otherwise the configured tools are used.
    `recorded.py` lists the forms of messages.
    """
    episodes: list[Demonstration] = []
    counts: Counter[str] = Counter()
    place = ""
    try:
        for place, record in json_records(path):
            if isinstance(record, ValueError):
                raise record
            demonstration = _read_episode(record, tools, env, counts)
            episodes.append(replace(demonstration, place=f"{path}, {place}"))
    except OSError as error:
        raise AgentR1Error(
            f"cold_start.episodes={path} cannot be read ({error})", code="unreadable_file"
        ) from None
    except ValueError as error:
        raise AgentR1Error(
            f"{path}, {place}: {error}; a line looks like {RECORDED_EXAMPLE}",
            code="bad_demonstration",
        ) from None
    if not episodes:
        raise AgentR1Error(
            f"{path} has no demonstrations; a line looks like {RECORDED_EXAMPLE}", code="no_records"
        )
    if counts:
        say(f"  {path.name}: {describe_counts(counts, HARMLESS)}")
    return episodes


def _read_episode(
    record: Any, tools: dict[str, BaseTool], env: EnvConfig, counts: Counter[str]
) -> Demonstration:
    """Read one recorded conversation. Raises ValueError."""
    bounds.check_depth(record)
    dialect = dialect_of(env)
    schemas = [tool.schema() for tool in tools.values()]
    # A server's tools are known in its episodes only.
    any_tool = not tools and brings_tools(env.name)
    messages, own_schemas = read_conversation(record, dialect, schemas, counts, any_tool)
    first = dialect.first_observation(messages, tools)
    if first.tools is None and own_schemas != schemas:
        raise ValueError("the line has tools, and this dialect (env.name) describes env.tools")
    question = next(i for i, m in enumerate(messages) if m["role"] == "assistant")
    return Demonstration(
        first.messages,
        None if first.tools is None else own_schemas,
        question=json.dumps(messages[:question]),
    )


# -------------------------------------------------------------------------------------- few of them


def plays_per_question(plays: int, questions: int) -> int:
    """Return `cold_start.plays`, or if it is 0 as many as give FEW demonstrations."""
    return plays or min(MOST_PLAYS, math.ceil(FEW / questions))


def held_out_questions(episodes: list[Demonstration], seed: int) -> set[str]:
    """Choose the questions whose demonstrations only measure when cloning should stop.

    A tenth, and at least eight, of fewer than FEW questions; a quarter of fewer than 32. Of more
    than FEW none: they are too many to learn by heart.
    """
    questions = sorted({episode.question for episode in episodes})
    if len(questions) >= FEW:
        return set()
    count = max(len(questions) // 10, min(8, len(questions) // 4))
    return set(random.Random(derive_seed(seed, "held out")).sample(questions, count))


def best_plays(episodes: list[Demonstration]) -> set[int]:
    """Return the best plays of each question that score at least the mean.

    The first phase of a cold start clones these. A few hundred wrong plays would hide what the
    right ones have in common, for example which part of the question they copy. Without scores,
    all are the best.
    """
    best: dict[str, float] = {}
    for episode in episodes:
        if episode.score is None:
            return set(range(len(episodes)))
        best[episode.question] = max(best.get(episode.question, episode.score), episode.score)
    least = fmean(episode.score or 0.0 for episode in episodes)
    numbers: set[int] = set()
    for number, episode in enumerate(episodes):
        score = episode.score or 0.0
        if score == best[episode.question] and score >= least - 1e-9:
            numbers.add(number)
    return numbers


def repeats_of_best(best: int, total: int) -> int:
    """Return how often to add the `best` plays to all `total` ones, to reach BEST_SHARE."""
    missing = BEST_SHARE * total - best
    return max(0, min(MOST_REPEATS, round(missing / ((1 - BEST_SHARE) * best))))


# ------------------------------------------------------------------------------------ training data


def texts_of(episodes: list[Demonstration]) -> Iterator[str]:
    """Yield the texts that train the tokenizer.

    Digits and names are separate (see `chat/tokenizer.py`): an unknown number or name must be spelt
    like the known ones.
    """
    names: set[str] = set()
    for episode in episodes:
        tool_names = ", ".join(schema_name(schema) for schema in episode.tools or [])
        for text in (
            f"system\ntools: {tool_names}",
            *(f"{m['role']}\n{m['content']}" for m in episode.messages),
        ):
            names.update(CAPITALISED_NAME.findall(text))
            yield from filter(
                None, re.split(r"(\d)|<[a-z_/]+>|\0", CAPITALISED_NAME.sub("\0", text))
            )
    for _ in range(20):  # frequent enough that names are not the first to lose their tokens
        yield from sorted(names)


def sequences(
    episodes: list[Demonstration],
    chat: ChatFormat,
    max_context: int,
    dialect: Dialect = HERMES,
) -> list[TrainingRow]:
    """Make training sequences with the loss on the agent's turns only.

    `dialect` defines the tags and the end of a turn. Raises ConfigError if most exceed
    `max_context`, and AgentR1Error for a recorded turn with a control token of another kind.
    """
    from agent_r1.rollout.training_rows import trajectory_rows

    rows: list[TrainingRow] = []
    for i, episode in enumerate(episodes):
        rows += trajectory_rows(_trajectory(episode, chat, dialect), i)
    fitting = [row for row in rows if len(row.input_ids) <= max_context]
    if 2 * len(fitting) <= len(rows):
        longest = max(len(row.input_ids) for row in rows)
        raise ConfigError(
            f"{len(rows) - len(fitting)} of {len(rows)} demonstrations are longer than "
            f"rollout.max_context={max_context} tokens (the longest has {longest}); raise it and "
            "model.max_position, or shorten tool results (env.tool_max_chars)",
            code="demonstrations_too_long",
        )
    return fitting


def _without_marks(messages: list[Message]) -> list[Message]:
    """Drop `given`, which is ours: a template may print every key of a message."""
    return [{key: m[key] for key in m if key != "given"} for m in messages]


def _trajectory(episode: Demonstration, chat: ChatFormat, dialect: Dialect) -> Trajectory:
    loop = AgentEnvLoop(None, chat, None, None)  # only for `observe`
    steps: list[Step] = []
    start = 0
    calls: list[str] = []
    for i, message in enumerate(episode.messages):
        if message["role"] != "assistant" or message.get("given"):
            continue
        reply = Observation(_without_marks(episode.messages[start:i]), episode.tools, calls=calls)
        ids = loop.observe(steps, reply)
        calls = [call.name for call in dialect.calls(message["content"], {})]
        text = message["content"]
        foreign = chat.foreign_token(text, dialect) if episode.place else None
        if foreign is not None:
            raise AgentR1Error(
                f"{episode.place}: a turn of the agent has the control token {foreign!r}, which "
                "is not of its dialect (env.name); remove the token or the line",
                code="bad_demonstration",
            )
        action = chat.turn_ids(text, dialect)
        steps.append(Step(ids, action, [0.0] * len(action)))
        start = i + 1
    return Trajectory(steps, "", StopReason.ANSWERED, {})


def describe_demonstrations(episodes: list[Demonstration]) -> str:
    """Report the number and mean score of the demonstrations."""
    scores = [e.score for e in episodes if e.score is not None]
    return f"{len(episodes)} demonstrations" + (
        f", which score {fmean(scores):.2f}" if scores else ""
    )
