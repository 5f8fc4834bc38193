"""Define the errors for users: AgentR1Error (exit code 1) and ConfigError (exit code 2).

Raise them with cause and remedy for everything that a user can correct; `cli.main` prints one line.
Any other exception on the command line is a bug of ours and keeps its traceback.
"""

import difflib
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


class AgentR1Error(Exception):
    """Report that something outside the program is wrong: a file, a port, memory.

    `code` names the kind of failure in one word, such as `missing_index`. Tests and programs
    compare it; the message is for people and may be rewritten. tests/messages.txt lists every code
    with its messages.
    """

    exit_code = 1

    def __init__(self, message: str, *, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class StalledError(AgentR1Error):
    """Report training that lives and does not move. The script resumes it once (EX_TEMPFAIL)."""

    exit_code = 75


class LostConnection(AgentR1Error):
    """Report a request that a running model server did not answer. It costs one episode."""


class ConfigError(AgentR1Error):
    """Report an impossible request: an unknown name, an impossible split, a wrong flag."""

    exit_code = 2

    @classmethod
    def unknown(cls, what: str, name: str, choices: Collection[str]) -> "ConfigError":
        """Report an unknown value of the setting or option `what`, with the nearest known one."""
        return cls(
            f"{what}={name!r} is unknown{nearest(name, choices)}; choose from {', '.join(choices)}",
            code="unknown_name",
        )


@contextmanager
def extra(name: str, what: str) -> Iterator[None]:
    """Turn a failing import of the extra `name` into AgentR1Error with pip's command."""
    try:
        yield
    except ImportError as error:
        raise AgentR1Error(
            f"{what} needs {error.name or first_line(error)}: pip install 'agent-r1[{name}]'",
            code="missing_extra",
        ) from None


def first_line(error: BaseException) -> str:
    """Return the first line of a library's message, or else the exception's name."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def first_invalid(error: "ValidationError") -> str:
    """Describe where and why a message has another form, without repeating what was sent."""
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'body'}: {first['msg']}"


def nearest(name: str, names: Iterable[str]) -> str:
    """Return ` (did you mean 'grpo'?)`, or nothing if no name is close."""
    close = difflib.get_close_matches(str(name), list(names), n=1)
    if not close:
        return ""
    return f" (did you mean {close[0]!r}?)"
