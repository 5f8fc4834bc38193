"""What `@tool` reads: docstrings of four styles, `functools.partial`, and objects with
`__call__`."""

from __future__ import annotations

import asyncio
import functools
import math
import re

import pytest

from agent_r1.ground.errors import ConfigError
from agent_r1.tool import ToolCall, call_tool, tool
from agent_r1.tool.function import read_docstring

STYLES = {
    "Google": "Look up.\n\nArgs:\n    city: The city.\n    limit: At most\n        so "
        "many.\n\nReturns:\n    Text.",
    "Google, typed": "Look up.\n\nArgs:\n    city (str): The city.\n    limit (int, optional): At "
        "most so many.\n",
    "Google, Arguments": "Look up.\n\nArguments:\n  city: The city.\n  limit: At most so "
        "many.\nExample:\n  look(city: x)",
    "Google, more headings": "Look up.\n\nArgs:\n    city: The city.\n    limit: At most so "
        "many.\nNote: It is slow.\n"
    "Side effects:\n    other: None.\n",
    "Google, words with a colon": "Look up.\n\nArgs:\n    city: The\n        city.\n    limit: At "
        "most\n          so many.",
    "Google, at the margin": "Look up.\nArgs:\ncity: The city.\nlimit: At most so many.\nReturns: "
        "Text.",
    "Google, small letters": "Look up.\n\nargs:\n    city: The city.\n    limit: At most so "
        "many.",
    "Google, bold": "Look up.\n\n**Args:**\n    **city**: The city.\n    `limit` (int): At most so "
        "many.",
    "Google, a list": "Look up.\n\nArgs:\n    - city: The city.\n    - `limit`: At most\n      so "
        "many.",
    "Google, dashes": "Look up.\n\nArgs:\n    city - The city.\n    limit -- At most so many.",
    "NumPy": "Look up.\n\nParameters\n----------\ncity : str\n    The city.\nlimit : int, "
        "optional\n    At most so many.\n\n"
    "Returns\n-------\nstr\n    Text.",
    "Sphinx": "Look up.\n\n:param city: The city.\n:type city: str\n:param int limit: At most\n    "
        "so many.\n:returns: Text.",
    "Epydoc": "Look up.\n\n@param city: The city.\n@param limit: At most so many.\n@return: Text.",
}  # fmt: skip


@pytest.mark.parametrize("style", STYLES)
def test_every_style_says_the_same(style):
    def look(city: str, limit: int = 3) -> str:
        return f"{city} {limit}"

    look.__doc__ = STYLES[style]
    made = tool(look)
    assert made.name == "look" and made.description == "Look up."
    assert made.parameters == {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "The city."},
            "limit": {"type": "integer", "description": "At most so many."},
        },
        "required": ["city"],
        "additionalProperties": False,
    }


def test_a_continued_line_may_begin_with_a_word_and_a_colon():
    description, described = read_docstring(
        "Do it.\n\nArgs:\n    a: One of:\n        fast: now\n        http://x.y: later\n    b: "
        "Last.",
        ["a", "b"],
    )
    assert description == "Do it."
    assert described == {"a": "One of: fast: now http://x.y: later", "b": "Last."}


def test_several_paragraphs_and_examples_stay_in_the_description():
    text = "Do it.\n\nExample: do(1)\nNote: slow.\n\nArgs:\n    a: One."
    assert read_docstring(text, ["a"]) == ("Do it. Example: do(1) Note: slow.", {"a": "One."})
    assert read_docstring("Do it.\n\nYields:\n    Text.", []) == ("Do it. Yields: Text.", {})


@pytest.mark.parametrize(("section", "says"), [
    ("Args:\n    b: Last.", "does not describe a"), ("Args:\n    a: One.\n    c: "
        "What?", "describes c"),
    ("Parameters\n----------\na : int\n    One.\nc : int\n    "
        "Two.", "describes c"), (":param c: x", "does not describe a"),
    (":param", "does not describe a"),
])  # fmt: skip
def test_a_docstring_that_does_not_fit_is_refused(section, says):
    def it(a: int) -> str:
        return "x"

    it.__doc__ = f"Do it.\n\n{section}"
    with pytest.raises(ConfigError, match=says) as refused:
        tool(it)
    assert "\n" not in str(refused.value)


def convert(amount: float, rate: float, to: str = "EUR") -> str:
    """Convert an amount.

    Args:
        amount: How much.
        rate: The exchange rate.
        to: The currency.
    """
    return f"{amount * rate:g} {to}"


class LookUp:
    """Look a word up."""

    def __init__(self, words: dict[str, str]):
        self.words = words

    def __call__(self, word: str) -> str:
        """Look a word up.

        Args:
            word: The word.
        """
        return self.words[word]


class LookLater(LookUp):
    async def __call__(self, word: str) -> str:
        """Look a word up, later.

        Args:
            word: The word.
        """
        await asyncio.sleep(0)
        return self.words[word]


def ask(made, **arguments):
    return asyncio.run(call_tool({made.name: made}, ToolCall(made.name, arguments), 5.0, 1000))


def test_what_a_partial_has_set_is_no_matter_for_the_agent():
    by_name = tool(functools.partial(convert, rate=2.0))
    assert by_name.name == "convert" and by_name.description == "Convert an amount."
    assert list(by_name.parameters["properties"]) == ["amount", "to"]
    assert by_name.parameters["required"] == ["amount"]
    assert ask(by_name, amount=3.0).content == "6 EUR"
    by_place = tool(functools.partial(functools.partial(convert, 3.0), to="USD"))
    assert list(by_place.parameters["properties"]) == ["rate"]
    assert ask(by_place, rate=2.0).content == "6 USD"
    assert ask(by_place, rate=2.0, to="GBP").error == "invalid_arguments"


def test_an_object_that_can_be_called_is_a_tool():
    for made in (tool(LookUp({"a": "first"})), tool(functools.partial(LookUp({"a": "first"})))):
        assert made.name == "look_up" and made.description == "Look a word up."
        assert list(made.parameters["properties"]) == ["word"]
        assert ask(made, word="a").content == "first"
    later = tool(LookLater({"a": "first"}))
    assert later.is_async and ask(later, word="a").content == "first"


@pytest.mark.parametrize(
    "thing", [math.sqrt, len, print, functools.partial(math.pow, 2), lambda x: x, dict.get]
)
def test_what_cannot_be_read_is_refused_in_one_line(thing):
    with pytest.raises(ConfigError) as refused:
        tool(thing)
    assert re.fullmatch(r"@tool .+; (write|annotate|rename).*", str(refused.value)), refused.value


def test_a_failure_inside_a_partial_names_its_line():
    def broken(a: int, b: int) -> str:
        """Break.

        Args:
            a: One.
            b: Two.
        """
        return str(a / b)

    result = ask(tool(functools.partial(broken, b=0)), a=1)
    line = broken.__code__.co_firstlineno + 7
    assert result.data["at"] == f"{__file__}:{line}"
