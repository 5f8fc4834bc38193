"""Account for every sampled token: each is in exactly one class, or the run stops.

In: what the policy returned, call by call, and the trajectories. Out: the step's counts. `flow.py`
keeps the books of its episodes.

    trained        in a row, with mask 1
    undelivered    in an answer that the client did not read to its end
    edited         in an answer that the client replaced with something else
    failed         in an episode that failed: it died, timed out, or its answer was not captured

The classes add up to a number that the gateway does not count: the sampler's own. A token in no
class means a fault of ours, and stops the run; no setting allows it. The last three are named
losses; `rollout.agent_losses` limits their share, by default to nothing.

Elsewhere a run that captured nothing looks like a healthy one (NeMo-Gym#3397). Here it cannot.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from agent_r1 import AgentR1Error, Generation, Rollouts, Trajectory, say, trajectory_rows

LOSSES = ("undelivered", "edited", "failed")


@dataclass
class Entry:
    """The account of one episode."""

    generations: list[tuple[list[int], Generation]]
    """What the policy returned: prompt and generation, as the policy saw them."""
    losses: dict[str, list[Generation]]
    """Class -> generations that are not trained."""
    cause: str = ""
    """Why something is lost, in words."""


@dataclass
class Books:
    """The accounts since the last step."""

    entries: list[tuple[Trajectory, Entry]] = field(default_factory=list)
    events: Counter[str] = field(default_factory=Counter)

    def close(self, sampler_count: int | None) -> dict[str, int]:
        """Check and empty the books; return counts for metrics.jsonl.

        `sampler_count`: the sampler's own count of tokens, or None if it keeps none. Raise
        AgentR1Error if a token is unaccounted for.
        """
        tokens: Counter[str] = Counter()
        for trajectory, entry in self.entries:
            tokens["trained"] += check_rows(trajectory, entry)
            for loss, generations in entry.losses.items():
                tokens[loss] += sum(len(one.token_ids) for one in generations)
        total = sum(tokens.values())
        if sampler_count is not None and total != sampler_count:
            raise AgentR1Error(
                f"the sampler sampled {sampler_count} tokens, and the gateway accounts for {total} "
                f"({dict(tokens)}): an answer was lost or counted twice. This is a fault of the "
                "gateway; please report it",
                code="tokens_unaccounted",
            )
        counts = {f"gateway/{name}_tokens": tokens[name] for name in ("trained", *LOSSES)}
        for name, count in sorted(self.events.items()):
            counts[f"gateway/{name}"] = count
        self.entries = []
        self.events = Counter()
        return counts

    def causes(self) -> Counter[str]:
        """Count the causes of losses, in words."""
        return Counter(entry.cause for _, entry in self.entries if entry.cause)


def check_rows(trajectory: Trajectory, entry: Entry) -> int:
    """Return the trained tokens of an episode.

    Each run of mask 1 must be one whole generation, after exactly the tokens that the policy read.
    No generation may be in two rows. Raise AgentR1Error otherwise.
    """
    lost_ids: list[int] = []
    for generations in entry.losses.values():
        lost_ids += [id(generation) for generation in generations]
    balance: Counter[Any] = Counter()
    for prompt_ids, generation in entry.generations:
        if id(generation) not in lost_ids:
            balance[_generation_key(prompt_ids, generation.token_ids, generation.logprobs)] += 1
    trained_tokens = 0
    for row in trajectory_rows(trajectory, 0):
        for start, end in runs(row.action_mask, row.step_ids):
            trained_tokens += end - start
            ids = row.input_ids
            balance[_generation_key(ids[:start], ids[start:end], row.logprobs[start:end])] -= 1
    if any(balance.values()):
        raise AgentR1Error(
            f"episode {trajectory.group_id}: {sum(n > 0 for n in balance.values())} generations "
            f"are in no training row, and {sum(n < 0 for n in balance.values())} stretches of mask "
            "1 are no generation. This is a fault of the gateway; please report it",
            code="rows_differ_from_samples",
        )
    return trained_tokens


def _generation_key(prompt: list[int], ids: list[int], logprobs: list[float]) -> tuple[Any, ...]:
    return tuple(prompt), tuple(ids), tuple(logprobs)


def runs(mask: list[int], step_ids: list[int]) -> list[tuple[int, int]]:
    """Return begin and end of each stretch of mask 1 within one step."""
    stretches: list[tuple[int, int]] = []
    start = None
    for place in range(len(mask) + 1):
        inside = place < len(mask) and mask[place] == 1
        goes_on = inside and start is not None and step_ids[place] == step_ids[start]
        if start is not None and not goes_on:
            stretches.append((start, place))
            start = None
        if inside and start is None:
            start = place
    return stretches


class Audited(Rollouts):
    """Rollouts whose flow is an `AgentFlow`: record each step's counts, and stop at a loss."""

    def __init__(self, inner: Rollouts, rollout: Any):
        self.inner = inner
        self.rollout = rollout
        self.episodes = inner.episodes
        self.policy = inner.policy
        self.flow = inner.flow

    def play(self, step: int):
        episodes = self.inner.play(step)
        counts, causes = self.flow.take_counts()
        total = sum(counts[f"gateway/{name}_tokens"] for name in ("trained", *LOSSES))
        lost_tokens = total - counts["gateway/trained_tokens"]
        if lost_tokens:
            [(cause, times)] = causes.most_common(1)
            words = (
                f"step {step}: {lost_tokens:.0f} of {total:.0f} sampled tokens are not trained; "
            )
            words += f"{times} times: {cause}"
            if lost_tokens > self.rollout.agent_losses * total:
                raise AgentR1Error(
                    f"{words}. Fix the agent, or allow a share with rollout.agent_losses "
                    f"(now {self.rollout.agent_losses:g})",
                    code="tokens_lost",
                )
            say(words)
        episodes.metrics.update({name: float(count) for name, count in counts.items()})
        return episodes
