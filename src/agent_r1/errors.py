"""The two ways in which this program says no. `cli.main` turns each into one line on standard error and an exit code.

Raise these, with the cause *and* the remedy in the message, for everything a user can mend. Any other exception that
reaches the command line is a bug of ours and keeps its traceback.
"""

import difflib
from collections.abc import Iterable


class AgentR1Error(Exception):
    """Something outside the program is not as it must be (a file, a port, memory)."""

    exit_code = 1


class ConfigError(AgentR1Error):
    """The request itself cannot be met: an unknown name, an impossible split, a wrong flag."""

    exit_code = 2


def first_line(error: BaseException) -> str:
    """What a library said, without its essay; the name of its exception where it said nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def nearest(name: str, names: Iterable[str]) -> str:
    """` (did you mean 'grpo'?)`, or nothing when no name is close. For the messages of ConfigError."""
    close = difflib.get_close_matches(str(name), list(names), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
