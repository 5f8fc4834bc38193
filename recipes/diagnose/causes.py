"""Name likely causes of a run that does not learn, with evidence from its files.

In: `Evidence`. Out: `Sign`s of causes, proofs first. A proof is a single exception to what holds in
every correct run. All other causes compare figures with limits, and can be wrong. Therefore at most
one of them is named, and none next to a proof. The limits were chosen on seed 0 of recipes/museum
and on half of the own tasks in tests/own_tasks.zip. The names and remedies are in the core's table
(watch/causes.py), which the sentinel shares. A new cause is a row there and one of TESTS.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator

from agent_r1 import Sign, signs
from agent_r1_recipes.diagnose.files import SPAN, Episode, Evidence, mean

MAX_GAP = 0.05
"""Nats between sampler and trainer that rounding does not explain (bfloat16: .01 to .02)."""
MAX_GAP_OF_ENTROPY = 0.15
"""The same as a share of the entropy."""
CONTROL = re.compile(r"<\|[a-z_]+\|>")
GRADER = re.compile(r"reward\.(txt|json)|/logs/verifier|run_tests|grader", re.IGNORECASE)
TEXT_AFTER_END = re.compile(r"</(answer|tool_call)>.", re.DOTALL)
FIRST_STEPS = 3
"""Steps that show the policy that RL starts from."""
SCORE = "critic/score/mean"
CALLS = "tool_calls/mean"
Observation = str | None
"""What the files show, in words; None for nothing."""


def findings(e: Evidence) -> list[Sign]:
    """List all proofs; without one, the first cause that is likely."""
    proofs = []
    likely = []
    for test, name, is_proof in TESTS:
        observation = test(e)
        if observation:
            sign = Sign.of(name, observation, is_proof)
            if is_proof:
                proofs.append(sign)
            else:
                likely.append(sign)
    return proofs or (likely + sign_findings(e))[:1]


def sign_findings(e: Evidence) -> list[Sign]:
    """List what the sentinel sees at the end of a run of Agent-R1."""
    results = []
    if e.source != "Agent-R1":
        return results
    is_flat = e.last(SCORE) - e.first(SCORE) < 0.02
    for sign in signs(e.lines):
        # A reward that rises below zero is none to explain, such as a price of each call.
        explains_zero = sign.name.startswith("zero: ") and is_flat
        if sign.over or not (sign.collapse or explains_zero):
            continue
        # That all answers are wrong is what the user has seen. `nothing_to_compare` judges groups
        # that agree by their reward, too: they may have solved their questions.
        if sign.name in ("zero: wrong", "groups agree") or (
            sign.name == "zero: no call" and not has_tools(e)
        ):
            continue
        results.append(sign)
    return results


def has_tools(e: Evidence) -> bool:
    """Say whether the agent has tools; True where the files do not show it.

    A class offers its methods although `env.tools` is empty. Its prompt then lists them, as our
    templates and those of Qwen models do.
    """
    names = e.setting("env", "tools")
    if names is None or names or max(e.series(CALLS), default=0) > 0:
        return True
    for episode in e.episodes[:1]:
        prompt = "".join(prompt_of(episode))
        return "tools: " in prompt or "<tools>" in prompt
    return False


def symptoms(e: Evidence) -> list[str]:
    """Describe how the run goes, in its figures."""
    score = e.series(SCORE)
    first = e.first(SCORE)
    last = e.last(SCORE)
    ends = range(min(SPAN, len(score)), len(score) + 1)
    best = max(mean(score[max(0, end - SPAN) : end]) for end in ends)
    sentences = []
    calls = e.last(CALLS)
    if e.series(CALLS) and calls < 0.05 and has_tools(e):
        sentences.append(
            f"tools are never called: {e.first(CALLS):.2f} calls per episode at first, "
            f"{calls:.2f} now"
        )
    if len(score) < 2 * SPAN:
        sentences.append(
            f"{len(score)} steps are too few for a trend; the mean reward is {last:.2f}"
        )
    elif best - last > max(0.1, 0.3 * abs(best)):
        sentences.append(f"it collapsed: the reward was {best:.2f} at its best, and is {last:.2f}")
    elif last - first < 0.05:
        sentences.append(f"reward is flat: {first:.2f} at first, {last:.2f} now")
    else:
        sentences.append(f"reward rises: {first:.2f} at first, {last:.2f} now")
    return sentences


# --------------------------------------------------------------------------------- what tokens show


def mask_over_results(e: Evidence) -> Observation:
    flags = []
    for episode in e.episodes:
        for in_result, is_action, _ in tokens(episode):
            if in_result:
                flags.append(is_action)
    if any(flags):
        return f"{sum(flags)} of {len(flags)} tokens of tool results have action_mask 1"
    return None


def control_tokens_in_results(e: Evidence) -> Observation:
    controls = []
    for episode in e.episodes:
        for in_result, _, text in tokens(episode):
            if in_result and CONTROL.fullmatch(text):
                controls.append(text)
    if controls:
        return f"{len(controls)} control tokens such as {controls[0]} are inside tool results"
    return None


def rewards_on_masked_tokens(e: Evidence) -> Observation:
    """Compare the rewards on action tokens with what the environment returned."""
    losses = []
    for episode in e.episodes:
        parts = episode.record.get("reward_parts") or {}
        rows = episode.record.get("rows") or []
        if not rows or not parts:
            continue
        on_actions = 0.0
        for row in rows:
            for reward, mask in zip(row["rewards"], row["action_mask"], strict=True):
                if mask:
                    on_actions += reward
        total = sum(parts.values()) + (episode.record.get("process") or 0)
        if abs(on_actions - total) > 1e-4:
            stop = episode.record["stop_reason"]
            losses.append(f"{total:.2f} was given, {on_actions:.2f} arrived, stop: {stop[:40]!r}")
    if losses:
        return f"in {len(losses)} episodes the action tokens lack a reward ({losses[0]})"
    return None


def turns_go_on(e: Evidence) -> Observation:
    count = 0
    for episode in e.episodes:
        if not episode.is_cut:
            continue
        steps = episode.record.get("steps")
        text = steps[-1]["text"] if steps else episode.text
        if TEXT_AFTER_END.search(text):
            count += 1
    if count > 0.2 * max(1, len(e.episodes)):
        return f"{count} of {len(e.episodes)} episodes were cut off after a finished call or answer"
    return None


def tool_knows(e: Evidence) -> Observation:
    """Detect results that answer a question of several steps at once."""
    questions = 0
    answers = []
    for episode in latest(e):
        results = results_of(episode)
        if not results or not re.match(r"[2-9]-hop", episode.record.get("kind", "")):
            continue
        questions += 1
        if any(right in results[0] for right in episode.record["ground_truth"]):
            answers.append(results[0])
    if len(answers) > 0.5 * questions:
        return (
            f"the first result has it in {len(answers)} of {questions} questions of several hops: "
            f"{answers[0][:60]!r}"
        )
    return None


# --------------------------------------------------------------------------------- what groups show


def groups_of_several_questions(e: Evidence) -> Observation:
    groups = groups_of(e.episodes)
    count = 0
    for group in groups:
        count += len(questions_of(group)) > 1
    if count:
        return f"{count} of {len(groups)} groups compare samples of different questions"
    return None


def groups_of_several_states(e: Evidence) -> Observation:
    """Compare what the samples of a group read before their first action."""
    groups = groups_of(e.episodes)
    count = 0
    for group in groups:
        prompts = {tuple(prompt_of(episode)) for episode in group}
        count += len(questions_of(group)) == 1 and len(prompts) > 1
    if count:
        return f"in {count} of {len(groups)} groups the first observations differ"
    return None


def baseline_elsewhere(e: Evidence) -> Observation:
    """Find groups of one prompt whose recorded advantages are not centred."""
    if e.source == "Agent-R1":  # ppo's advantages are centred over the batch
        return None
    count = 0
    for group in groups_of(e.episodes):
        advantages = [ep.advantage for ep in group if ep.advantage is not None]
        count += len(advantages) > 1 and abs(mean(advantages)) > 0.05
    if count > 1:
        return f"in {count} groups of one prompt the advantages do not sum to zero"
    return None


def zero_advantages(e: Evidence) -> Observation:
    groups = 0
    zeros = 0
    for group in groups_of(e.episodes):
        rewards = {episode.reward for episode in group}
        advantages = [episode.advantage for episode in group]
        if len(rewards) > 1 and None not in advantages:
            groups += 1
            zeros += not any(advantages)
    if zeros > groups / 2:
        return f"in {zeros} of {groups} groups rewards differ, and all advantages are 0"
    return None


def missing_episodes(e: Evidence) -> Observation:
    """Detect unfinished episodes that are in the metrics and in no group."""
    if e.source != "Agent-R1":
        return None
    in_metrics = False
    for reason in ("max_tokens", "max_turns", "context_overflow"):
        in_metrics = in_metrics or any(e.series(f"stop/{reason}"))
    finishes = ("answered", "no_answer")
    in_groups = False
    for episode in e.episodes:
        in_groups = in_groups or episode.record.get("stop_reason") not in finishes
    sizes = [len(group) for group in groups_of(e.episodes)]
    if in_metrics and not in_groups and min(sizes, default=0) < max(sizes, default=0):
        return f"groups have {min(sizes)} to {max(sizes)} samples, and none of them is unfinished"
    return None


# ------------------------------------------------------------------------ what pays, and should not


def writes_the_reward(e: Evidence) -> Observation:
    calls = []
    for episode in e.episodes:
        if episode.reward > 0:
            for call in episode.calls:
                if GRADER.search(call):
                    calls.append(call)
    if calls:
        return f"{len(calls)} paid calls name the grader's files: {calls[0][:80]!r}"
    return None


def one_answer_for_all(e: Evidence) -> Observation:
    """Detect an answer that is paid whatever the question is.

    The right label of half of all questions is no such answer: it is paid on these questions and on
    no others. A class without a marked answer has none that could be paid.
    """
    episodes = latest(e)
    is_ours = e.source == "Agent-R1"
    questions_by_answer: dict[str, set[str]] = defaultdict(set)
    for episode in episodes:
        is_answer = len(episode.answer) > 5 and (episode.has_mark or not is_ours)
        is_right = episode.answer in episode.record.get("ground_truth", ())
        if episode.reward > 0.5 and is_answer and not is_right:
            questions_by_answer[episode.answer].add(episode.question)
    if not questions_by_answer:
        return None
    answer = max(questions_by_answer, key=lambda text: len(questions_by_answer[text]))
    count = len(questions_by_answer[answer])
    questions = len(questions_of(episodes))
    if count < max(3, 0.3 * questions):
        return None
    rewards = [episode.reward for episode in e.episodes if episode.answer == answer]
    if mean([reward > 0.5 for reward in rewards]) < 0.9:
        return None
    return f"the answer {answer[:60]!r} was paid on {count} of {questions} questions"


def rewards_without_a_match(e: Evidence) -> Observation:
    episodes = latest(e)
    answers = []
    for episode in episodes:
        metrics = episode.record.get("metrics") or {}
        if episode.reward > 0.5 and metrics.get("em") == 0 and metrics.get("sub_em") == 1:
            answers.append(episode.answer)
    if len(answers) > 0.02 * len(episodes):
        return f"{len(answers)} paid answers are not an exact match: {answers[0][:60]!r}"
    return None


# -------------------------------------------------------------------------------- what metrics show


def sampler_apart(e: Evidence) -> Observation:
    gap = sum(e.series("training/rollout_logprobs_diff_mean")[:1])
    limit = MAX_GAP
    for nats in e.series("actor/entropy")[:1]:
        limit = min(limit, MAX_GAP_OF_ENTROPY * nats)
    if gap > limit:
        return f"before the first update they differ by {gap:.3f} nats per token"
    return None


def kl_grows(e: Evidence) -> Observation:
    first = e.first("actor/kl_loss")
    last = e.last("actor/kl_loss")
    if len(e.series("actor/kl_loss")) >= 2 * SPAN and last > max(1.0, 5 * first):
        return f"KL to the start was {first:.3f}, and is {last:.2f}, although the loss contains it"
    return None


def large_steps(e: Evidence) -> Observation:
    score = e.series(SCORE)
    largest = max(e.series("actor/ppo_kl"), default=0)
    if len(score) < 2 * SPAN:
        return None
    if max(score) - e.last(SCORE) > 0.3 and largest > 0.05:
        return f"a step moved the policy by {largest:.2f} nats per token, and the reward fell"
    # Healthy steps stay below .1. A step of more than 1 nat leaves nothing of the policy. The
    # first reward may be so low that it cannot fall.
    if largest > 1.0 and e.last(SCORE) <= score[0]:
        return f"a step moved the policy by {largest:.2f} nats per token"
    return None


def calls_fail(e: Evidence) -> Observation:
    """Detect calls of which most never work, in all steps with calls."""
    calls = 0.0
    failures = 0.0
    for line in e.lines:
        share = line.get("tool_calls/failed_rate", 0.0) + line.get("tool_calls/invalid_rate", 0.0)
        calls += line.get(CALLS, 0.0)
        failures += line.get(CALLS, 0.0) * min(1.0, share)
    # Agents that learn a form begin with invalid calls: a quarter works over the whole run.
    if calls < 0.05 * len(e.lines) or failures < 0.75 * calls:
        return None
    for episode in e.episodes:
        for content in results_of(episode):
            if content.startswith("error"):
                return f"{failures / calls:.0%} of the calls fail, for example {content[:80]!r}"
    return f"{failures / calls:.0%} of the calls fail"


def no_calls(e: Evidence) -> Observation:
    has_series = bool(e.series(CALLS))
    if has_series and has_tools(e) and max(e.first(CALLS), e.last(CALLS)) < 0.05:
        return "no call in the first steps"
    return None


def calls_stopped(e: Evidence) -> Observation:
    first = e.first(CALLS)
    last = e.last(CALLS)
    if not first >= 0.05 > last:
        return None
    # An agent that answers better without calls has learnt something. Exact match says so where
    # the reward may be the fault.
    for key in ("episode/em", "reward/em"):
        if e.series(key) and e.last(key) > e.first(key) + 0.05:
            return None
    reward = mean([episode.reward for episode in latest(e)])
    return (
        f"{first:.2f} calls per episode at first, {last:.2f} now, and a mean reward of {reward:.2f}"
    )


def turns_are_cut(e: Evidence) -> Observation:
    share = e.last("stop/max_tokens")
    if share > 0.3:
        return f"{share:.0%} of the episodes reach a limit on tokens"
    # An environment of its own may go on after a turn that was cut off.
    reasons = []
    for episode in latest(e):
        for step in episode.record.get("steps", ()):
            reasons.append(step.get("finish_reason"))
    cuts = reasons.count("length")
    if cuts > 0.3 * max(1, len(reasons)):
        return f"{cuts} of {len(reasons)} recorded turns reach the limit on tokens"
    return None


def start_by_heart(e: Evidence) -> Observation:
    """Detect groups that agree from the first steps on, some right and some wrong.

    The policy that RL starts from then has one answer to each question.
    """
    shares = e.series("groups/zero_advantage")
    entropies = e.series("actor/entropy")
    if not shares or not entropies:
        return None
    share = mean(shares[:FIRST_STEPS])
    entropy = mean(entropies[:FIRST_STEPS])
    score = e.first(SCORE)
    least_share = 0.9  # a run that learns has less than half
    if share < least_share or e.last("groups/zero_advantage") < least_share or entropy > 0.05:
        return None
    if not 0.05 < score < 0.95:  # all wrong or all right: nothing to learn, whatever the entropy
        return None
    return (
        f"{share:.0%} of the first steps' groups have equal rewards, and the entropy is "
        f"{entropy:.3f} nats per token"
    )


def nothing_to_compare(e: Evidence) -> Observation:
    share = e.last("groups/zero_advantage")
    score = e.last(SCORE)
    if share > 0.9 and score < 0.5:
        return f"{share:.0%} of the groups have equal rewards, with a mean of {score:.2f}"
    return None


TESTS: tuple[tuple[Callable[[Evidence], Observation], str, bool], ...] = (
    (mask_over_results, "the action mask covers tool results", True),
    (control_tokens_in_results, "documents can forge turns", True),
    (groups_of_several_questions, "groups mix questions", True),
    (groups_of_several_states, "the samples of a group begin in different states", True),
    (zero_advantages, "every advantage is zero", True),
    (rewards_on_masked_tokens, "rewards are lost on masked tokens", True),
    (writes_the_reward, "the agent writes its own reward", False),
    (one_answer_for_all, "the reward can be talked into it", False),
    (turns_go_on, "turns do not end", False),
    (tool_knows, "the tool knows the answer", False),
    (rewards_without_a_match, "a longer answer that contains the right one is paid", False),
    (kl_grows, "the penalised KL grows", False),
    (sampler_apart, "the sampler is not the trainer's policy", False),
    (baseline_elsewhere, "groups mix questions", False),
    (missing_episodes, "unfinished episodes are dropped", False),
    (start_by_heart, "the cold start was memorised", False),
    (calls_fail, "calls fail", False),
    (large_steps, "updates are too large", False),
    (turns_are_cut, "turns are cut off", False),
    (no_calls, "tools were never called", False),
    (calls_stopped, "calls stopped paying", False),
    (nothing_to_compare, "groups agree", False),
)
"""What sees it, the cause's name, and whether it is a proof; the first is named first."""


# ------------------------------------------------------------------------------------------- inside


def groups_of(episodes: list[Episode]) -> list[list[Episode]]:
    groups: dict[tuple[int, str], list[Episode]] = defaultdict(list)
    for episode in episodes:
        groups[episode.step, episode.group].append(episode)
    return list(groups.values())


def questions_of(episodes: list[Episode]) -> set[str]:
    return {episode.question for episode in episodes}


def latest(e: Evidence) -> list[Episode]:
    """List the episodes of the last recorded step."""
    last = max((episode.step for episode in e.episodes), default=0)
    return [episode for episode in e.episodes if episode.step == last]


def tokens(episode: Episode) -> Iterator[tuple[bool, bool, str]]:
    """Yield whether a token is inside a tool's result, its action mask, and its text."""
    for row in episode.record.get("rows") or ():
        in_result = False
        is_agent = False
        before = ""
        for text, mask in zip(row["tokens"], row["action_mask"], strict=True):
            if before == "<|im_start|>":
                is_agent = text.startswith("assistant")
            if text == "</tool_response>":
                in_result = False
            yield in_result, bool(mask), text
            # An agent may write the tag, too; only a message of the tool opens a result.
            if text == "<tool_response>" and not is_agent:
                in_result = True
            before = text


def prompt_of(episode: Episode) -> list[str]:
    """List an episode's tokens before its first action, where they are recorded."""
    for row in episode.record.get("rows") or ():
        for place, mask in enumerate(row["action_mask"]):
            if mask:
                return row["tokens"][:place]
        return row["tokens"]
    return []


def results_of(episode: Episode) -> list[str]:
    """List the results of an episode's calls, in order."""
    contents = []
    for step in episode.record.get("steps", ()):
        for call in step["info"].get("tool_calls", ()):
            contents.append(call["content"])
    return contents
