"""Room 7, the tiny model: one spelling a name, a template that others render alike, an
initialisation that looks back."""

from __future__ import annotations

import json
import random

import pytest
import torch
from conftest import VOCAB, fails_with, random_model, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from agent_r1.chat.format import ChatFormat
from agent_r1.chat.tokenizer import (
    SPECIAL,
    TAG_TOKENS,
    load_chat,
    load_tokenizer,
    save_tokenizer,
    train_tokenizer,
)
from agent_r1.config.load import load_config
from agent_r1.ground.errors import AgentR1Error
from agent_r1.model import files as model_files
from agent_r1.model.decoder import Decoder, causal_attention
from agent_r1.training.settings import INDUCTION_PAIRS, TinyModelConfig
from agent_r1_recipes.laptop.tinyhop import make_world

# ---------------------------------------------------------------------------------------- tokenizer


@pytest.mark.parametrize(
    "file", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"]
)
@pytest.mark.parametrize("text", ["[" * 100_000, "[]"], ids=lambda text: text[:5])
def test_a_damaged_tokenizer_is_refused_in_one_line(tokenizer, tmp_path, file, text):
    save_tokenizer(tokenizer, tmp_path)
    (tmp_path / file).write_text(text)
    with pytest.raises(AgentR1Error, match="cannot be read"):
        load_chat(tmp_path)


def test_the_vocabulary_is_as_large_as_asked_with_every_control_token_in_it(tokenizer):
    assert len(tokenizer) == VOCAB
    for token in (*SPECIAL, *TAG_TOKENS):
        ids = tokenizer.backend_tokenizer.encode(token, add_special_tokens=False).ids
        assert len(ids) == 1 and tokenizer.convert_ids_to_tokens(ids) == [token]
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")


def test_tags_stay_visible_where_special_tokens_are_left_out(tokenizer):
    """A server decodes with `skip_special_tokens`; a tool-call parser must still see the tags."""
    ids = tokenizer.backend_tokenizer.encode("<|im_start|>a<tool_call>b</tool_call><|im_end|>").ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<tool_call>b</tool_call>"


@settings(deadline=None)
@given(st.text())
def test_any_text_can_be_written_and_read(tokenizer, text):
    assert (
        tokenizer.decode(
            tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=False
        )
        == text
    )


def test_a_name_has_one_spelling(chat):
    """What copying needs: behind a blank, a quote, a bracket or a newline, a name is the same
    tokens."""
    world = make_world(random.Random(99), 60, set())
    frames = [
        "Who founded {}?",
        '{{"query": "{}"}}',
        "({})",
        "x\n{}\ny",
        "<answer>{}</answer>",
        "In {}, {} and {}.",
    ]
    for name in {passage.title for passage in world.passages()}:
        spelling = chat.encode_trusted(name)
        for frame in frames:
            ids = chat.encode_trusted(frame.format(name, name, name))
            found = [i for i in range(len(ids)) if ids[i : i + len(spelling)] == spelling]
            assert len(found) == frame.count("{}"), (name, frame)


def test_no_token_reaches_across_the_beginning_of_a_name(tokenizer):
    for token in tokenizer.get_vocab():
        if token not in (*SPECIAL, *TAG_TOKENS):
            assert not any(c.isascii() and c.isupper() for c in token[1:]), token


def test_a_saved_tokenizer_is_the_same_for_us_and_for_transformers(tokenizer, tmp_path):
    """Also beside a config.json that says qwen2, where transformers 5 would take Qwen's own
    splitting instead."""
    model_files.save_model(
        random_model(VOCAB), tmp_path, tokenizer.eos_token_id, tokenizer.pad_token_id
    )
    save_tokenizer(tokenizer, tmp_path)
    text = "<|im_start|>user\nWho directed Zaxlax in Vexlor?<|im_end|>\n<tool_call>\n{}"
    for again in (
        load_tokenizer(tmp_path),
        AutoTokenizer.from_pretrained(tmp_path, local_files_only=True),
    ):
        assert again.encode(text) == tokenizer.encode(text) and len(again) == len(tokenizer)
        assert again.chat_template == tokenizer.chat_template
        assert (again.eos_token_id, again.pad_token_id) == (
            tokenizer.eos_token_id,
            tokenizer.pad_token_id,
        )
        assert ChatFormat(again).control_ids == ChatFormat(tokenizer).control_ids


def test_the_same_texts_give_the_same_tokenizer():
    texts = ["Who founded Vexlor?", "Marn was born in Tulo."] * 30
    assert train_tokenizer(texts, 300).get_vocab() == train_tokenizer(texts, 300).get_vocab()


# ----------------------------------------------------------------------------------------- template


def render(tokenizer, messages, **options) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)


def test_the_template_by_hand(tokenizer):
    tools = [
        {
            "type": "function",
            "function": {"name": "search", "parameters": {"properties": {"query": {}, "k": {}}}},
        }
    ]
    messages = [
        {"role": "system", "content": "Be brief. "},
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": "<think>hm</think>"},
        {"role": "tool", "content": "one"},
        {"role": "tool", "content": "two"},
        {"role": "assistant", "content": "done"},
    ]
    assert render(tokenizer, messages, tools=tools) == (
        "<|im_start|>system\nBe brief. tools: search(query, k)<|im_end|>\n"
        "<|im_start|>user\nWho?<|im_end|>\n"
        "<|im_start|>assistant\n<think>hm</think><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\ndone<|im_end|>\n"
    )
    assert render(tokenizer, messages[1:2], add_generation_prompt=True) == (
        "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("as_text", [True, False])
def test_a_structured_call_is_rendered_as_the_agent_writes_it(tokenizer, as_text):
    """OpenAI-style clients send calls as objects; a server must show the model its own words."""
    arguments = {"query": "Vexlor"}
    call = {"name": "search", "arguments": json.dumps(arguments) if as_text else arguments}
    messages = [
        {"role": "user", "content": "Who?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"type": "function", "function": call}],
        },
    ]
    written = '<tool_call>\n{"name": "search", "arguments": {"query": "Vexlor"}}\n</tool_call>'
    assert render(tokenizer, messages).endswith(f"<|im_start|>assistant\n{written}<|im_end|>\n")


# ---------------------------------------------------------------------------------- initial weights


@pytest.fixture(scope="module")
def model() -> Decoder:
    return tiny_model(
        TinyModelConfig(vocab_size=VOCAB, hidden_size=128, heads=4, kv_heads=4), VOCAB
    )


def test_weights_depend_on_their_seed_alone(model):
    config = TinyModelConfig(vocab_size=VOCAB, hidden_size=128, heads=4, kv_heads=4)
    torch.manual_seed(1)
    same = tiny_model(config, VOCAB, seed=0)
    other = tiny_model(config, VOCAB, seed=1)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), same.parameters(), strict=True)
    )
    assert not torch.equal(model.embed.weight, other.embed.weight)


def attention_of(model: Decoder, layer: int, head: int, ids: list[int]) -> torch.Tensor:
    """Attention weights [T, T] of one head on a text."""
    seen = {}

    def watching(number, q, k, v):
        T = q.shape[2]
        scores = (q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2)) / q.shape[
            -1
        ] ** 0.5
        mask = torch.ones(T, T).tril().bool()
        seen[number] = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        return causal_attention(number, q, k, v)

    with torch.no_grad():
        model(torch.tensor([ids]), torch.arange(len(ids))[None], watching)
    return seen[layer][0, head]


def test_the_previous_token_head_looks_one_position_back(model):
    ids = random.Random(0).choices(range(VOCAB), k=60)
    weights = attention_of(model, 0, 0, ids)
    back = torch.tensor([weights[t, t - 1] for t in range(1, 60)])
    assert (weights[1:].argmax(-1) == torch.arange(59)).all() and back.mean() > 0.8
    neighbours = torch.stack(
        [(weights[t, t - 1] / weights[t, [t - 2, t]].max()).log() for t in range(2, 60)]
    )
    assert neighbours.mean() == pytest.approx(4, abs=1)  # "about 4 above its neighbours'"


def test_the_induction_head_leans_towards_what_stood_behind_the_last_occurrence(model):
    """On `a b ... a`, it favours b before any training. Not more than that: the rest is what
    training is for."""

    def share_of_chance(head: int) -> float:
        found = []
        for seed in range(10):
            names = random.Random(seed).sample(range(VOCAB), 24)
            weights = attention_of(model, 1, head, names + names[:-1])
            found += [weights[24 + i, i + 1].item() * (25 + i) for i in range(23)]
        return sum(found) / len(found)

    assert share_of_chance(0) > 4
    assert share_of_chance(1) == pytest.approx(1, abs=0.4)  # a head that nobody prepared


FOUR_HEADS = {"vocab_size": VOCAB, "hidden_size": 128, "heads": 4, "kv_heads": 4}


@pytest.mark.parametrize(("induction", "pair"), [("bigram", 1), ("trigram", 1), ("trigram", 2)])
def test_further_pairs_of_heads_tell_names_apart_by_the_tokens_before(induction, pair):
    """On `by Sos num ... in Sos vel ... by Sos`, the second pair of heads favours `num`, because
    `by` stood before `Sos`. The first pair cannot tell `num` from `vel`.

    The third pair does so on `by x Sos num ... in x Sos vel ... by x Sos`, where the second cannot.
    """
    model = tiny_model(TinyModelConfig(**FOUR_HEADS, induction=induction), VOCAB)
    favours: dict[int, list[bool]] = {head: [] for head in range(pair + 1)}
    for seed in range(100):
        by, into, num, vel, *rest = random.Random(seed).sample(range(VOCAB), 25)
        same, others = rest[:pair], rest[pair:]
        names = [[by, *same, num], [into, *same, vel]]
        random.Random(seed).shuffle(names)
        ids = [*others[:5], *names[0], *others[5:10], *names[1], *others[10:], by, *same]
        for head, found in favours.items():
            weights = attention_of(model, 1, head, ids)[-1]
            found.append(bool(weights[ids.index(num)] > weights[ids.index(vel)]))
    assert sum(favours.pop(pair)) > 75
    for found in favours.values():
        assert sum(found) == pytest.approx(50, abs=15)


@pytest.mark.parametrize(("fewer", "more"), [("auto", "bigram"), ("bigram", "trigram")])
def test_a_further_pair_of_heads_leaves_the_others_as_they_were(fewer, more):
    models = [
        tiny_model(TinyModelConfig(**FOUR_HEADS, induction=name), VOCAB) for name in (fewer, more)
    ]
    ids = random.Random(1).choices(range(VOCAB), k=40)
    pairs = INDUCTION_PAIRS[fewer]
    for head in range(pairs):
        one, other = (attention_of(model, 0, head, ids) for model in models)
        assert torch.equal(one, other)
    back = pairs + 1
    looks_back = attention_of(models[1], 0, pairs, ids)
    assert (looks_back[back:].argmax(-1) == torch.arange(40 - back)).all()


@pytest.mark.parametrize(
    "settings",
    [["model.kv_heads=2"], ["model.induction=trigram", "model.heads=2", "model.kv_heads=2"]],
)
def test_further_pairs_of_heads_need_keys_of_their_own(settings):
    with fails_with("shared_keys"):
        load_config("discover", settings)


def test_heads_start_by_copying_what_they_look_at(model):
    """W_o = W_v^T up to a factor: what comes out of a head is close to what went in."""
    block, hd = model.blocks[1], model.shape.head_dim
    v = block.qkv.weight[-4 * hd :]
    ratio = block.o.weight / v.T
    assert ratio.min().item() == pytest.approx(ratio.max().item(), rel=1e-3) and ratio.min() > 0


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (2, 2)])
def test_grouped_heads_can_be_initialised_too(heads, kv_heads):
    config = TinyModelConfig(hidden_size=32 * heads, heads=heads, kv_heads=kv_heads)
    model = tiny_model(config, VOCAB)
    weights = attention_of(model, 0, 0, random.Random(0).choices(range(VOCAB), k=40))
    assert (weights[1:].argmax(-1) == torch.arange(39)).float().mean() > 0.9
