"""Define six kinds of own tasks as a newcomer writes them: lab/experiments/own_task_runs.py.

In: nothing. Out: questions, demonstrators, tools and environments, which settings name as
`own_task_worlds.py:NAME`. Each task is copying or looking up, so that a tiny model learns it in
seconds. Names that end in `Broken` or `_broken` have the fault of their docstring.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import permutations
from typing import Any

from agent_r1 import AgentEnv, Hermes, InvalidArgumentsError, Observation, StepResult, StopReason
from agent_r1.config import EnvConfig
from agent_r1.core import Action, Message, Row
from agent_r1.tool import BaseTool, tool

COLOURS = ("red", "blue", "green", "black", "white", "pink")
GOODS = ("lamp", "chair", "clock", "table", "spoon", "mirror")
CITIES = ("Rome", "Oslo", "Lima", "Cairo", "Paris", "Quito")
ORDINALS = ("first", "second", "third")
RIGHT = 0.6
"""Share of the right moves of a demonstrator. RL has something to improve."""


FIRST_NUMBER = {"train": 0, "val": 10_000, "test": 20_000}
"""The splits share no question, and no question names its split."""


def turns_of(history: list[Message], role: str) -> list[str]:
    return [message["content"] for message in history if message["role"] == role]


# ------------------------------------------------------------------------- a file of questions


def list_questions() -> list[dict[str, Any]]:
    """List 360 questions in a fixed random order: copy a word from its place."""
    rows = []
    for colours in permutations(COLOURS, 3):
        for place, ordinal in enumerate(ORDINALS):
            question = f"Of {', '.join(colours)}, which is {ordinal}?"
            rows.append({"question": question, "answer": colours[place]})
    random.Random(0).shuffle(rows)
    return rows


def play_question(row: Row, history: list[Message], rng: random.Random) -> str:
    words = row["prompt"][-1]["content"].removeprefix("Of ").replace(",", "").split()[:3]
    if rng.random() < RIGHT:
        return Hermes.answer(row["reward_model"]["ground_truth"][0])
    return Hermes.answer(rng.choice(words))


# ------------------------------------------------------------------------------- a plain class


def key_questions(split: str, count: int, rng: random.Random) -> Iterator[dict[str, Any]]:
    first = FIRST_NUMBER[split]
    for number in range(first, first + count):
        colour = rng.choice(COLOURS)
        yield {"question": f"Open door {number}.", "metadata": {"colour": colour}}


class Doors:
    """The agent opens the door with the key whose colour it reads."""

    score_name = "opened"

    def reset(self, colour: str, seed: int, **row: Any) -> str:
        self.colour = self._draw(colour, seed)
        self.tries = 0
        self.done = False
        return f"The key is {self.colour}."

    def _draw(self, colour: str, seed: int) -> str:
        return colour

    def open(self, colour: str) -> str:
        """Try to open the door.

        Args:
            colour: Of the key.
        """
        self.tries += 1
        self.done = colour == self.colour
        return "open" if self.done else "locked"

    @property
    def score(self) -> bool:
        return self.done

    def get_reward(self) -> float:
        return float(self.done) - 0.2 * self.tries


class DoorsBroken(Doors):
    """Draw the key anew in each episode, so that the samples of a group differ."""

    def _draw(self, colour: str, seed: int) -> str:
        return random.choice(COLOURS)


def play_doors(row: Row, history: list[Message], rng: random.Random) -> str:
    if rng.random() < RIGHT:
        colour = turns_of(history, "user")[-1].split("key is ")[-1].removesuffix(".")
        return Hermes.call("open", colour=colour)
    return Hermes.call("open", colour=rng.choice(COLOURS))


# ------------------------------------------------------------------ a Gymnasium-shaped environment


class Corridor:
    """A world with `reset` and `step` as in Gymnasium: walk to the goal."""

    cells = 7

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        rng = random.Random(seed)
        self.place, self.goal = rng.sample(range(self.cells), 2)
        return self._observe(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.place += {"left": -1, "right": 1}.get(action, 0)
        at_goal = self.place == self.goal
        return self._observe(), float(at_goal), at_goal, False, {}

    def _observe(self) -> str:
        return f"at {self.place}, goal {self.goal}"


def corridor_questions(split: str, count: int, rng: random.Random) -> Iterator[dict[str, Any]]:
    first = FIRST_NUMBER[split]
    for number in range(first, first + count):
        yield {"question": f"Walk in corridor {number}.", "metadata": {"seed_of_world": number}}


class Walk:
    """Adapts Corridor to a plain class."""

    score_name = "arrived"

    def reset(self, seed_of_world: int, **row: Any) -> str:
        self.world = Corridor()
        self.done = False
        self.steps = 0
        first, _ = self.world.reset(seed=self._seed(seed_of_world))
        return first

    def _seed(self, seed_of_world: int) -> int | None:
        return seed_of_world

    def move(self, direction: str) -> str:
        """Go to the next cell.

        Args:
            direction: left or right.
        """
        observation, _, self.done, _, _ = self.world.step(direction)
        self.steps += 1
        return observation

    def get_reward(self) -> float:
        return float(self.done) - 0.05 * self.steps


class WalkBroken(Walk):
    """Forgets the seed in `reset`, so the samples of a group begin in different states."""

    def _seed(self, seed_of_world: int) -> int | None:
        return None


def play_walk(row: Row, history: list[Message], rng: random.Random) -> str:
    texts = turns_of(history, "tool") or turns_of(history, "user")
    place, goal = texts[-1].split("at ")[-1].split(", goal ")
    right = "right" if int(goal) > int(place) else "left"
    wrong = "left" if right == "right" else "right"
    return Hermes.call("move", direction=right if rng.random() < 0.75 else wrong)


# ------------------------------------------------------------------------- a native environment


class Words(AgentEnv):
    """The agent writes a colour as plain text, without tools."""

    def __init__(self, tools: dict[str, BaseTool], config: EnvConfig):
        self.left = config.max_turns

    def reset(self, row: Row) -> Observation:
        self.colour = row["extra_info"]["metadata"]["colour"]
        return Observation(list(row["prompt"]))

    async def step(self, action: Action) -> StepResult:
        self.left -= 1
        if action.text.strip() == f"I take the {self.colour} key":
            return StepResult(None, reward=1.0, done=True, stop_reason=StopReason.ANSWERED)
        if self.left == 0:
            return StepResult(None, done=True, stop_reason=StopReason.MAX_TURNS)
        return StepResult(Observation([{"role": "user", "content": "no"}]), reward=-0.1)


def word_questions(split: str, count: int, rng: random.Random) -> Iterator[dict[str, Any]]:
    first = FIRST_NUMBER[split]
    for number in range(first, first + count):
        colour = rng.choice(COLOURS)
        question = f"Door {number} has a {colour} key. Which do you take?"
        yield {"question": question, "metadata": {"colour": colour}}


def play_words(row: Row, history: list[Message], rng: random.Random) -> str:
    colour = row["extra_info"]["metadata"]["colour"]
    if rng.random() > RIGHT:
        colour = rng.choice(COLOURS)
    return f"I take the {colour} key"


# ------------------------------------------------------------------ an MCP server, and two tools


def price_of(name: str) -> int:
    """Return a fixed price of 11 to 49."""
    return 11 + sum(ord(letter) * (place + 1) for place, letter in enumerate(name)) % 39


@tool
def price(name: str) -> str:
    """Look up what something costs.

    Args:
        name: The thing and its city.
    """
    return str(price_of(name))


@tool
def double(number: int) -> int:
    """Double a number.

    Args:
        number: A whole number.
    """
    return 2 * number


@tool
def price_broken(name: str) -> str:
    """Look up what something costs.

    Args:
        name: The thing and its city.
    """
    raise InvalidArgumentsError(f"{name!r} is in no price list")


def things(count: int, rng: random.Random) -> list[str]:
    names = [
        f"{colour} {good} in {city}" for colour in COLOURS for good in GOODS for city in CITIES
    ]
    rng.shuffle(names)
    return names[:count]


def price_questions(split: str, count: int, rng: random.Random) -> Iterator[dict[str, Any]]:
    for name in things(count, rng):
        yield {
            "question": f"What does a {name} cost?",
            "answer": str(price_of(name)),
            "metadata": {"thing": name},
        }


def pair_questions(split: str, count: int, rng: random.Random) -> Iterator[dict[str, Any]]:
    for name in things(count, rng):
        yield {
            "question": f"What do two of {name} cost?",
            "answer": str(2 * price_of(name)),
            "metadata": {"thing": name},
        }


def play_price(row: Row, history: list[Message], rng: random.Random) -> str:
    results = turns_of(history, "tool")
    if results:
        return Hermes.answer(results[-1].split()[-1])
    if rng.random() < RIGHT:
        return Hermes.call("price", name=row["extra_info"]["metadata"]["thing"])
    return Hermes.answer(str(rng.randrange(11, 50)))


def play_pair(row: Row, history: list[Message], rng: random.Random) -> str:
    results = turns_of(history, "tool")
    if len(results) == 2 or (results and rng.random() > RIGHT):
        return Hermes.answer(results[-1].split()[-1])
    if results:
        number = results[-1].split()[-1]
        return Hermes.call("double", number=int(number) if number.isdecimal() else 20)
    return Hermes.call("price", name=row["extra_info"]["metadata"]["thing"])


def play_broken_price(row: Row, history: list[Message], rng: random.Random) -> str:
    """Call the tool that always fails, and guess."""
    if turns_of(history, "tool") or rng.random() > RIGHT:
        return Hermes.answer(str(rng.randrange(11, 99)))
    name = "price_broken" if "two" in row["prompt"][-1]["content"] else "price"
    return Hermes.call(name, name=row["extra_info"]["metadata"]["thing"])


def play_guess(row: Row, history: list[Message], rng: random.Random) -> str:
    """Guess without a call, so that the cold start teaches none."""
    return Hermes.answer(str(rng.randrange(11, 50)))
