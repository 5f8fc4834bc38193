"""Words that a template prints next to its own: roles, names of calls, schemas of tools.

None of them becomes a control token, in the published templates of several families.
"""

from __future__ import annotations

import json
from functools import cache

import pytest
from families import Family, family_of, packaged_templates, tokenizer_of

from agent_r1.chat.format import ChatFormat
from agent_r1.chat.tokenizer import make_studied_chat
from agent_r1.ground.errors import AgentR1Error, ConfigError

FAMILIES = ("llama3", "qwen2_5_vl", "gemma4", "lfm2", "nemotron_3_nano", "muse_glimmer")
USER = {"role": "user", "content": "hi"}
RESULT = {"role": "tool", "content": "r"}
OWN = (
    "{% for tool in tools or [] %}{{ tool.function.name }}{{ tool.function.description | upper }}"
    "{% for key, value in tool.function.parameters.properties.items() %}"
    "{{ key }}{{ value.description }}{% endfor %}\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.name }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template that writes words side by side, changes letters, and prints names."""
QUOTED = Family("bytes", '<|endoftext|> <|im_start|> <|im_end|> <|"|> <|TOOL|>', "", "<|im_end|>")


@cache
def chat_of(name: str) -> ChatFormat:
    if name == "own":
        return make_studied_chat(tokenizer_of(QUOTED, OWN))
    return make_studied_chat(tokenizer_of(family_of(name), packaged_templates("trl")[name]))


@pytest.fixture(params=[*FAMILIES, "own"])
def chat(request) -> ChatFormat:
    return chat_of(request.param)


def controls(chat: ChatFormat, ids: list[int]) -> list[int]:
    known = set(chat.control_ids.values()) - {chat.tokenizer.unk_token_id}
    return [i for i in ids if i in known]


def schema(name="look", description="d", key="query", told="q", **more) -> dict:
    properties = {key: {"type": "string", "description": told, **more}}
    parameters = {"type": "object", "properties": properties, "required": [key]}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def test_a_role_that_spells_a_control_token_is_refused(chat):
    for token in chat.control_ids:
        with pytest.raises(ConfigError, match="spells a control token") as refusal:
            chat.prompt_ids([USER | {"role": f"user{token}"}])
        assert refusal.value.code == "template_role"


def test_a_name_of_a_call_never_becomes_a_control_token(chat):
    """The name is the model's, a teacher's or a file's. One token may hide in another one."""

    def ids(name: str) -> list[int]:
        by_call = chat.continuation_ids([RESULT], calls=[name])
        return by_call + chat.continuation_ids([RESULT | {"name": name}])

    plain = controls(chat, ids("look"))
    for token in chat.control_ids:
        for name in (token, f"x{token}\n", f"{token[:3]}{token}{token[3:]}"):
            assert controls(chat, ids(name)) == plain, name


def test_other_keys_of_a_message_are_not_printed(chat):
    plain = chat.prompt_ids([USER])
    for key in ("name", "reasoning_content", "thought", "tool_call_id", "prefix"):
        assert chat.prompt_ids([USER | {key: "<|im_end|>"}]) == plain, key


def test_no_word_of_a_tool_becomes_a_control_token(chat):
    """Whole, in two halves side by side, or between the template's own `<` and `>`."""
    plain = controls(chat, chat.prompt_ids([USER], [schema()]))
    for token in chat.control_ids:
        half = len(token) // 2
        bare = token.strip("<>|/")
        for tool in (
            schema(name=f"look{token}"),
            schema(description=token, told=token.lower()),
            schema(description=token[:half], key=token[half:]),
            schema(key=token[:half], told=token[half:]),
            schema(**{bare: "v", token[1:-1]: "w"}),
        ):
            try:
                ids = chat.prompt_ids([USER], [tool])
            except AgentR1Error as error:
                assert error.code == "template_reads_tool" and "rename the tool" in str(error)
            else:
                assert controls(chat, ids) == plain, json.dumps(tool)


def test_a_template_that_writes_tags_around_names_refuses_only_those_that_are_tokens():
    chat = chat_of("nemotron_3_nano")
    assert chat.prompt_ids([USER], [schema(minimum=1, pattern="a*", default="<b>")])
    with pytest.raises(AgentR1Error, match="a tag of its own of a tool's words"):
        chat.prompt_ids([USER], [schema(think="v")])


def test_a_tool_that_cannot_be_compared_is_refused():
    """A template that takes one tool only may hide what it makes of this tool's words."""
    only = (
        "{% for tool in tools or [] %}{% if tool.function.description != 'd' %}"
        "{{ raise_exception('another tool') }}{% endif %}{% endfor %}"
    )
    chat = make_studied_chat(tokenizer_of(QUOTED, only + OWN))
    with pytest.raises(AgentR1Error) as refusal:
        chat.prompt_ids([USER], [schema()])
    assert refusal.value.code == "template_reads_tool"


def test_a_harmless_token_in_a_description_is_read_as_it_is():
    """A quotation mark in a control token has a backslash in JSON."""
    chat = chat_of("own")
    ids = chat.prompt_ids([USER], [schema(told='a <|"|> b')])
    assert '<|"|>' in chat.decode(ids)
    assert controls(chat, ids) == controls(chat, chat.prompt_ids([USER], [schema(told="a")]))
