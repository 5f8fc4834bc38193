"""Reward answers that equal the right one. In: an answer, accepted answers. Out: 1 or 0.

An answer is compared in a separate process with a deadline, because a policy may write
9^{9^{9^9}}. `notation.py` reads formatting, units and numbers, and `math_inside.py` compares. The
whole answer must be one expression, which "71 or 72" is not. If the right answer is a numeral, a
sum or quotient is wrong: "497/7" may be copied from the question. README.md has the rules.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import threading
from pathlib import Path

from agent_r1 import AgentR1Error, EnvConfig, Row
from agent_r1_recipes.code.python import local_sandbox
from agent_r1_recipes.code.sandbox import Sandbox, Talk

MAX_ANSWER_CHARS = 300
"""Of an answer; a longer one is no answer to a question of mathematics."""
MAX_NESTING = 6
"""Brackets inside each other in an answer; the parser's time grows with each level."""
EQUALITY_TIMEOUT_S = 5.0
WORKER_START_S = 60.0
"""For the first answer, which waits for the import of sympy."""


class MathWorker:
    """Compare in one process, which is replaced when it does not answer in time."""

    def __init__(self, sandbox: Sandbox):
        self._sandbox = sandbox
        self._talk: Talk | None = None
        self._lock = threading.Lock()

    def same(self, answer: str, targets: list[str]) -> bool:
        """Return whether `answer` equals one of `targets`.

        Raises AgentR1Error if no process could be started.
        """
        if len(answer) > MAX_ANSWER_CHARS or nesting(answer) > MAX_NESTING:
            return False
        with self._lock:
            talk = self._talk or self._start()
            self._talk = talk
            try:
                verdict = talk.ask(json.dumps([answer, targets]), EQUALITY_TIMEOUT_S)
            except TimeoutError:
                talk.close()
                self._talk = None
                return False
            return verdict.strip() == "true"

    def _start(self) -> Talk:
        talk = self._sandbox.talk(program())
        try:
            verdict = talk.ask(json.dumps(["1", ["1"]]), WORKER_START_S).strip()
        except TimeoutError:
            verdict = "no answer"
        if verdict != "true":
            talk.close()
            raise AgentR1Error(
                f"the process that compares answers does not start ({verdict}); pip install "
                "'agent-r1[math]'",
                code="process_did_not_start",
            )
        return talk


PROGRAM = """
import sys, types
notation = types.ModuleType("agent_r1_recipes.math.notation")
sys.modules[notation.__name__] = notation
exec(compile({notation!r}, "notation.py", "exec"), vars(notation))
{inside}"""


def program() -> str:
    """Return the program of the process.

    A sandbox sees no file of ours, so both travel as text.
    """
    notation, inside = [
        Path(__file__).with_name(name).read_text(encoding="utf-8")
        for name in ("notation.py", "math_inside.py")
    ]
    return PROGRAM.format(notation=notation, inside=inside)


def nesting(text: str) -> int:
    """Return the depth of brackets, of any kind."""
    depths = itertools.accumulate((char in "([{") - (char in ")]}") for char in text)
    return max(depths, default=0)


@functools.cache
def worker(sandbox: Sandbox) -> MathWorker:
    """Return this process's worker."""
    return MathWorker(sandbox)


async def reward(answer: str, targets: list[str], row: Row, config: EnvConfig) -> float:
    """Pay 1 for an answer that is equal to one of `targets`."""
    return await asyncio.to_thread(worker(local_sandbox(config)).same, answer, targets)
