"""Name likely causes of a run that does not learn, with evidence from its files.

In: `Evidence`. Out: `Finding`s, proofs first. Rules of the first kind test what holds in every correct run: a single
exception is proof. All other rules compare figures with limits, and can be wrong. The limits were chosen on seed 0 of
recipes/museum, and tested on the other seeds.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import fmean

from agent_r1 import signs
from agent_r1_recipes.diagnose.files import Episode, Evidence

SPAN = 5
"""Steps of a mean."""
GAP, OF_ENTROPY = 0.05, 0.15
"""Nats between sampler and trainer that rounding does not explain (bfloat16: .01 to .02), also as a share of the entropy."""
CONTROL = re.compile(r"<\|[a-z_]+\|>")
GRADER = re.compile(r"reward\.(txt|json)|/logs/verifier|run_tests|grader", re.IGNORECASE)


@dataclass(frozen=True)
class Finding:
    """A likely cause."""

    cause: str
    evidence: str
    remedy: str
    proof: bool = False
    """Whether the files contradict a rule of every correct run."""


Rule = Callable[[Evidence], Iterator[Finding]]


def findings(evidence: Evidence) -> list[Finding]:
    """List all findings, proofs first."""
    found = [finding for rule in RULES for finding in rule(evidence)]
    return sorted(found, key=lambda finding: not finding.proof)


def symptoms(evidence: Evidence) -> list[str]:
    """Describe how the run goes, in its figures."""
    score = series(evidence, "critic/score/mean")
    first, last = mean(score[:SPAN]), mean(score[-SPAN:])
    best = max(mean(score[end - SPAN : end]) for end in range(min(SPAN, len(score)), len(score) + 1))
    said = []
    if (calls := series(evidence, "tool_calls/mean")) and (now := mean(calls[-SPAN:])) < 0.05:
        said.append(f"tools are never called: {mean(calls[:SPAN]):.2f} calls per episode at first, {now:.2f} now")
    if len(score) < 2 * SPAN:
        said.append(f"{len(score)} steps are too few for a trend; the mean reward is {last:.2f}")
    elif best - last > max(0.1, 0.3 * abs(best)):
        said.append(f"it collapsed: the reward was {best:.2f} at its best, and is {last:.2f}")
    elif last - first < 0.05:
        said.append(f"reward is flat: {first:.2f} at first, {last:.2f} now")
    else:
        said.append(f"reward rises: {first:.2f} at first, {last:.2f} now")
    return said


# ------------------------------------------------------------------------------------- what contradicts every correct run


def mask_covers_results(e: Evidence) -> Iterator[Finding]:
    wrong, total = 0, 0
    for episode in e.episodes:
        for inside, on, _ in tokens(episode):
            total += inside
            wrong += inside and on
    if wrong:
        yield Finding(
            "the action mask covers tool results", f"{wrong} of {total} tokens of tool results have action_mask 1",
            "Build the mask from what was sampled, not from what follows the prompt", True,
        )  # fmt: skip


def forged_turns(e: Evidence) -> Iterator[Finding]:
    texts = [
        text for episode in e.episodes for inside, _, text in tokens(episode) if inside and CONTROL.fullmatch(text)
    ]
    if texts:
        yield Finding(
            "documents can forge turns", f"{len(texts)} control tokens such as {texts[0]} are inside tool results",
            "Encode tool results as data, without control tokens", True,
        )  # fmt: skip


def groups_mixed(e: Evidence) -> Iterator[Finding]:
    asked: dict[tuple[int, str], set[str]] = defaultdict(set)
    for episode in e.episodes:
        asked[episode.step, episode.group].add(episode.question)
    mixed = [group for group, questions in asked.items() if len(questions) > 1]
    if mixed:
        yield Finding(
            "groups mix questions", f"{len(mixed)} of {len(asked)} groups compare samples of different questions",
            "Give the samples of one question one group id, and keep ids through shuffling", True,
        )  # fmt: skip


def baseline_elsewhere(e: Evidence) -> Iterator[Finding]:
    """Find groups of one prompt whose recorded advantages are not centred."""
    off = []
    for group in grouped(e.episodes):
        known = [episode.advantage for episode in group if episode.advantage is not None]
        if len(known) == len(group) > 1 and abs(mean(known)) > 0.05 and len({ep.question for ep in group}) == 1:
            off.append(mean(known))
    if e.source != "Agent-R1" and len(off) > 1:  # ppo's advantages are centred over the batch
        yield Finding(
            "groups mix questions", f"in {len(off)} groups of one prompt the advantages do not sum to zero",
            "Give the samples of one question one group id, and keep ids through shuffling",
        )  # fmt: skip


def zero_advantages(e: Evidence) -> Iterator[Finding]:
    apart = [group for group in grouped(e.episodes) if len({episode.reward for episode in group}) > 1]
    known = [group for group in apart if all(episode.advantage is not None for episode in group)]
    zero = [group for group in known if not any(episode.advantage for episode in group)]
    if len(zero) > len(known) / 2:
        yield Finding(
            "every advantage is zero", f"in {len(zero)} of {len(known)} groups rewards differ, and all advantages are 0",
            "Check the estimator's name, and that it is registered", True,
        )  # fmt: skip


def lost_rewards(e: Evidence) -> Iterator[Finding]:
    """Compare the rewards on action tokens with what the environment returned."""
    lost = []
    for episode in e.episodes:
        parts = episode.record.get("reward_parts") or {}
        rows = episode.record.get("rows") or []
        on = sum(r for row in rows for r, m in zip(row["rewards"], row["action_mask"], strict=True) if m)
        said = sum(parts.values()) + (episode.record.get("process") or 0)
        if rows and parts and abs(on - said) > 1e-4:
            lost.append((said, on, episode.record["stop_reason"]))
    for said, on, stop in lost[:1]:
        yield Finding(
            "rewards are lost on masked tokens",
            f"in {len(lost)} episodes the action tokens lack a reward ({said:.2f} was given, {on:.2f} arrived, stop: {stop})",
            "Put the outcome on the last action token, also when a tool result follows it", True,
        )  # fmt: skip


def dropped_episodes(e: Evidence) -> Iterator[Finding]:
    """Detect unfinished episodes that are in the metrics and in no group."""
    cut = mean([v for key in ("max_tokens", "max_turns", "context_overflow") for v in series(e, f"stop/{key}")])
    sizes = Counter(len(group) for group in grouped(e.episodes))
    kept = any(episode.record.get("stop_reason") not in ("answered", "no_answer") for episode in e.episodes)
    if e.source == "Agent-R1" and cut and not kept and len(sizes) > 1:
        yield Finding(
            "unfinished episodes are dropped",
            f"groups have {min(sizes)} to {max(sizes)} samples, and none of them is unfinished",
            "Train on unfinished episodes with their penalty, unless a limit is not the agent's fault",
        )  # fmt: skip


# --------------------------------------------------------------------------------------------------- what pays, and should not


def writes_the_reward(e: Evidence) -> Iterator[Finding]:
    paid = [
        (episode, call)
        for episode in e.episodes
        for call in calls_of(episode)
        if episode.reward > 0 and GRADER.search(call)
    ]
    if paid:
        yield Finding(
            "the agent writes its own reward", f"{len(paid)} paid calls name the grader's files: {paid[0][1][:80]!r}",
            "Keep rewards and tests out of the agent's reach, and delete such files before grading",
        )  # fmt: skip


def one_answer_for_all(e: Evidence) -> Iterator[Finding]:
    last = latest(e)
    asked: dict[str, set[str]] = defaultdict(set)
    for episode in last:
        if episode.reward > 0.5 and len(episode.answer) > 5:
            asked[episode.answer].add(episode.question)
    answer, questions = max(asked.items(), key=lambda pair: len(pair[1]), default=("", set()))
    known = {episode.question for episode in last}
    if len(questions) >= max(3, 0.3 * len(known)):
        yield Finding(
            "the reward can be talked into it",
            f"the answer {answer[:60]!r} was paid on {len(questions)} of {len(known)} questions",
            "Read these episodes; compare the judge with exact match, and show it the answer between marks",
        )  # fmt: skip


def paid_without_a_match(e: Evidence) -> Iterator[Finding]:
    lists = [
        episode
        for episode in latest(e)
        if episode.reward > 0.5
        and episode.record
        and (m := episode.record["metrics"]).get("em") == 0
        and m.get("sub_em") == 1
    ]
    if len(lists) > 0.02 * len(latest(e)):
        yield Finding(
            "a longer answer that contains the right one is paid",
            f"{len(lists)} paid answers are not an exact match: {lists[0].answer[:60]!r}",
            "Pay exact match, or a judge that is shown what was wanted",
        )  # fmt: skip


def tool_knows(e: Evidence) -> Iterator[Finding]:
    """Detect results that answer a question of several steps at once."""
    told, several = [], 0
    for episode in latest(e):
        hops, calls = re.match(r"(\d)-hop", episode.record.get("kind", "")), results_of(episode)
        if hops and int(hops[1]) > 1 and calls:
            several += 1
            told += [calls[0]] * any(right in calls[0] for right in episode.record["ground_truth"])
    if len(told) > 0.5 * several:
        yield Finding(
            "the tool knows the answer",
            f"the first result has it in {len(told)} of {several} questions of several hops: {told[0][:60]!r}",
            "Let no tool read the right answer; evaluate without the tool",
        )  # fmt: skip


# --------------------------------------------------------------------------------------------------------- how figures run


def never_stops(e: Evidence) -> Iterator[Finding]:
    cut = [episode for episode in e.episodes if episode.cut]
    done = [episode for episode in cut if re.search(r"</(answer|tool_call)>.", last_turn(episode), re.DOTALL)]
    if len(done) > 0.2 * max(1, len(e.episodes)):
        yield Finding(
            "turns do not end", f"{len(done)} of {len(e.episodes)} episodes were cut off after a finished call or answer",
            "Train the stop token: the mask of the cold start covers it, and padding is not the stop token",
        )  # fmt: skip


def cut_off(e: Evidence) -> Iterator[Finding]:
    share = mean(series(e, "stop/max_tokens")[-SPAN:])
    if share > 0.3:
        yield Finding(
            "turns are cut off", f"{share:.0%} of the episodes reach a limit on tokens", "Raise the limit on tokens per turn",
        )  # fmt: skip


def sampler_apart(e: Evidence) -> Iterator[Finding]:
    gap, entropy = series(e, "training/rollout_logprobs_diff_mean")[:1], series(e, "actor/entropy")[:1]
    limit = min([GAP, *(OF_ENTROPY * nats for nats in entropy)])
    if gap and gap[0] > limit:
        yield Finding(
            "the sampler is not the trainer's policy", f"before the first update they differ by {gap[0]:.3f} nats per token",
            "Compare temperature, top-p, weights and number formats of both, and whether text is encoded again",
        )  # fmt: skip


def kl_grows(e: Evidence) -> Iterator[Finding]:
    kl = series(e, "actor/kl_loss")
    if len(kl) >= 2 * SPAN and (last := mean(kl[-SPAN:])) > max(1.0, 5 * mean(kl[:SPAN])):
        yield Finding(
            "the penalised KL grows",
            f"KL to the start was {mean(kl[:SPAN]):.3f}, and is {last:.2f}, although the loss contains it",
            "Check the sign of the KL term; then its coefficient",
        )  # fmt: skip


def large_steps(e: Evidence) -> Iterator[Finding]:
    moved, score = series(e, "actor/ppo_kl"), series(e, "critic/score/mean")
    fell = len(score) >= 2 * SPAN and max(score) - mean(score[-SPAN:]) > 0.3
    if fell and max(moved, default=0) > 0.05:
        yield Finding(
            "updates are too large", f"a step moved the policy by {max(moved):.2f} nats per token, and the reward fell",
            "Halve the learning rate; count the optimiser steps of a batch",
        )  # fmt: skip


def no_calls(e: Evidence) -> Iterator[Finding]:
    calls, rewards = series(e, "tool_calls/mean"), [episode.reward for episode in latest(e)]
    first, now = mean(calls[:SPAN]), mean(calls[-SPAN:])
    if calls and now < 0.05 and first < 0.05:
        yield Finding("tools were never called", "no call in the first steps", "Read a prompt: are the tools in it?")
    elif calls and now < 0.05:
        yield Finding(
            "calls stopped paying",
            f"{first:.2f} calls per episode at first, {now:.2f} now, and a mean reward of {mean(rewards):.2f}",
            "Read paid episodes without a call, and find what pays",
        )  # fmt: skip


def nothing_to_compare(e: Evidence) -> Iterator[Finding]:
    same, score = mean(series(e, "groups/zero_advantage")[-SPAN:]), mean(series(e, "critic/score/mean")[-SPAN:])
    if same > 0.9 and score < 0.5:
        yield Finding(
            "groups agree", f"{same:.0%} of the groups have equal rewards, with a mean of {score:.2f}",
            "Easier questions, more samples, or a partial reward",
        )  # fmt: skip


def sentinel(e: Evidence) -> Iterator[Finding]:
    for sign in signs(e.lines) if e.source == "Agent-R1" else ():
        if sign.collapse and not sign.over:
            yield Finding(f"sentinel: {sign.name}", sign.seen, sign.first)


RULES: tuple[Rule, ...] = (
    mask_covers_results, forged_turns, groups_mixed, zero_advantages, lost_rewards, writes_the_reward, one_answer_for_all,
    never_stops, tool_knows, paid_without_a_match, kl_grows, sampler_apart, baseline_elsewhere, dropped_episodes, large_steps,
    cut_off, no_calls, nothing_to_compare, sentinel,
)  # fmt: skip


# ------------------------------------------------------------------------------------------------------------------ inside


def mean(values: list[float]) -> float:
    return fmean(values) if values else 0.0


def series(e: Evidence, key: str) -> list[float]:
    return [line[key] for line in e.lines if isinstance(line.get(key), (int, float))]


def grouped(episodes: list[Episode]) -> list[list[Episode]]:
    found: dict[tuple[int, str], list[Episode]] = defaultdict(list)
    for episode in episodes:
        found[episode.step, episode.group].append(episode)
    return list(found.values())


def latest(e: Evidence) -> list[Episode]:
    last = max((episode.step for episode in e.episodes), default=0)
    return [episode for episode in e.episodes if episode.step == last]


def tokens(episode: Episode) -> Iterator[tuple[bool, bool, str]]:
    """Yield whether a token is inside a tool's result, its action mask, and its text."""
    for row in episode.record.get("rows") or ():
        inside, before, agent = False, "", False
        for text, on in zip(row["tokens"], row["action_mask"], strict=True):
            if before == "<|im_start|>":
                agent = text.startswith("assistant")
            inside = inside and text != "</tool_response>"
            yield inside, bool(on), text
            inside = inside or (text == "<tool_response>" and not agent)  # an agent may write the tag, too
            before = text


def calls_of(episode: Episode) -> list[str]:
    steps = episode.record.get("steps") or ()
    calls = [str(call["arguments"]) for step in steps for call in step["info"].get("tool_calls", ())]
    return calls or re.findall(r"<tool_call>(.*?)</tool_call>", episode.text, re.DOTALL)


def results_of(episode: Episode) -> list[str]:
    return [
        call["content"] for step in episode.record.get("steps") or () for call in step["info"].get("tool_calls", ())
    ]


def last_turn(episode: Episode) -> str:
    steps = episode.record.get("steps")
    return steps[-1]["text"] if steps else episode.text
