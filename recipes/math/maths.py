"""Reward answers that equal the right one in any notation. In: an answer, accepted answers. Out: 1
or 0.

`math-verify` compares (1/2 is \\frac{1}{2} is 0.5) in a separate process with a deadline, because a
policy may write 9^{9^{9^9}}. The whole answer must be one expression, which "71 or 72" is not. If
the right answer is a number, an unevaluated sum or quotient is wrong: "497/7" may be copied from
the question. A fraction in lowest terms is accepted if the right answer is a fraction. 50% is read
as 50.
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
            if self._talk is None:
                self._talk = self._started()
            try:
                return (
                    self._talk.ask(json.dumps([answer, targets]), EQUALITY_TIMEOUT_S).strip()
                    == "true"
                )
            except TimeoutError:
                self._talk.close()
                self._talk = None
                return False

    def _started(self) -> Talk:
        talk = self._sandbox.talk(
            Path(__file__).with_name("math_inside.py").read_text(encoding="utf-8")
        )
        try:
            said = talk.ask(json.dumps(["1", ["1"]]), WORKER_START_S).strip()
        except TimeoutError:
            said = "no answer"
        if said != "true":
            talk.close()
            raise AgentR1Error(
                f"the process that compares answers does not start ({said}); pip install "
                "'agent-r1[math]'",
                code="process_did_not_start",
            )
        return talk


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
