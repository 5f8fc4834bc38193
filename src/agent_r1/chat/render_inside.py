"""Render a stranger's chat template: the inner side, a program in a fresh interpreter.

    python -I -S render_inside.py FOLDER_OF_JINJA2 FOLDER_OF_MARKUPSAFE

In: lines of JSON on standard input. The first has the template, the time that it sees, and limits;
each later one is a conversation. Out: a line of JSON for each. `renderer.py` is the outer side.

A template is a program that came with a model. Jinja's sandbox keeps it from files and from the
insides of Python. It does not stop a loop without an end, a power with a billion digits, or a
filter that fills the memory. So nothing but jinja2 is imported here, and the kernel limits the
processor time of each rendering and the memory of the whole process.
"""

from __future__ import annotations

import json
import math
import resource
import sys
from contextlib import suppress
from datetime import datetime
from typing import Any, cast

sys.path += sys.argv[1:]  # only what `renderer.py` names: this interpreter has no site-packages

import jinja2  # noqa: E402
from jinja2 import nodes  # noqa: E402
from jinja2.ext import Extension, loopcontrols  # noqa: E402
from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: E402


class Generation(Extension):
    """Read `{% generation %}`, with which `transformers` marks the agent's words, as its body."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def raise_exception(message: str) -> None:
    """Let a template refuse a conversation, as in `transformers`."""
    raise jinja2.exceptions.TemplateError(message)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON without Jinja's escapes for HTML, as in `transformers`."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def make_environment(now: datetime) -> ImmutableSandboxedEnvironment:
    """Make the environment in which `transformers` renders; a test compares all templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    names = cast(dict[str, Any], environment.globals)  # its type allows jinja2's own names only
    names["raise_exception"] = raise_exception
    names["strftime_now"] = now.strftime
    return environment


def without_comments(template: str) -> str:
    """Cut `{# ... #}` out, in linear time also where a million comments have no end."""
    kept: list[str] = []
    start = 0
    while True:
        opening = template.find("{#", start)
        closing = template.find("#}", opening + 2) if opening >= 0 else -1
        if closing < 0:
            kept.append(template[start:])
            return "".join(kept)
        kept.append(template[start:opening])
        start = closing + 2


def only_copies(environment: ImmutableSandboxedEnvironment, template: str) -> bool:
    """Return whether each use of a message's `content` in the template only copies it.

    Then a placeholder ends up where a content would. False if that is not certain.
    """
    template = without_comments(template)
    tree = environment.parse(template)
    parent = {
        child: node for node in tree.find_all(nodes.Node) for child in node.iter_child_nodes()
    }
    copies = 0
    for access in tree.find_all((nodes.Getattr, nodes.Getitem)):
        name = access.attr if isinstance(access, nodes.Getattr) else access.arg
        if getattr(name, "value", name) != "content":
            continue
        # Up through `'user\n' + content + '\n'` and `content or ''`; a filter or a test ends it.
        above: Any = access
        while isinstance(parent[above], (nodes.Add, nodes.Or)):
            above = parent[above]
        copies += isinstance(parent[above], nodes.Output)
    # A whole message may be passed on, too: `message | tojson`.
    whole = {"messages"}
    for loop in tree.find_all(nodes.For):
        if getattr(loop.iter, "name", "") == "messages":
            whole.add(getattr(loop.target, "name", ""))
    for name in tree.find_all(nodes.Name):
        above = parent[name]
        reads = (nodes.Getattr, nodes.Getitem, nodes.For)
        if name.name in whole and not isinstance(above, reads):
            return False
    words = template.replace("_", "a")  # a name such as `content_type` is another word
    return copies == sum(
        word == "content" for word in "".join(c if c.isalnum() else " " for c in words).split()
    )


def limit(kind: int, amount: int) -> None:
    """Lower a limit of this process, where the system has it."""
    with suppress(ValueError, OSError):
        resource.setrlimit(kind, (amount, resource.getrlimit(kind)[1]))


def allow_seconds(seconds: int) -> None:
    """Let the kernel end this process after so many more seconds of processor time."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    limit(resource.RLIMIT_CPU, math.ceil(usage.ru_utime + usage.ru_stime) + seconds)


def main() -> None:
    first = json.loads(sys.stdin.readline())
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_FSIZE, 0)
    limit(resource.RLIMIT_AS, first["bytes"])
    environment = make_environment(datetime.fromisoformat(first["now"]))
    template = None
    for line in sys.stdin:
        allow_seconds(first["seconds"])
        try:
            if template is None:
                template = environment.from_string(first["template"])
            request = json.loads(line)
            if request is None:
                answer = {"copies": only_copies(environment, first["template"])}
            else:
                answer = {"text": template.render(**request)}
        except Exception as error:  # whatever a stranger's program raises
            answer = {"error": type(error).__name__, "why": str(error)[:500]}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
