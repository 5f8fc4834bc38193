"""Train a search agent with multi-turn reinforcement learning (GRPO), in one file.

Read it from top to bottom: the world, the rollout, the rows, the advantages, the loss, the update.
The task is TinyHop, a made-up world. A language model with 0.43 million parameters is asked "In
which city is the publisher of Sosnum based?". It may call a search tool, then it must answer. No
single passage has the answer, so it must learn to search, read, and search again. A quarter of the
test questions are easier, and a quarter take three passages. The model has imitated plays that
solve the easier ones only. So it finds by itself what it learns of the others (docs/discover.md).

    .venv/bin/python one_file.py [SEED]      # exact match .245 -> .525 (seed 0), .230 -> .540 (1)

What makes agents different from chat models is all here: several turns, tokens that the agent did
not write, and one reward at the end. What is left out, and where the project does it:

    a critic (PPO), a KL to a reference model, several updates per batch     training/loop.py
    a cache of keys and values that lives across the turns                   model/sampler.py
    computing once what the attempts at one question have in common          training/prefix_tree.py
    checkpoints, metrics, resuming                                           training/run.py
"""

import asyncio
import random
import sys
from functools import partial

import torch
from transformers import AutoModelForCausalLM

try:
    from agent_r1 import Action, StopReason, load_chat, make_env, open_run
except ImportError as error:
    sys.exit(f"one_file.py needs the package agent_r1 ({error}); see the README's three commands")

PROMPTS, SAMPLES, STEPS = 12, 8, 30  # questions per step, attempts at each question, steps
PRESET = "smoke"  # the first minute of the default: three passages in a result, and less to imitate
MAX_TURN, MAX_CONTEXT = 48, 320  # tokens; a turn takes 12 to 16, a search result about 40
# High, because the model is tiny; it falls to a tenth. Not higher: with 1e-3 and other questions,
# seed 1 ended at .420 instead of .595. It forgot to answer after one search: 1.000 -> .698.
LR = 3e-4
CLIP_LOW, CLIP_HIGH = 0.2, 0.28  # more room upwards: a rare good token may become likelier

# ------------------------------------------------------------------------------------- 1. the world


class World:
    """Everything that RL starts from: questions, a search tool, and a model that plays badly."""

    def __init__(self, seed):
        # Makes what is missing, in AGENT_R1_HOME or here, and prints how far it is.
        files = open_run(PRESET, "grpo", seed=seed).prepare()
        self.train = files.load_rows("train")
        self.test = files.load_rows("test")[:200]  # training never has their names
        # Makes the environment of a question: it parses calls, runs the tools, pays the reward.
        self.make_env = partial(make_env, tools=files.load_tools(), config=files.config.env)
        # RL cannot start from random weights: such a model never writes a well-formed call, so all
        # rewards are equal and nothing can be learned. This one imitated an explorer that takes the
        # facts of a question in random order. Plays that solved two or three searches were dropped.
        self.model = AutoModelForCausalLM.from_pretrained(files.start_model)
        # Messages -> token ids. A document that contains "<|im_end|>" cannot end a turn with it.
        self.chat = load_chat(files.start_model)


# ----------------------------------------------------------------------------------- 2. the rollout


class Episode:
    """One attempt at a question: token ids, and for each token who wrote it.

        read     Which city is the mayor of Pumfir from?                         mask 0
        sampled  <think>plan/mayor/birthplace/answer: plan/mayor</think> ...     mask 1
        read     Pumfir in Tanfir has mayor Ganros. ...                          mask 0
        sampled  <think> has mayor Ganros/mayor/mayor</think> ... "Ganros" ...   mask 1
        read     Ganros from Mumfax works for Paxfax and married Virdum. ...     mask 0
        sampled  <think> from Mumfax/birthplace/answer</think> ... Mumfax ...    mask 1, reward 1

    That is one list of 138 tokens, 42 of them sampled. It is of the model that this file trains
    with seed 1. A thought quotes a fact. What follows it are notes (docs/discover.md).
    """

    def __init__(self, world, row):
        self.chat = world.chat
        self.env = world.make_env(row)
        self.ids = []
        self.mask = []  # 1: the agent sampled this token; 0: it only read the token
        self.logps = []  # log pi(token) when it was sampled; 0 where the mask is 0
        self.reward = 0.0
        self.stop_reason = None  # None: the episode is still running
        first = self.env.reset(row)
        self.append(self.chat.prompt_ids(first.messages, first.tools), mask=0)

    def append(self, ids, mask, logps=None):
        """Append tokens that the agent sampled (mask 1) or reads (mask 0)."""
        self.ids += ids
        self.mask += [mask] * len(ids)
        self.logps += logps or [0.0] * len(ids)

    async def act(self, ids, logps):
        """Take one sampled turn, and append the environment's reply."""
        # The sampled ids are the record. They are decoded here, for the environment, and never
        # encoded again: another split into tokens would train on tokens that were never sampled.
        self.append(ids, mask=1, logps=logps)
        finish = "stop" if ids[-1] in self.chat.stop_ids else "length"
        result = await self.env.step(Action(self.chat.turn_text(ids), finish))
        self.reward += result.reward  # 0 here: only the outcome is paid
        self.stop_reason = result.stop_reason  # it answered, or used up its turns
        if result.done:
            return
        # A tool's result is text from outside: the agent reads it, with mask 0. If the loss counted
        # these tokens too, the agent would learn to write search results (docs/lessons/03-masks.md:
        # .760 instead of .904).
        # The reply closes the agent's turn, unless the agent did so itself.
        reply = self.chat.reply_ids(ids, result.observation)
        self.append(reply, mask=0)
        if len(self.ids) + MAX_TURN > MAX_CONTEXT:
            self.stop_reason = StopReason.CONTEXT_OVERFLOW

    def finish(self):
        """Ask for the outcome: 1 for the right answer, otherwise 0."""
        # Asked once, however the episode ended. Presets with a penalty for malformed endings need
        # that: otherwise the agent could avoid it by never ending its episode.
        outcome = self.env.outcome(self.stop_reason)
        self.reward += outcome.reward
        self.exact_match = outcome.metrics["em"]


@torch.no_grad()
def sample_turns(world, contexts, greedy):
    """Sample a turn for each context: its ids and their log-probabilities."""
    # Pad on the left: then all contexts end in the same column, and the next token is the next
    # column for everyone. The attention mask hides the padding, and positions do not count it.
    longest = max(len(ids) for ids in contexts)
    padding = [longest - len(ids) for ids in contexts]
    new = torch.tensor([[0] * n + ids for n, ids in zip(padding, contexts, strict=True)])
    visible = torch.tensor([[0] * n + [1] * (longest - n) for n in padding])
    tokens, logps = [], []  # one tensor [B] per column
    running = torch.ones(len(contexts), dtype=torch.bool)
    lengths = torch.zeros(len(contexts), dtype=torch.long)
    cache = None  # keys and values of the columns so far; thrown away after the turn
    while running.any() and len(tokens) < MAX_TURN:
        at = (visible.cumsum(1) - 1).clamp(min=0)[:, -new.shape[1] :]  # positions
        out = world.model(new, attention_mask=visible, position_ids=at, past_key_values=cache)
        cache = out.past_key_values
        logp = out.logits[:, -1].log_softmax(-1)
        # No top-p and no top-k: the ratio in the loss compares whole distributions.
        token = logp.argmax(-1) if greedy else torch.multinomial(logp.exp(), 1)[:, 0]
        tokens.append(token)
        logps.append(logp.gather(1, token[:, None])[:, 0])
        lengths += running  # a turn that has ended does not grow; what follows it is thrown away
        running &= ~torch.isin(token, torch.tensor(world.chat.stop_ids))
        new = token[:, None]
        visible = torch.cat([visible, torch.ones_like(new)], dim=1)
    rows = zip(torch.stack(tokens, 1).tolist(), torch.stack(logps, 1).tolist(), strict=True)
    return [(ids[:n], logp[:n]) for (ids, logp), n in zip(rows, lengths.tolist(), strict=True)]


async def act_together(episodes, turns):
    """Let all episodes act. Their searches run together, as one batch of queries."""
    await asyncio.gather(*(e.act(*turn) for e, turn in zip(episodes, turns, strict=True)))


def play(world, questions, greedy=False):
    """Play an episode of each question, all at once, turn by turn."""
    episodes = [Episode(world, row) for row in questions]
    running = episodes
    while running:
        # Each turn computes its whole context again. The project keeps the cache across turns.
        turns = sample_turns(world, [e.ids for e in running], greedy)
        asyncio.run(act_together(running, turns))
        running = [e for e in running if e.stop_reason is None]
    for episode in episodes:
        episode.finish()
    return episodes


# ------------------------------------------------------------ 3. rows, advantages, loss and update


def make_rows(episodes):
    """Pad the episodes on the right. Return ids, masks and sampled log-probabilities, each [B,
    T]."""
    longest = max(len(e.ids) for e in episodes)

    def pad(lists):
        return torch.tensor([values + [0] * (longest - len(values)) for values in lists])

    mask = pad([e.mask for e in episodes])
    return pad([e.ids for e in episodes]), mask.bool(), pad([e.logps for e in episodes])


def compute_advantages(rewards):
    """Compare each attempt with the others at the same question. In and out: [B]."""
    group = rewards.view(-1, SAMPLES)  # one line per question
    deviation = group - group.mean(dim=1, keepdim=True)
    # Every token of an attempt gets the attempt's advantage: GRPO does not know which turn was the
    # good one. If all attempts earned the same, the question teaches nothing, and the advantage
    # must be exactly 0. In float32 the mean of eight penalties of -0.2 is not -0.2. Divided by its
    # own size, that error would be an advantage of 0.015.
    agree = (group == group[:, :1]).all(dim=1, keepdim=True)
    advantage = deviation / (group.std(dim=1, keepdim=True) + 1e-6)
    return torch.where(agree, 0.0, advantage).flatten()


def compute_loss(model, episodes):
    """Compute PPO's clipped loss with GRPO's advantages, on the agent's own tokens."""
    ids, mask, old_logp = make_rows(episodes)
    advantage = compute_advantages(torch.tensor([e.reward for e in episodes]))[:, None]
    # The output at position t predicts token t + 1: the last output and the first token are left
    # out. Nothing hides the padding, because it stands on the right and attention looks left.
    logp = model(ids[:, :-1]).logits.log_softmax(-1).gather(2, ids[:, 1:, None])[:, :, 0]
    mask = mask[:, 1:]  # of the token that is predicted, not of the one that predicts it
    # How much likelier is each token now than when it was sampled? With one update per batch the
    # ratio is 1, up to rounding (the step's line says 1e-5), and the clip never acts. The gradient
    # of the ratio is that of log pi, and not 0. A second update on this batch would need the clip.
    ratio = torch.where(mask, logp - old_logp[:, 1:], 0.0).exp()
    clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    # The smaller of the two is the pessimistic one. A token that has moved far enough in the
    # direction of its advantage gets no gradient. One that moved the wrong way keeps its gradient.
    loss = -torch.min(advantage * ratio, advantage * clipped)
    return loss[mask].sum() / mask.sum(), ratio[mask]  # the mean over sampled tokens


def update(model, optimizer, episodes):
    """Take one optimiser step. Return the largest |ratio - 1|."""
    loss, ratio = compute_loss(model, episodes)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return (ratio - 1).abs().max().item()


# --------------------------------------------------------------------------------- before and after


def exact_match(world):
    """Describe the share of test questions that the agent answers exactly, decoding greedily."""
    episodes = play(world, world.test, greedy=True)
    scores = {}  # number of searches that a question takes -> scores
    for row, episode in zip(world.test, episodes, strict=True):
        scores.setdefault(row["extra_info"]["hops"], []).append(episode.exact_match)
    stairs = ", ".join(f"{hops}: {sum(ems) / len(ems):.3f}" for hops, ems in sorted(scores.items()))
    mean = sum(e.exact_match for e in episodes) / len(episodes)
    return f"exact match {mean:.3f} (by searches {stairs})"


def main(seed=0):
    """Evaluate, train, evaluate."""
    random.seed(seed)
    torch.manual_seed(seed)
    world = World(seed)
    optimizer = torch.optim.AdamW(world.model.parameters(), LR, weight_decay=0.0)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
    print(f"before RL: {exact_match(world)}")
    for step in range(1, STEPS + 1):
        rows = [row for row in random.sample(world.train, PROMPTS) for _ in range(SAMPLES)]
        episodes = play(world, rows)
        gap = update(world.model, optimizer, episodes)
        decay.step()
        reward = sum(e.reward for e in episodes) / len(episodes)
        sampled = sum(sum(e.mask) for e in episodes) / sum(len(e.ids) for e in episodes)
        print(f"step {step:2d}  reward {reward:5.2f}  sampled {sampled:.0%}  |ratio - 1| {gap:.0e}")
    print(f"after RL: {exact_match(world)}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

# A reader knows the types from the lines above; the rest of the project states them.
# pyright: reportMissingParameterType=false
