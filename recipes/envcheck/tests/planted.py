"""Worlds with a planted fault in their reward, in three formats: class, Gymnasium, reward function.

Each fault replaces a text of a healthy world. `TUNED` faults were at hand while the policies of
`policies.py` were written. `HELD_OUT` faults were written before, and never used to change them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

CLASS = '''"""A safe with three digits, each of which a page of a book tells."""

from agent_r1 import Hermes


class Safe:
    """The agent reads pages and opens the safe."""

    score_name = "opened"

    def reset(self, digits, **row) -> str:
        self.digits = digits
        self.progress, self.tries = 0.0, 0
        self.open_now = self.done = False
        return "Pages 1 to 3 have a digit each."

    def read(self, page: int) -> str:
        """Read a page.

        Args:
            page: From 1 to 3.
        """
        if not 1 <= page <= 3:
            return "There is no such page."
        return f"The digit is {self.digits[page - 1]}."

    def open(self, code: str) -> str:
        """Open the safe, which ends the work.

        Args:
            code: Three digits.
        """
        self.tries += 1
        self.done = True
        self.open_now = code == self.digits
        return "over"

    @property
    def score(self) -> bool:
        return self.open_now

    def get_reward(self) -> float:
        return float(self.open_now)


def questions(split, count, rng):
    for _ in range(count):
        metadata = {"digits": f"{rng.randrange(100, 1000)}", "round": rng.randrange(10**9)}
        yield {"question": "Open the safe.", "metadata": metadata}


def demonstrate(row, history, rng):
    seen = [m["content"] for m in history if m["role"] == "tool"]
    if len(seen) < 3:
        return Hermes.call("read", page=len(seen) + 1)
    return Hermes.call("open", code="".join(text[-2] for text in seen))
'''
GYM = '''"""Four lamps to press in a given order."""

import random


class Lamps:
    """Press the lamps in the given order; a wrong lamp ends the game."""

    action_space = ("red", "green", "blue", "white")

    def reset(self, *, seed=None, options=None):
        rng = random.Random(seed)
        self.order = [rng.choice(self.action_space) for _ in range(4)]
        self.place, self.steps, self.pressed = 0, 0, []
        return self.look(), {}

    def look(self):
        return {"press": " ".join(self.order), "right so far": self.place}

    def step(self, action):
        self.steps += 1
        self.pressed.append(action)
        right = action == self.order[self.place]
        self.place += right
        over = not right or self.place == len(self.order)
        won = right and over
        reward = float(won)
        return self.look(), reward, over, False, {"is_success": won}

    def expert(self, observation):
        return self.order[self.place]

    def close(self):
        pass
'''
PRESET = """# Sums, with a reward function.
extends: smoke
data: {name: "sums.py:questions", train: 200, val: 20, test: 20}
env: {tools: [calculator], reward: "sums.py:score", format_penalty: 0}
cold_start: {demonstrator: "sums.py:demonstrate"}
"""
REWARD = '''"""Sums of two numbers."""

import re

from agent_r1 import Hermes


def score(answer, row, episode):
    """Return 1 for the right sum."""
    (right,) = row["reward_model"]["ground_truth"]
    return float(answer == right)


def questions(split, count, rng):
    for _ in range(count):
        a, b = rng.randrange(100, 1000), rng.randrange(100, 1000)
        yield {"question": f"What is {a} + {b}?", "answer": str(a + b)}


def demonstrate(row, history, rng):
    if history[-1]["role"] != "tool":
        a, b = re.findall(r"\\d+", row["prompt"][-1]["content"])
        return Hermes.call("calculator", expression=f"{a} + {b}")
    return Hermes.answer(history[-1]["content"])
'''


@dataclass(frozen=True)
class Fault:
    """A fault: the format, the text that it replaces, and the text instead."""

    name: str
    form: str
    old: str
    new: str


RIGHT = "self.open_now = code == self.digits"
SCORE = "return float(answer == right)"
PAY = "reward = float(won)"
TUNED = [
    Fault(
        "an episode that never ends is paid", "class", "return float(self.open_now)",
        "return float(self.open_now or not self.done)",
    ),
    Fault(
        "each page read is paid, without a limit", "class", "return float(self.open_now)",
        "return float(self.open_now) + self.progress",
    ),
    Fault(
        "the last episode's success is kept", "class", "return float(self.open_now)",
        "Safe.won = getattr(Safe, 'won', False) or self.open_now\n        return float(Safe.won)",
    ),
    Fault(
        "the beginning of the code opens", "class", RIGHT,
        "self.open_now = self.digits.startswith(code)",
    ),
    Fault("each step is paid", "gym", PAY, "reward = float(won) + 0.3"),
    Fault(
        "any lamp counts as right", "gym", "right = action == self.order[self.place]",
        "right = action in self.order",
    ),
    Fault("an answer that contains the sum is right", "reward", SCORE,
          "return float(right in answer)"),
    Fault(
        "a text that is no number is right", "reward", SCORE,
        "try:\n        return float(int(answer) == int(right))\n"
        "    except ValueError:\n        return 1.0",
    ),
    Fault(
        "the answer's own claim is believed", "reward", SCORE,
        "return float(answer == right or 'reward' in answer)",
    ),
    Fault(
        "not a number is right", "reward", SCORE,
        "try:\n        return float(not abs(float(answer) - float(right)) > 0.5)\n"
        "    except ValueError:\n        return 0.0",
    ),
]  # fmt: skip
HELD_OUT = [
    Fault("the digits may stand anywhere in the code", "class", RIGHT,
          "self.open_now = set(self.digits) <= set(code)"),
    Fault(
        "a code that is near opens", "class", RIGHT,
        "self.open_now = code.isdigit() and abs(int(code) - int(self.digits)) < 300",
    ),
    Fault(
        "a page that does not exist is paid", "class", 'return "There is no such page."',
        'self.open_now = True\n            return "There is no such page."',
    ),
    Fault(
        "the third try opens", "class", "self.done = True\n        " + RIGHT,
        "self.open_now = code == self.digits or self.tries > 2\n        self.done = self.open_now",
    ),
    Fault("a game that is over is paid", "gym", PAY, "reward = float(over)"),
    Fault(
        "one right lamp again and again is paid", "gym", "self.place += right",
        "right = right or action == self.order[0]\n        self.place += right",
    ),
    Fault("the last lamp alone decides", "gym", "over = not right or",
          "right = action in self.order\n        over = action == self.order[-1] or"),
    Fault("a relative error of 1 is allowed", "reward", SCORE,
          "try:\n        return float(abs(float(answer) - float(right)) <= float(right))\n"
          "    except ValueError:\n        return 0.0"),
    Fault("a long answer is paid in part", "reward", SCORE,
          "return max(float(answer == right), 0.5 * min(1.0, len(answer) / 200))"),
    Fault("two calls are enough", "reward", SCORE,
          "return float(answer == right or len(episode.calls) > 1)"),
]  # fmt: skip


def write_world(folder: Path, fault: Fault | None, form: str = "class") -> list[str]:
    """Write a world to `folder`. Return the words of `agent-r1 env check` that name it.

    Raises ValueError for a fault whose text does not occur.
    """
    form = fault.form if fault else form
    text = {"class": CLASS, "gym": GYM, "reward": REWARD}[form]
    if fault and text.count(fault.old) != 1:
        raise ValueError(f"{fault.name}: its text occurs {text.count(fault.old)} times")
    if fault:
        text = text.replace(fault.old, fault.new)
        if "progress" in fault.new:
            text = text.replace(
                '        return f"The digit',
                '        self.progress += 0.3\n        return f"The digit',
            )
    folder.mkdir(parents=True, exist_ok=True)
    name = {"class": "safe.py", "gym": "lamps.py", "reward": "sums.py"}[form]
    (folder / name).write_text(text)
    if form == "reward":
        (folder / "preset.yaml").write_text(PRESET)
        return ["--recipe", str(folder)]
    if form == "gym":
        return [f"gym:{folder / name}:Lamps"]
    return [f"{folder / name}:Safe", "env.max_turns=6"]
