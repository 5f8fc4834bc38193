"""AgentR1Error: the world is wrong (a file, a port, memory), exit code 1. ConfigError: the request is wrong, exit code 2.

Raise them with the cause and the remedy in the message, for everything that a user can mend; `cli.main` prints one line. Any
other exception that reaches the command line is a bug of ours and keeps its traceback.
"""

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class AgentR1Error(Exception):
    """Something outside the program is not as it must be.

    `code` names the kind of failure in one word, such as `missing_index`. Tests and programs compare it; the message is for
    people and may be rewritten. tests/messages.txt lists every code with its messages.
    """

    exit_code = 1

    def __init__(self, message: str, *, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class LostConnection(AgentR1Error):
    """A request to a model server that lives was not answered: it costs one episode, where other errors end them all."""


class ConfigError(AgentR1Error):
    """The request itself cannot be met: an unknown name, an impossible split, a wrong flag."""

    exit_code = 2


@contextmanager
def extra(name: str, what: str) -> Iterator[None]:
    """Around imports that `what` needs and the extra `name` brings: raises AgentR1Error with pip's command where one fails.

    The command adds what is missing to an installed wheel and to a checkout.
    """
    try:
        yield
    except ImportError as error:
        raise AgentR1Error(
            f"{what} needs {error.name or first_line(error)}: pip install 'agent-r1[{name}]'", code="missing_extra"
        ) from None


def first_line(error: BaseException) -> str:
    """What a library said, without its essay; the name of its exception where it said nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def nearest(name: str, names: Iterable[str]) -> str:
    """` (did you mean 'grpo'?)`, or nothing when no name is close. For the messages of ConfigError."""
    close = difflib.get_close_matches(str(name), list(names), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
