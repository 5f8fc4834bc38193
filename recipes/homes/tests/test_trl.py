"""The class for TRL: its schemas, its episodes and its reward. `make long PART=homes` asks TRL."""

from __future__ import annotations

import json

import pytest
from transformers.utils import get_json_schema

from agent_r1_recipes.homes.trl import method_of, reward, trl_home, turn_text
from agent_r1_recipes.support.tasks import POLICY, RIGHT_ACTIONS, WORDS


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENT_R1_HOME", str(tmp_path_factory.mktemp("home")))
        yield trl_home("support", "data.train=12", "data.val=2", "data.test=2")


def test_only_the_tools_are_public_methods(home):
    public = [n for n in dir(home) if not n.startswith("_") and callable(getattr(home, n))]
    assert sorted(public) == ["look_up", "refund", "replace", "reset", "rows"]
    schema = get_json_schema(home().refund)["function"]
    assert schema["parameters"] == {
        "type": "object",
        "properties": {
            "order": {"type": "integer", "description": "Number of the order."},
            "amount": {"type": "integer", "description": "Dollars to pay back."},
        },
        "required": ["order", "amount"],
    }


def play(episode, row):
    """Do what the policy demands; return the messages that TRL would have."""
    shown = episode.reset(**row)
    assert shown == f"\n{POLICY}"
    task = row["extra_info"]["metadata"]
    order = task["order"]
    item, price, state = episode.look_up(order=order).split(", ")
    action = RIGHT_ACTIONS[task["complaint"], state]
    if action == "refund":
        assert episode.refund(order=order, amount=int(price.split()[0])).startswith("paid")
    if action == "replace":
        assert episode.replace(order=order) == "sent again"
    answer = f"<answer>{WORDS[action]} the {item}</answer>"
    return [{"role": "assistant", "content": answer}]


def test_an_object_plays_one_episode_after_the_other(home):
    rows = home.rows("train")
    episode, other = home(), home()
    right = [play(episode, row) for row in rows[:3]]
    assert reward(completions=right[-1:], environments=[episode], prompts=None) == [1.0]
    play(other, rows[0])
    silent = [{"role": "assistant", "content": "<answer>done</answer>"}]
    assert reward(completions=[silent, right[0]], environments=[episode, other]) == [0.0, 1.0]
    # The turn limit, or a result that did not fit: no answer was given.
    call = {"type": "function", "function": {"name": "look_up", "arguments": {"order": 1}}}
    cut = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    play(other, rows[0])
    assert reward(completions=[cut], environments=[other]) == [0.0]
    assert other.look_up(order="x").startswith("error")


def test_a_parsed_message_is_a_turn_again():
    function = {"name": "add", "arguments": {"a": 1}}
    message = {"role": "assistant", "content": "so: ", "tool_calls": [{"function": function}]}
    text = turn_text(message)
    assert text.startswith("so: <tool_call>")
    assert json.loads(text[text.index("{") : text.rindex("}") + 1]) == function


def test_a_tool_without_arguments_and_one_with_a_default():
    schema = {
        "description": "Look.",
        "parameters": {
            "properties": {"place": {"type": "string", "default": "here"}},
            "required": [],
        },
    }
    parameters = get_json_schema(method_of("look", schema))["function"]["parameters"]
    assert parameters.get("required", []) in ([], ["self"])
    assert method_of("now", {"parameters": {}}).__doc__ == "now"


def test_another_dialect_is_refused(tmp_path, monkeypatch):
    from conftest import fails_with

    monkeypatch.setenv("AGENT_R1_HOME", str(tmp_path))
    with fails_with("agent_needs_hermes"):
        trl_home("tinymath", "env.name=react", "data.train=12", "data.val=2", "data.test=2")
