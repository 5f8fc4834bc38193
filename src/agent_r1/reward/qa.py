"""Question answering: an answer to a reward.

In: the answer as the environment read it from the agent's last turn (env/hermes.py), and the accepted ones. Out: the
outcome reward, its parts by name, and metrics that are measured but not paid. Next: the environment puts the reward on
the last action of the trajectory.

Paid: exact match (EM), minus a penalty for a malformed ending. Not paid: F1 and sub-EM. Both can be gained without
knowing the answer (a long list of candidates contains it somewhere), so an agent trained on them learns to ramble.

EM and F1 follow the official scorers of SQuAD (1606.05250) and HotpotQA (1809.09600) to the letter, oddities included,
because a figure is only comparable with published ones if it was computed by the same rules. There is one exception: a right
answer that normalises to nothing ("The", "A", "!!!") is compared as it is written, or the answer "a" would equal all of them.

Everything here reads model output, so nothing here may raise or hang, whatever the text. All of it takes linear time:
the regular expressions are alternatives of fixed words, and none can backtrack.
"""

from __future__ import annotations

import re
import string
from collections import Counter

from agent_r1.config.settings import EnvConfig
from agent_r1.core import Row

_DROP_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_ALL_OR_NOTHING = ("yes", "no", "noanswer")


# ------------------------------------------------------------------------------------- the official scorers' rules


def normalize_answer(text: str) -> str:
    """Lower case, drop ASCII punctuation, drop the words a/an/the, collapse white space: in this order.

    The order is part of the rules. Punctuation vanishes without leaving a blank ("U.S." -> "us", "rock-pop" ->
    "rockpop"), and it vanishes before the articles do ("a.n" -> "an" -> ""). Non-ASCII punctuation stays.
    """
    text = text.lower().translate(_DROP_PUNCTUATION)
    return " ".join(_ARTICLE.sub(" ", text).split())


def exact_match(answer: str, targets: list[str]) -> float:
    """Return 1.0 if the normalised answer equals any normalised target, else 0.0 (also for an empty list of targets)."""
    normalized = _comparable(answer)
    return float(any(normalized == _comparable(target) for target in targets))


def _comparable(text: str) -> str:
    return normalize_answer(text) or text.strip()


def f1_score(answer: str, targets: list[str]) -> float:
    """Best F1, in [0, 1], between the bags of normalised words of the answer and of any target.

    With `same` the size of the intersection of the two bags (a word counts as often as it occurs in both):
    precision p = same / words in the answer, recall r = same / words in the target, F1 = 2pr / (p + r).
    """
    return max((_f1(normalize_answer(answer), normalize_answer(target)) for target in targets), default=0.0)


def _f1(answer: str, target: str) -> float:
    # HotpotQA's rule: yes/no is right or wrong. Without it "yes, no" would score 2/3 on every such question.
    if answer != target and (answer in _ALL_OR_NOTHING or target in _ALL_OR_NOTHING):
        return 0.0
    answer_words, target_words = answer.split(), target.split()
    same = sum((Counter(answer_words) & Counter(target_words)).values())
    if same == 0:
        return 0.0
    precision, recall = same / len(answer_words), same / len(target_words)
    return 2 * precision * recall / (precision + recall)


def sub_em(answer: str, targets: list[str]) -> float:
    """1.0 if the normalised answer contains any normalised target as a substring, else 0.0.

    Much of the literature reports this and calls it EM. It is far more generous ("no" is in "norway"): never mix them.
    A target that normalises to nothing would be contained in everything; it only matches an equal answer.
    """
    normalized = normalize_answer(answer)
    wanted = [normalize_answer(target) for target in targets]
    return float(exact_match(answer, targets) or any(target and target in normalized for target in wanted))


# ------------------------------------------------------------------------------------------------------ the outcome


def qa_outcome(
    answer: str | None, well_formed: bool, targets: list[str], format_penalty: float
) -> tuple[float, dict[str, float], dict[str, float]]:
    """Score a finished episode.

    `answer` is None when there is none (the episode was cut off, for example), `well_formed` says whether the turn that
    holds it is as it should be. Returns (reward, parts, metrics): parts `em` (0 or 1) and `format` (0 or
    -format_penalty), reward their sum; metrics `em`, `sub_em` and `f1`, each in [0, 1]. A right answer in a malformed
    turn still earns its EM.
    """
    # "No answer" is not the empty answer: that one would match a target that normalises to nothing.
    metrics = {
        "em": exact_match(answer, targets) if answer is not None else 0.0,
        "sub_em": sub_em(answer, targets) if answer is not None else 0.0,
        "f1": f1_score(answer, targets) if answer is not None else 0.0,
    }
    parts = {"em": metrics["em"], "format": 0.0 if well_formed else -format_penalty}
    return sum(parts.values()), parts, metrics


async def sub_em_reward(answer: str, targets: list[str], row: Row, config: EnvConfig) -> float:
    """Pay `sub_em`, for comparison with work that does (`env.reward=sub_em`)."""
    return sub_em(answer, targets)
