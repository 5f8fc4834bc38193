"""Name likely causes of a run that does not learn, with evidence from its files.

In: `Evidence`. Out: `Finding`s, proofs first. A proof is a single exception to what holds in every
correct run. All other causes compare figures with limits, and can be wrong. The limits were chosen
on seed 0 of recipes/museum, and tested on the other seeds. A new cause is a row of CAUSES.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from agent_r1 import signs
from agent_r1_recipes.diagnose.files import SPAN, Episode, Evidence, mean

GAP, OF_ENTROPY = 0.05, 0.15
"""Nats between sampler and trainer that rounding does not explain (bfloat16: .01 to .02), also as a
share of the entropy."""
CONTROL = re.compile(r"<\|[a-z_]+\|>")
GRADER = re.compile(r"reward\.(txt|json)|/logs/verifier|run_tests|grader", re.IGNORECASE)
FINISHED = re.compile(r"</(answer|tool_call)>.", re.DOTALL)

Seen = str | bool
"""What the files show, in words; False for nothing."""


@dataclass(frozen=True)
class Finding:
    """A cause that the files show."""

    cause: str
    evidence: str
    remedy: str
    proof: bool = False
    """Whether the files contradict a rule of every correct run."""


def findings(e: Evidence) -> list[Finding]:
    """List all findings, proofs first."""
    seen = [(row, row[0](e)) for row in CAUSES]
    found = [
        Finding(cause, said, remedy, proof)
        for (_, cause, proof, remedy), said in seen
        if isinstance(said, str)
    ]
    ours = signs(e.lines) if e.source == "Agent-R1" else ()
    found += [
        Finding(f"sentinel: {s.name}", s.seen, s.first) for s in ours if s.collapse and not s.over
    ]
    return sorted(found, key=lambda finding: not finding.proof)


def symptoms(e: Evidence) -> list[str]:
    """Describe how the run goes, in its figures."""
    score, first, last = (
        e.series("critic/score/mean"),
        e.first("critic/score/mean"),
        e.last("critic/score/mean"),
    )
    best = max(
        mean(score[max(0, end - SPAN) : end])
        for end in range(min(SPAN, len(score)), len(score) + 1)
    )
    said = []
    if e.series("tool_calls/mean") and (now := e.last("tool_calls/mean")) < 0.05:
        said.append(
            f"tools are never called: {e.first('tool_calls/mean'):.2f} calls per episode at first, "
            f"{now:.2f} now"
        )
    if len(score) < 2 * SPAN:
        said.append(f"{len(score)} steps are too few for a trend; the mean reward is {last:.2f}")
    elif best - last > max(0.1, 0.3 * abs(best)):
        said.append(f"it collapsed: the reward was {best:.2f} at its best, and is {last:.2f}")
    else:
        goes = "is flat" if last - first < 0.05 else "rises"
        said.append(f"reward {goes}: {first:.2f} at first, {last:.2f} now")
    return said


# --------------------------------------------------------------------------------- what tokens show


def mask_over_results(e: Evidence) -> Seen:
    on = [acted for episode in e.episodes for inside, acted, _ in tokens(episode) if inside]
    return any(on) and f"{sum(on)} of {len(on)} tokens of tool results have action_mask 1"


def forged_turns(e: Evidence) -> Seen:
    read = (text for episode in e.episodes for inside, _, text in tokens(episode) if inside)
    forged = [text for text in read if CONTROL.fullmatch(text)]
    return (
        bool(forged) and f"{len(forged)} control tokens such as {forged[0]} are inside tool results"
    )


def rewards_on_masked_tokens(e: Evidence) -> Seen:
    """Compare the rewards on action tokens with what the environment returned."""
    lost = []
    for episode in e.episodes:
        parts, rows = episode.record.get("reward_parts") or {}, episode.record.get("rows") or []
        on = sum(
            r for row in rows for r, m in zip(row["rewards"], row["action_mask"], strict=True) if m
        )
        given = sum(parts.values()) + (episode.record.get("process") or 0)
        if rows and parts and abs(on - given) > 1e-4:
            lost.append(
                f"{given:.2f} was given, {on:.2f} arrived, stop: {episode.record['stop_reason']}"
            )
    return bool(lost) and f"in {len(lost)} episodes the action tokens lack a reward ({lost[0]})"


def turns_go_on(e: Evidence) -> Seen:
    cut = [(episode.record.get("steps") or [episode])[-1] for episode in e.episodes if episode.cut]
    last = [turn["text"] if isinstance(turn, dict) else turn.text for turn in cut]
    done = [text for text in last if FINISHED.search(text)]
    many = len(done) > 0.2 * max(1, len(e.episodes))
    return (
        many
        and f"{len(done)} of {len(e.episodes)} episodes were cut off after a finished call or "
        "answer"
    )


def tool_knows(e: Evidence) -> Seen:
    """Detect results that answer a question of several steps at once."""
    asked = [
        ep
        for ep in latest(e)
        if re.match(r"[2-9]-hop", ep.record.get("kind", "")) and results_of(ep)
    ]
    told = [
        first
        for ep in asked
        if any(right in (first := results_of(ep)[0]) for right in ep.record["ground_truth"])
    ]
    many = len(told) > 0.5 * len(asked)
    return (
        many
        and f"the first result has it in {len(told)} of {len(asked)} questions of several hops: "
        f"{told[0][:60]!r}"
    )


# --------------------------------------------------------------------------------- what groups show


def groups_of_several_questions(e: Evidence) -> Seen:
    groups = grouped(e.episodes)
    mixed = [group for group in groups if len({episode.question for episode in group}) > 1]
    return (
        bool(mixed)
        and f"{len(mixed)} of {len(groups)} groups compare samples of different questions"
    )


def baseline_elsewhere(e: Evidence) -> Seen:
    """Find groups of one prompt whose recorded advantages are not centred."""
    known = [
        [ep.advantage for ep in group if ep.advantage is not None] for group in grouped(e.episodes)
    ]
    off = [credit for credit in known if len(credit) > 1 and abs(mean(credit)) > 0.05]
    others = e.source != "Agent-R1"  # ppo's advantages are centred over the batch
    return (
        others
        and len(off) > 1
        and f"in {len(off)} groups of one prompt the advantages do not sum to zero"
    )


def zero_advantages(e: Evidence) -> Seen:
    apart = [
        group for group in grouped(e.episodes) if len({episode.reward for episode in group}) > 1
    ]
    known = [group for group in apart if all(episode.advantage is not None for episode in group)]
    zero = [group for group in known if not any(episode.advantage for episode in group)]
    many = len(zero) > len(known) / 2
    return (
        many and f"in {len(zero)} of {len(known)} groups rewards differ, and all advantages are 0"
    )


def dropped_episodes(e: Evidence) -> Seen:
    """Detect unfinished episodes that are in the metrics and in no group."""
    cut = any(
        any(e.series(f"stop/{name}")) for name in ("max_tokens", "max_turns", "context_overflow")
    )
    sizes = {len(group) for group in grouped(e.episodes)}
    kept = any(
        episode.record.get("stop_reason") not in ("answered", "no_answer") for episode in e.episodes
    )
    lost = e.source == "Agent-R1" and cut and not kept and len(sizes) > 1
    return (
        lost and f"groups have {min(sizes)} to {max(sizes)} samples, and none of them is unfinished"
    )


# ------------------------------------------------------------------------ what pays, and should not


def writes_the_reward(e: Evidence) -> Seen:
    paid = [
        call
        for episode in e.episodes
        if episode.reward > 0
        for call in episode.calls
        if GRADER.search(call)
    ]
    return bool(paid) and f"{len(paid)} paid calls name the grader's files: {paid[0][:80]!r}"


def one_answer_for_all(e: Evidence) -> Seen:
    asked: dict[str, set[str]] = defaultdict(set)
    for episode in latest(e):
        if episode.reward > 0.5 and len(episode.answer) > 5:
            asked[episode.answer].add(episode.question)
    answer = max(asked, key=lambda said: len(asked[said]), default="")
    paid, questions = len(asked[answer]), len({episode.question for episode in latest(e)})
    return (
        paid >= max(3, 0.3 * questions)
        and f"the answer {answer[:60]!r} was paid on {paid} of {questions} questions"
    )


def paid_without_a_match(e: Evidence) -> Seen:
    paid = [episode for episode in latest(e) if episode.reward > 0.5 and episode.record]
    lists = [
        ep
        for ep in paid
        if ep.record["metrics"].get("em") == 0 and ep.record["metrics"].get("sub_em") == 1
    ]
    many = len(lists) > 0.02 * len(latest(e))
    return many and f"{len(lists)} paid answers are not an exact match: {lists[0].answer[:60]!r}"


# -------------------------------------------------------------------------------- what metrics show


def sampler_apart(e: Evidence) -> Seen:
    gap = sum(e.series("training/rollout_logprobs_diff_mean")[:1])
    limit = min([GAP, *(OF_ENTROPY * nats for nats in e.series("actor/entropy")[:1])])
    return gap > limit and f"before the first update they differ by {gap:.3f} nats per token"


def kl_grows(e: Evidence) -> Seen:
    first, last = e.first("actor/kl_loss"), e.last("actor/kl_loss")
    grows = len(e.series("actor/kl_loss")) >= 2 * SPAN and last > max(1.0, 5 * first)
    return (
        grows
        and f"KL to the start was {first:.3f}, and is {last:.2f}, although the loss contains it"
    )


def large_steps(e: Evidence) -> Seen:
    score, moved = e.series("critic/score/mean"), max(e.series("actor/ppo_kl"), default=0)
    fell = len(score) >= 2 * SPAN and max(score) - e.last("critic/score/mean") > 0.3
    return (
        fell
        and moved > 0.05
        and f"a step moved the policy by {moved:.2f} nats per token, and the reward fell"
    )


def no_calls(e: Evidence) -> Seen:
    never = (
        bool(e.series("tool_calls/mean"))
        and max(e.first("tool_calls/mean"), e.last("tool_calls/mean")) < 0.05
    )
    return never and "no call in the first steps"


def calls_stopped(e: Evidence) -> Seen:
    first, now = e.first("tool_calls/mean"), e.last("tool_calls/mean")
    paid = mean([episode.reward for episode in latest(e)])
    return (
        first >= 0.05 > now
        and f"{first:.2f} calls per episode at first, {now:.2f} now, and a mean reward of "
        f"{paid:.2f}"
    )


def turns_are_cut(e: Evidence) -> Seen:
    share = e.last("stop/max_tokens")
    return share > 0.3 and f"{share:.0%} of the episodes reach a limit on tokens"


def nothing_to_compare(e: Evidence) -> Seen:
    same, score = e.last("groups/zero_advantage"), e.last("critic/score/mean")
    return (
        same > 0.9
        and score < 0.5
        and f"{same:.0%} of the groups have equal rewards, with a mean of {score:.2f}"
    )


CAUSES: tuple[tuple[Callable[[Evidence], Seen], str, bool, str], ...] = (
    (
        mask_over_results,
        "the action mask covers tool results",
        True,
        "Build the mask from what was sampled, not from what follows the prompt",
    ),
    (
        forged_turns,
        "documents can forge turns",
        True,
        "Encode tool results as data, without control tokens",
    ),
    (
        groups_of_several_questions,
        "groups mix questions",
        True,
        "Give the samples of one question one group id, and keep ids through shuffling",
    ),
    (
        zero_advantages,
        "every advantage is zero",
        True,
        "Check the estimator's name, and that it is registered",
    ),
    (
        rewards_on_masked_tokens,
        "rewards are lost on masked tokens",
        True,
        "Put the outcome on the last action token, also when a tool result follows it",
    ),
    (
        writes_the_reward,
        "the agent writes its own reward",
        False,
        "Keep rewards and tests out of the agent's reach, and delete such files before grading",
    ),
    (
        one_answer_for_all,
        "the reward can be talked into it",
        False,
        "Read these episodes; compare the judge with exact match, and show it the answer between "
        "marks",
    ),
    (
        turns_go_on,
        "turns do not end",
        False,
        "Train the stop token: the mask of the cold start covers it, and padding is not the stop "
        "token",
    ),
    (
        tool_knows,
        "the tool knows the answer",
        False,
        "Let no tool read the right answer; evaluate without the tool",
    ),
    (
        paid_without_a_match,
        "a longer answer that contains the right one is paid",
        False,
        "Pay exact match, or a judge that is shown what was wanted",
    ),
    (
        kl_grows,
        "the penalised KL grows",
        False,
        "Check the sign of the KL term; then its coefficient",
    ),
    (
        sampler_apart,
        "the sampler is not the trainer's policy",
        False,
        "Compare temperature, top-p, weights and number formats of both, and whether text is "
        "encoded again",
    ),
    (
        baseline_elsewhere,
        "groups mix questions",
        False,
        "Give the samples of one question one group id, and keep ids through shuffling",
    ),
    (
        dropped_episodes,
        "unfinished episodes are dropped",
        False,
        "Train on unfinished episodes with their penalty, unless a limit is not the agent's fault",
    ),
    (
        large_steps,
        "updates are too large",
        False,
        "Halve the learning rate; count the optimiser steps of a batch",
    ),
    (turns_are_cut, "turns are cut off", False, "Raise the limit on tokens per turn"),
    (no_calls, "tools were never called", False, "Read a prompt: are the tools in it?"),
    (
        calls_stopped,
        "calls stopped paying",
        False,
        "Read paid episodes without a call, and find what pays",
    ),
    (
        nothing_to_compare,
        "groups agree",
        False,
        "Easier questions, more samples, or a partial reward",
    ),
)
"""What sees it, the cause, whether it is a proof, and a first remedy."""


# ------------------------------------------------------------------------------------------- inside


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
            inside = inside or (
                text == "<tool_response>" and not agent
            )  # an agent may write the tag, too
            before = text


def results_of(episode: Episode) -> list[str]:
    return [
        call["content"]
        for step in episode.record.get("steps", ())
        for call in step["info"].get("tool_calls", ())
    ]
