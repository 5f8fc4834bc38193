"""What a client may send, how long it may take, and which turn its answer is."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from types import SimpleNamespace

import pytest
from agents import gateway_flow
from conftest import ScriptedPolicy, question_row

from agent_r1 import (
    Generation,
    HermesToolEnv,
    Sampling,
    StopReason,
    Task,
    ToolCall,
    derive_seed,
    is_local_host,
    run_episodes,
)
from agent_r1_recipes.gateway import server
from agent_r1_recipes.gateway.episode import MOST_NAMES, count_names, find_turn
from agent_r1_recipes.gateway.flow import stop_of
from agent_r1_recipes.gateway.matching import Answer, Conversations, fewest_tokens
from agent_r1_recipes.gateway.server import Reply, serving
from agent_r1_recipes.gateway.wire import MOST_TOOL_LETTERS, Refusal, Turn, read_call

SEARCH = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}


def body(**changes):
    values = {"messages": [{"role": "user", "content": "x"}], "tools": [SEARCH]}
    return json.dumps(values | changes).encode()


# ------------------------------------------------------------------------------------ what is read


ODD = [None, True, 0, -1, 1.5, 10**400, "", "x", "x" * 201, [], [1], [None], {}, {"a": 1}, [[]]]
FIELDS = [
    "model", "messages", "tools", "stop", "max_tokens", "max_completion_tokens", "stream",
    "stream_options", "n", "tool_choice", "parallel_tool_calls", "logprobs", "temperature", "seed",
]  # fmt: skip


@pytest.mark.parametrize("field", FIELDS)
def test_odd_types_are_read_or_refused(field):
    for value in ODD:
        try:
            call = read_call(body(**{field: value}))
        except Refusal as refusal:
            assert refusal.status == 400 and len(str(refusal)) < 300
        else:
            assert len(call.model) <= 200


@pytest.mark.parametrize("part", ["role", "content", "tool_calls", "tool_call_id", "name"])
@pytest.mark.parametrize("role", ["user", "assistant", "tool"])
def test_odd_parts_of_a_message_are_read_or_refused(role, part):
    calls = [{"id": "['a']", "function": {"name": "search", "arguments": "{}"}}]
    first = {"role": "assistant", "tool_calls": calls}
    for value in [*ODD, ["a"]]:
        message = {"role": role, "content": "x", "tool_call_id": "['a']", part: value}
        try:
            call = read_call(body(messages=[first, message]))
        except Refusal as refusal:
            assert refusal.status == 400
        else:
            assert all(isinstance(one["content"], str) for one in call.messages)
            assert isinstance(call.messages[1].get("tool_call_id"), str | None)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "x" * 201},
        {"model": ["x"]},
        {"stop": ["x"] * 17},
        {"stop": ["x" * 201]},
        {"tools": [SEARCH] * 1001},
        {"tools": [{"type": "function", "function": {"name": "x" * 201}}]},
        {"tools": [{"type": "function", "function": {"name": "x", "description": 5}}]},
        {f"field-{n}": 1 for n in range(101)},
    ],
)
def test_names_and_numbers_are_bounded(changes):
    with pytest.raises(Refusal):
        read_call(body(**changes))


AMBIGUOUS = [
    b'{"messages": [], "messages": [{"role": "user", "content": "x"}]}',
    b'{"messages": [{"role": "user", "role": "system", "content": "x"}]}',
    b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
    b'{"messages": [{"role": "user", "content": "x"}], "metadata": {"a": -Infinity}}',
    b'{"messages": [{"role": "user", "content": "x"}], "metadata": {"a": 1e999}}',
]


@pytest.mark.parametrize("text", AMBIGUOUS)
def test_what_has_no_one_meaning_is_refused(text):
    with pytest.raises(Refusal, match="a key twice, NaN, Infinity"):
        read_call(text)


MANY = [
    '{"messages": [' + "1," * 10**6 + "1]}",
    '{"messages": [' + "[]," * 10**6 + "1]}",
    '{"messages": [' + '{"a":1},' * 10**6 + "1]}",
    '{"messages": [' + '"",' * 10**6 + "1]}",
    '{"messages": [' + '""' * 10**6,
    '{"messages": [' + '"\\"",' * 10**6 + "1]}",
    "[" * 10**6,
    json.dumps({str(n): n for n in range(2 * 10**5)}),
]


@pytest.mark.parametrize("text", MANY, ids=lambda text: text[13:25])
def test_a_body_of_many_small_values_is_refused(text, monkeypatch):
    """Each is an object of Python, and the loop that makes it is the sampler's."""
    monkeypatch.setattr(json, "loads", None)  # it is not parsed
    with pytest.raises(Refusal, match="more than 100000 values"):
        read_call(text.encode())


def test_few_values_of_any_text_are_read():
    """Commas, brackets and escaped quotation marks inside a text are no values."""
    messages = [{"role": "user", "content": ""}]
    assert read_call(body(messages=messages * 30_000)).messages
    with pytest.raises(Refusal, match="more than 100000 values"):
        read_call(body(messages=messages * 34_000))
    for text in ("1," * 10**6, "[{" * 10**6, '"' * 10**6, '\\",' * 10**6, "\\", '\\\\"'):
        assert (
            read_call(body(messages=[messages[0] | {"content": text}])).messages[0]["content"]
            == text
        )


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "utf-8-sig", "latin-1"])
def test_only_utf_8_is_read(encoding):
    """In UTF-16, a half of U+2200 has the byte of a quotation mark."""
    text = '{"messages": [{"role": "user", "content": "\u00fc"}]}'
    with pytest.raises(Refusal, match="not valid JSON"):
        read_call(text.encode(encoding))


LONG = [
    {"messages": [{"role": "user", "content": "a " * 10**6}]},
    {"messages": [{"role": "user", "content": "x"}] * 1000},
    {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y" * 10**6}]},
]


@pytest.mark.parametrize("request_body", LONG)
def test_what_cannot_fit_is_refused_before_it_is_encoded(micro, chat, monkeypatch, request_body):
    """To encode megabytes holds the event loop for seconds, and 30,000 messages for minutes."""
    policy = ScriptedPolicy(chat, lambda session, turn, ids: "<answer>Marn</answer>")
    replies = []

    async def agent(client, task):
        await client.ask([{"role": "user", "content": "x"}])
        with monkeypatch.context() as patch:
            patch.setattr(chat, "prompt_ids", None)
            patch.setattr(Conversations, "locate", None)
            messages = {"messages": [{"role": "user", "content": "x"}]}
            replies.append(await client.post(messages | request_body))

    flow = gateway_flow(
        policy, chat, agent, lambda row: HermesToolEnv(micro.tools, micro.config.env)
    )
    [episode] = asyncio.run(run_episodes(flow, [Task(question_row(), "0", "s", 5)], Sampling(40)))
    assert replies[0].status_code == 400
    error = replies[0].json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "500 tokens, and the messages have at least " in error["message"]
    assert len(episode.steps) == 1


def test_no_request_that_fits_is_taken_for_too_long(chat):
    """The bound is one: no token of the vocabulary covers more letters than the longest."""
    vocabulary = chat.tokenizer.get_vocab()
    words = sorted(vocabulary, key=len)[-30:]
    texts = [chat.tokenizer.convert_tokens_to_string([word]) for word in words]
    for text in ["", "x", *texts, " " * 500, "\n" * 500, "\u00fc\u4e2d\U0001f600" * 50, "a" * 500]:
        messages = [{"role": "user", "content": text * 5}] * 3
        assert fewest_tokens(messages, chat) <= len(chat.prompt_ids(messages, []))


def make_tool(letters: int) -> dict:
    schema = {"type": "object", "properties": {}}
    function = {"name": "x", "description": "d" * letters, "parameters": schema}
    return {"type": "function", "function": function}


def test_words_of_tools_that_a_template_leaves_out_take_no_room(chat):
    """The tiny model's template prints a tool as its signature."""
    messages = [{"role": "user", "content": "x"}]
    ids = chat.prompt_ids(messages, [make_tool(100_000)])
    assert fewest_tokens(messages, chat) <= len(ids) < 200


def test_tools_without_an_end_are_refused_before_they_are_encoded():
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [make_tool(MOST_TOOL_LETTERS)]}
    with pytest.raises(Refusal, match="the tools have more than"):
        read_call(json.dumps(body).encode())
    body["tools"] = [make_tool(MOST_TOOL_LETTERS // 2)]
    assert read_call(json.dumps(body).encode()).tools


def test_fields_that_a_client_made_up_are_few_metrics():
    counts = Counter()
    for step in range(10):
        count_names(counts, Counter([f"ignored_{step}_{n}" for n in range(100)]))
    count_names(counts, Counter(["ignored_\x1b[31m", "ignored_" + "x" * 99, "overridden_seed"]))
    assert len(counts) == MOST_NAMES + 2 and counts["ignored_others"] == 1000 - MOST_NAMES + 2


@pytest.mark.parametrize(
    ("choice", "required"),
    [
        ("auto", ""),
        ("none", ""),
        (None, ""),
        ("required", "any"),
        ({"type": "function", "function": {"name": "search"}}, "search"),
    ],
)
def test_a_call_that_a_client_requires_is_sampled_freely(choice, required):
    call = read_call(body(tool_choice=choice))
    assert call.required == required and bool(call.tools) == (choice != "none")


@pytest.mark.parametrize("choice", ["any", 1, {}, {"function": {"name": "other"}}, ["required"]])
def test_a_tool_choice_that_fits_no_tool_is_refused(choice):
    with pytest.raises(Refusal, match="tool_choice must be"):
        read_call(body(tool_choice=choice))
    with pytest.raises(Refusal, match="tool_choice must be"):
        read_call(body(tool_choice="required", tools=[]))


# --------------------------------------------------------------------------------------- the server


async def handle(request):
    return Reply.of({"bytes": len(request.body)})


async def send(port, *pieces, pause=0.0):
    """Send pieces, and return all that comes back before the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(pause)
        return await asyncio.wait_for(reader.read(), 60)
    except ConnectionError:
        return b""
    finally:
        writer.close()


def talk(*pieces, pause=0.0, **options):
    async def run():
        async with serving(handle, **options) as port:
            return await send(port, *pieces, pause=pause)

    return asyncio.run(run())


@pytest.mark.parametrize(
    "pieces",
    [
        (),
        (b"POST / HT",),
        (b"POST / HTTP/1.1\r\nhost: localhost\r\n",),
        (b"POST / HTTP/1.1\r\ncontent-length: 5\r\n\r\n", b"12"),
        (b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n", b"2\r\n12\r\n"),
    ],
)
def test_a_slow_request_is_ended(monkeypatch, pieces):
    for name in ("HEADERS_S", "BODY_S"):
        monkeypatch.setattr(server, name, 0.2)
    assert talk(*pieces).startswith(b"HTTP/1.1 408 ")


def refuse(request):
    return Reply.of({"error": {"message": "no key"}}, 401)


@pytest.mark.parametrize("length", [2, 1_000_000])
def test_a_refusal_is_read_by_who_still_sends_the_body(length):
    """A socket that is closed over unread bytes sends a reset, and the answer is lost."""
    head = b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % length
    for pause in (0.0, 0.01) * 10:
        answer = talk(head, b"x" * length, pause=pause, admit=refuse)
        assert answer.startswith(b"HTTP/1.1 401 ") and answer.endswith(b"}}")
        # Or a client's next request would meet the reset.
        assert b"\r\nconnection: close\r\n" in answer


def test_who_never_stops_sending_is_cut_off(monkeypatch):
    monkeypatch.setattr(server, "LINGER_S", 0.2)

    async def run():
        async with serving(handle, admit=refuse) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST / HTTP/1.1\r\ncontent-length: 9999999\r\n\r\n")
            answer = await reader.readuntil(b"}}")
            sent = 0
            with pytest.raises(ConnectionError):
                while True:
                    writer.write(b"x")
                    await writer.drain()
                    await asyncio.sleep(0.05)
                    sent += 1
            return sent, answer

    sent, answer = asyncio.run(asyncio.wait_for(run(), 60))
    assert sent >= 3 and answer.startswith(b"HTTP/1.1 401 ")


def test_an_idle_connection_is_closed_without_a_word(monkeypatch):
    monkeypatch.setattr(server, "IDLE_S", 0.2)
    answer = talk(b"POST / HTTP/1.1\r\ncontent-length: 2\r\n\r\n12")
    assert answer.startswith(b"HTTP/1.1 200 ") and answer.endswith(b'{"bytes": 2}')


def test_a_client_that_reads_nothing_is_ended(monkeypatch):
    monkeypatch.setattr(server, "ANSWER_S", 0.2)
    sent = []

    async def large(request):
        return Reply(200, [b"x" * 50_000_000], on_sent=sent.append)

    async def run():
        async with serving(large) as port:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            while not sent:
                await asyncio.sleep(0.05)
            writer.close()

    asyncio.run(asyncio.wait_for(run(), 60))
    assert sent == [False]


def test_more_connections_than_the_bound_get_503(monkeypatch):
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 3)

    async def run():
        async with serving(handle) as port:
            open_ones = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
            refused = await send(port)
            for _, writer in open_ones:
                writer.close()
            while True:  # the server hears of the ends a moment later
                answer = await send(port, b"GET / HTTP/1.1\r\n\r\n", b"BAD\r\n\r\n")
                if answer.startswith(b"HTTP/1.1 200"):
                    return refused, answer

    refused, answer = asyncio.run(asyncio.wait_for(run(), 60))
    assert refused.startswith(b"HTTP/1.1 503 ") and answer.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "head",
    [
        b"x: y\r\n" * 101,
        b"content-length: 1_0\r\n",
        b"content-length: +2\r\n",
        b"content-length: 99999999999999999999999\r\n",
        b"content-length: 2\r\ntransfer-encoding: chunked\r\n",
        b"content-length: -2\r\n",
        b"content-length: 2\r\ncontent-length: 2\r\n",
        b"content-length:\r\n",
        b"transfer-encoding: gzip, chunked\r\n",
        b"transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n",
        b"host: evil.example\r\nhost: localhost\r\n",
        b"host:\r\n evil.example\r\n",
        b"host : localhost\r\n",
        b"no colon\r\n",
        b"x: a\rhost: evil.example\r\n",
        b"x: \0\r\n",
        b"authorization: a\r\nauthorization: b\r\n",
    ],
)
def test_headers_that_are_too_many_or_odd_are_refused(head):
    answer = talk(b"POST / HTTP/1.1\r\n" + head + b"\r\n2\r\n12\r\n0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("version", [b"HTTP/2.0", b"HTTP/0.9", b"HTTP/1.1 x", b"http/1.1"])
def test_another_version_of_http_is_refused(version):
    assert talk(b"GET / " + version + b"\r\n\r\n").startswith(b"HTTP/1.1 400 ")


CHUNKED = b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "chunks",
    [
        b"-2\r\n12\r\n", b"+2\r\n12\r\n", b"0x2\r\n12\r\n", b"0_2\r\n12\r\n", b"\r\n12\r\n",
        b"ffffffffffffffff\r\n12", b"7a1201\r\n12", b"00000000000000002\r\n12\r\n",
        b"2\r\n123\r\n0\r\n\r\n", b"2\r\n12\r\n0\r\nno trailer\r\n\r\n", b"2\r\n12XX0\r\n\r\n",
    ],
)  # fmt: skip
def test_odd_chunks_are_refused(chunks):
    answer = talk(CHUNKED + chunks)
    assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1") == 1


def test_trailers_belong_to_their_body():
    answer = talk(CHUNKED + b"2;a=b\r\n12\r\n0\r\nX-Digest: 5\r\n\r\nBAD\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ") and answer.count(b"HTTP/1.1 400") == 1


def test_the_chunks_of_a_body_are_few(monkeypatch):
    """Each is a turn of the event loop, which is the sampler's."""
    monkeypatch.setattr(server, "MAX_CHUNKS", 10)
    for count, status in ((9, b"200"), (10, b"400")):
        answer = talk(CHUNKED + b"1\r\nx\r\n" * count + b"0\r\n\r\nBAD\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 " + status)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        (b"127.0.0.1:80", 200),
        (b"localhost", 200),
        (b"[::1]:9", 200),
        (b"evil.example", 421),
        (b"127.0.0.1.evil.example:80", 421),
        (b"localhost.evil.example", 421),
    ],
)
def test_a_web_page_under_its_own_name_is_refused(host, status):
    request = b"GET / HTTP/1.1\r\nhost: " + host + b"\r\n\r\nBAD\r\n\r\n"
    assert talk(request).startswith(b"HTTP/1.1 %d " % status)
    assert is_local_host(host.decode()) == (status == 200)


def test_what_is_not_admitted_sends_no_body():
    """The answer comes before the eight megabytes that were announced."""
    refusal = Reply.of({"error": "no key"}, 401)
    request = b"POST / HTTP/1.1\r\ncontent-length: 8000000\r\n\r\n"
    assert talk(request, admit=lambda request: refusal).startswith(b"HTTP/1.1 401 ")


# ---------------------------------------------------------------------------- which turn is scored


def conversations(*turns):
    """Turns of the model, each a content or (content, arguments of a call)."""
    tree = Conversations()
    for number, turn in enumerate(turns):
        content, arguments = turn if isinstance(turn, tuple) else (turn, None)
        calls = []
        if arguments is not None:
            calls = [(f"call_{number:016x}", ToolCall("final_answer", arguments))]
        answer = Answer(f"place {number}", "", number, [1])
        answer.generation = Generation([2], [0.0], "stop")
        answer.turn = Turn(content, "", calls, "stop")
        tree.answers.append(answer)
    return tree


@pytest.mark.parametrize(
    ("turns", "reported", "number"),
    [
        (["<answer>no</answer>", "I know now that it was so."], "no", 0),
        (["<answer>no</answer>", "There is no doubt."], "no", 0),
        (["<answer>no</answer>", "no"], "<answer>no</answer>", 0),
        (["The answer is no.", "I know."], "no", 0),
        (["<answer>a</answer>", "<answer>a</answer>"], "a", 1),
        (["<answer> Ada \n Kim </answer>"], "Ada Kim", 0),
        (["It costs 1.5 euros."], "1", None),
        (["It costs 15 euros."], "5", None),
        (["It costs 5."], "5", 0),
        (["It is -5."], "5", None),
        (["It is -5."], "-5", 0),
        (["It costs 1,500."], "500", None),
        (["It costs 1,500."], "1", None),
        (["It costs 1, 5 or 7."], "5", 0),
        (["Cafe\u0301"], "Caf\u00e9", 0),
        ([("", {"city": "Oslo", "rooms": 2}), "Done."], '{"rooms": 2, "city": "Oslo"}', 0),
        ([("", {"answer": {"city": "Oslo"}})], '{"city": "Oslo"}', 0),
        ([("", {"city": "Oslo"})], '{"city": "Marn"}', None),
        (["I know."], "no", None),
        (["<answer>no"], "no", 0),
        (["nobody", "Oslo is it", "Oslo"], "Oslo", 2),
        ([("", {"answer": "Marn"}), "Marn is a town."], "Marn", 0),
        ([("", {"answer": 5})], "5", 0),
        ([("", {"answer": "Marn"})], "Mar", None),
        (["C++ (a language)"], "C++", 0),
        (["no\u200bw or k\u00adno\u2060w"], "no", None),
        (["n\u200bo"], "no", 0),
        (["The word no\u0328\u0336 has two accents."], "no", None),
        (["\u0915\u0940"], "\u0915", None),  # a Hindi letter with its vowel sign
        (["\u0915 \u0940"], "\u0915", 0),
    ],
)
def test_an_answer_is_marked_or_whole_words(turns, reported, number):
    tree = conversations(*turns)
    found, argument = find_turn(reported, tree)
    assert (None if found is None else tree.answers.index(found)) == number
    in_call = number is not None and isinstance(turns[number], tuple)
    assert argument == (reported if in_call else None)


def assistant(content, *calls):
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


USER = {"role": "user", "content": "q"}


def test_examples_of_the_prompt_are_no_cuts():
    tree = Conversations()
    prompt = [USER, assistant("an example"), USER, assistant("another"), USER]
    place = tree.locate(prompt, [])
    for turn in ("first", "second"):
        answer = Answer(place.digest, "", len(tree.answers), [1], place.last, place.rest)
        answer.turn = Turn(turn, "", [], "stop")
        answer.generation = Generation([2], [0.0], "stop")
        tree.answers.append(answer)
        prompt += [assistant(turn), USER]
        place = tree.locate(prompt, [])
        assert place.last is answer and not tree.cuts
    tree.locate([*prompt[:5], assistant("made up"), USER], [])
    assert tree.cuts == {"edited": 1}


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("Calling tools:\n[{'id': 'ID', 'function': {'name': 'search', 'q': 'Oslo'}}]", True),
        ("thinking\nCalling tools:\n[{'id': 'ID', 'name': 'search', 'q': 'Oslo'}]", True),
        ("Calling tools:\n[{'id': 'ID', 'name': 'search', 'q': 'Rome'}]", False),
        ("Calling tools:\n[{'id': 'ID', 'name': 'browse', 'q': 'Oslo'}]", False),
        ("Calling tools:\n[{'id': 'call_0', 'name': 'search', 'q': 'Oslo'}]", False),
        ("I searched for Oslo.", False),
    ],
)  # fmt: skip
def test_a_history_that_quotes_a_call_as_text_continues_it(text, same):
    key = "call_00112233445566aa"
    tree = Conversations()
    place = tree.locate([USER], [])
    answer = Answer(place.digest, "", 0, [1], None, place.rest)
    answer.turn = Turn("thinking" if "thinking" in text else "", "", [], "tool_calls")
    answer.turn.calls = [(key, ToolCall("search", {"q": "Oslo"}))]
    answer.generation = Generation([2], [0.0], "stop")
    tree.answers.append(answer)
    place = tree.locate([USER, assistant(text.replace("ID", key)), USER], [])
    assert (place.last is answer) == same and answer.is_continued == same
    assert tree.cuts == ({} if same else {"edited": 1})


def an_answer(number, prompt_ids, token_ids, finish_reason="stop"):
    answer = Answer(str(number), "", number, prompt_ids)
    answer.generation = Generation(token_ids, [0.0] * len(token_ids), finish_reason)
    answer.turn = Turn("", "", [], finish_reason)
    return answer


def test_a_turn_joins_the_row_whose_tokens_it_continues_furthest():
    """The third turn continues both rows, and was sampled after the longer one."""
    short = an_answer(0, [1], [2])
    long = an_answer(1, [1], [2, 3])
    third = an_answer(2, [1, 2, 3, 4], [5])
    for order in ([short, long, third], [long, short, third]):
        rows = Conversations().rows(order)
        assert sorted(rows, key=len) == [[short], [long, third]]


@pytest.mark.parametrize(
    ("room", "stop"), [(63, StopReason.CONTEXT_OVERFLOW), (64, StopReason.MAX_TOKENS)]
)
def test_a_turn_that_the_context_cut_is_an_overflow(room, stop):
    episode = SimpleNamespace(max_context=100, sampling=Sampling(64))
    assert stop_of(an_answer(0, [1] * (100 - room), [2], "length"), episode) is stop


def test_a_second_sample_of_a_turn_has_other_noise(micro, chat):
    seeds = []

    class Policy(ScriptedPolicy):
        async def generate(self, prompt_ids, sampling, session=None):
            seeds.append(sampling.seed)
            return await super().generate(prompt_ids, sampling, session)

    async def agent(client, task):
        message = (await client.ask(list(task["messages"])))["message"]
        more = [*task["messages"], message, {"role": "user", "content": "go on"}]
        for _ in range(2):
            await client.ask(more)

    turns = ["<answer>a</answer>", "<answer>b</answer>", "<answer>c</answer>"]
    flow = gateway_flow(
        Policy(chat, turns), chat, agent, lambda row: HermesToolEnv(micro.tools, micro.config.env)
    )
    asyncio.run(run_episodes(flow, [Task(question_row(), "0", "s", 5)], Sampling(64)))
    assert seeds == [derive_seed(5, 0), derive_seed(5, 1), derive_seed(5, 1, 1)]
