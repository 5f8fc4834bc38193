"""The world *Stop*: go on for a small pay, or answer. All of its histories can be enumerated.

Each turn is one token. `go` pays .2, and after one to three of them the reply names the right
answer; every later reply says `nothing`. An answer ends the episode and pays 1 if it is right. So
does any other token, for nothing. The best play goes on to the last turn and answers there: 2.0
with six turns.

The world shows what hurts an estimator that compares turns of equal number. An episode that has a
turn 4 has chosen `go` three times, so those turns are no sample of the policy's chances.

In: nothing. Out: an `Agent` with a transformer of 21,408 weights, and rows. Next: `table.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from agent_r1 import (
    Action,
    AgentEnv,
    ChatFormat,
    Config,
    Decoder,
    DecoderShape,
    Observation,
    Row,
    StepResult,
    StopReason,
    TrainingRow,
    collate,
    load_config,
    states_before_actions,
)
from agent_r1_recipes.exact.tree import Agent, Expansion, Tree

TURNS = 6
PAY = 0.2
BEST = (TURNS - 1) * PAY + 1.0
ANSWERS = ("one", "two", "three")
QUESTIONS = 6
CONTROLS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
FREQUENCIES = {"go": 0.4, "one": 0.2, "two": 0.15, "three": 0.15}
"""How the start plays, in every state. The rest of the probability is spread over other tokens."""


class Stop(AgentEnv):
    """One episode. With `pay` 0 there are two returns, 0 and 1."""

    def __init__(self, pay: float = PAY):
        self.pay = pay

    def reset(self, row: Row) -> Observation:
        self.answer = row["reward_model"]["ground_truth"][0]
        self.clue_turn = row["extra_info"]["clue_turn"]
        self.turn = 0
        return Observation(list(row["prompt"]))

    async def step(self, action: Action) -> StepResult:
        self.turn += 1
        word = action.text.strip()
        goes_on = word == "go"
        reward = self.pay if goes_on else float(word == self.answer)
        if not goes_on or self.turn == TURNS:
            return StepResult(None, reward, done=True, stop_reason=StopReason.ANSWERED)
        reply = self.answer if self.turn >= self.clue_turn else "nothing"
        return StepResult(Observation([{"role": "tool", "content": reply}]), reward)


def stop_chat() -> ChatFormat:
    """Make a chat format in which each word is one token."""
    words = ["[UNK]", "user", "assistant", "tool", "go", "nothing", *ANSWERS]
    words += [f"q{number}" for number in range(QUESTIONS)]
    vocabulary = {word: place for place, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    controls = [AddedToken(text, special=True, normalized=False) for text in CONTROLS]
    tokenizer.add_special_tokens(controls)
    return ChatFormat(
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="<|im_end|>",
            pad_token="<|endoftext|>", chat_template=TEMPLATE,
        )
    )  # fmt: skip


def stop_rows() -> list[Row]:
    """Make the questions. Their kind is the number of `go` before the reply names the answer."""
    rows = []
    for number in range(QUESTIONS):
        clue_turn = 1 + number % 3
        rows.append(
            {
                "data_source": "stop",
                "agent_name": "stop",
                "prompt": [{"role": "user", "content": f"q{number}"}],
                "reward_model": {"ground_truth": [ANSWERS[number * 7 // 4 % 3]]},
                "extra_info": {"kind": f"clue-{clue_turn}", "clue_turn": clue_turn},
                "env_kwargs": {},
            }
        )
    return rows


def stop_config() -> Config:
    """Make the settings: one token a turn."""
    return load_config(
        "small", [f"env.max_turns={TURNS}", "rollout.max_tokens_per_turn=1",
                  "rollout.max_context=64", "trainer.device=cpu"]
    )  # fmt: skip


def stop_agent(seed: int = 0, clone_steps: int = 60) -> Agent:
    """Make the start: a random transformer, cloned to play as `FREQUENCIES` says."""
    chat = stop_chat()
    shape = DecoderShape(
        vocab_size=len(chat.tokenizer), hidden_size=32, layers=2, heads=2, kv_heads=2,
        intermediate_size=64, max_position=64,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Decoder(shape)
        for name, weight in model.named_parameters():
            if "norm" not in name:
                torch.nn.init.normal_(weight, std=0.08)
    agent = Agent(model, chat, {}, stop_config(), make_env=lambda row: Stop())
    if clone_steps:
        _clone(agent, clone_steps)
    return agent


def stop_trees(agent: Agent, rows: list[Row] | None = None) -> list[Tree]:
    """Enumerate every history of these questions (all)."""
    rows = stop_rows() if rows is None else rows
    expansion = Expansion(agent, rows, [str(number) for number in range(len(rows))])
    expansion.follow(expansion.trees, threshold=1e-300)
    return expansion.trees


def _clone(agent: Agent, steps: int) -> None:
    """Fit the frequencies of `FREQUENCIES` in every state, with cross-entropy."""
    rows = []
    for tree in stop_trees(agent):
        for history in tree.histories:
            prompt = history.state.prompt.ids
            # One action token, so that the batch has the state before it; which one is irrelevant.
            row = TrainingRow(len(rows), tree.name, [*prompt, 0], [0] * len(prompt) + [1])
            row.logprobs = row.rewards = [0.0] * len(row.input_ids)
            row.step_ids = row.action_mask
            rows.append(row)
    batch = collate(rows)
    names = agent.chat.tokenizer.convert_ids_to_tokens(range(agent.model.shape.vocab_size))
    other = (1 - sum(FREQUENCIES.values())) / (len(names) - len(FREQUENCIES))
    target_V = torch.tensor([FREQUENCIES.get(name, other) for name in names])

    def loss() -> Tensor:
        hidden_AD, _, _ = states_before_actions(agent.model, batch)
        return -(agent.model.logits(hidden_AD).log_softmax(-1) @ target_V).mean()

    minimize(agent.model, loss, steps)


def minimize(model: Decoder, loss: Callable[[], Tensor], steps: int, lr: float = 3e-3) -> None:
    """Take steps of Adam (1412.6980). PyTorch's imports its compiler first, for seconds."""
    weights = list(model.parameters())
    means = [torch.zeros_like(weight) for weight in weights]
    squares = [torch.zeros_like(weight) for weight in weights]
    for step in range(1, steps + 1):
        grads = torch.autograd.grad(loss(), weights)
        with torch.no_grad():
            for weight, grad, mean, square in zip(weights, grads, means, squares, strict=True):
                mean.lerp_(grad, 0.1)
                square.lerp_(grad**2, 0.001)
                root = (square / (1 - 0.999**step)).sqrt() + 1e-8
                weight -= lr * mean / (1 - 0.9**step) / root
