"""A folder with a bug: read a file, edit a line, run an example. Hidden tests pay at the end.

In: the files of a task. Out: an episode's own copy of them, as texts in memory, which the methods
of a plain class read and change (env/class_env.py). Code runs in the sandbox of recipes/code.

The tests cannot be cheated from inside: the sandbox gets the files and the arguments, and returns
values. Right values are computed and compared here, where no text of the agent's is executed. A
file that prints forged values must know them, and then it is right.
"""

from __future__ import annotations

import functools
import json
from typing import Any

from agent_r1_recipes.code.sandbox import get_sandbox
from agent_r1_recipes.files.tasks import arguments_of, right_value

MAX_LINE = 200
"""Characters of a line that the agent writes."""
WITHIN_S = 2.0
"""Seconds of a program."""
HARNESS = """
import json, sys, types

def load(name, text):
    module = types.ModuleType(name[:-3])
    sys.modules[name[:-3]] = module
    exec(compile(text, name, "exec"), module.__dict__)
    return module

def call(function, arguments):
    try:
        value = function(*arguments)
    except Exception as error:
        return f"{{type(error).__name__}}: {{error}}"[:80]
    return value if type(value) is int else repr(value)[:80]

files, path, calls = json.loads({task!r})
try:
    cost = load(path, files[path]).cost
    values = [call(cost, arguments) for arguments in calls]
except Exception as error:
    values = [f"{{type(error).__name__}}: {{error}}"[:80]] * len(calls)
print()
print(json.dumps(values))
"""
"""Runs inside the sandbox. Whatever the file does to it, only values come back."""


class Files:
    """Repair one line of a file. The folder belongs to the episode."""

    score_name = "fixed"

    def reset(self, files: str, path: str, kind: str, number: int, **row: Any) -> str:
        self.files: dict[str, str] = json.loads(files)
        self.path = path
        self.kind = kind
        self.number = number
        self.done = False
        return f"Files: {', '.join(sorted(self.files))}"

    def read(self, path: str) -> str:
        """Read a file, with line numbers.

        Args:
            path: Name of the file.
        """
        if path not in self.files:
            return "no such file"
        lines = self.files[path].splitlines()
        return "\n".join(f"{number} {line}" for number, line in enumerate(lines, 1))

    def edit(self, path: str, line: int, text: str) -> str:
        """Replace a line. Its indentation stays.

        Args:
            path: Name of the file.
            line: Number of the line.
            text: The new line.
        """
        if path not in self.files:
            return "no such file"
        lines = self.files[path].splitlines()
        if not 1 <= line <= len(lines):
            return "no such line"
        if len(text) > MAX_LINE or len(text.splitlines()) > 1:
            return f"a line has at most {MAX_LINE} characters"
        old = lines[line - 1]
        lines[line - 1] = old[: len(old) - len(old.lstrip())] + text.strip()
        self.files[path] = "\n".join(lines) + "\n"
        return lines[line - 1].strip()

    def run(self) -> str:
        """Run the example of the task."""
        arguments = arguments_of(self.path, self.number)[0]
        value = self._values([arguments])[0]
        right = right_value(self.kind, self.number, *arguments)
        verdict = "right" if _is_right(value, right) else f"wrong, it should be {right}"
        return f"cost{tuple(arguments)} is {value}: {verdict}"

    def get_reward(self) -> float:
        """Return 1 if the file is right for all hidden arguments."""
        hidden = arguments_of(self.path, self.number)[1:]
        values = self._values(hidden)
        rights = [right_value(self.kind, self.number, *arguments) for arguments in hidden]
        self.score = len(values) == len(rights) and all(map(_is_right, values, rights))
        return float(self.score)

    def _values(self, calls: list[list[int]]) -> list[Any]:
        task = json.dumps([self.files, self.path, calls])
        return json.loads(_run(task, len(calls)))


@functools.lru_cache(maxsize=4096)
def _run(task: str, count: int) -> str:
    """Return the values of calls, as JSON. Equal files and arguments are run once."""
    result = get_sandbox().run(HARNESS.format(task=task), WITHIN_S)
    last = result.output.strip().rpartition("\n")[2]
    failure = json.dumps(["no result" if result.ended is None else "too long"] * count)
    try:
        values = json.loads(last)
    except (ValueError, RecursionError):
        return failure
    if not isinstance(values, list) or len(values) != count:
        return failure
    return json.dumps([value if type(value) is int else str(value)[:80] for value in values])


def _is_right(value: Any, right: int) -> bool:
    return type(value) is int and value == right
