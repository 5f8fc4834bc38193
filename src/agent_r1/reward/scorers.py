"""Compare an answer with the accepted answers: exact match (EM), F1 and sub-EM.

EM and F1 follow the official scorers of SQuAD (1606.05250) and HotpotQA (1809.09600) in every
detail, so that figures are comparable with published ones. One exception: a target that normalises
to nothing ("The", "A", "!!!") is compared as written. Otherwise the answer "a" would match all of
them.

The input is model output, so nothing here may raise or hang. All of it takes linear time: no
regular expression can backtrack.
"""

from __future__ import annotations

import re
import string
from collections import Counter

_DROP_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_ALL_OR_NOTHING = ("yes", "no", "noanswer")


def normalize_answer(text: str) -> str:
    """Lower-case, drop ASCII punctuation, drop a/an/the, collapse white space, in this order.

    The order matters. Punctuation leaves no blank ("U.S." -> "us", "rock-pop" -> "rockpop") and
    goes before the articles ("a.n" -> "an" -> ""). Non-ASCII punctuation stays.
    """
    text = text.lower().translate(_DROP_PUNCTUATION)
    return " ".join(_ARTICLE.sub(" ", text).split())


def exact_match(answer: str, targets: list[str]) -> float:
    """Return 1.0 if the normalised answer equals any normalised target, else 0.0.

    Without targets it is 0.0.
    """
    comparable_answer = _comparable(answer)
    return float(any(comparable_answer == _comparable(target) for target in targets))


def _comparable(text: str) -> str:
    return normalize_answer(text) or text.strip()


def f1_score(answer: str, targets: list[str]) -> float:
    """Return the best F1, in [0, 1], of the answer against any target.

    Both are normalised and compared as bags of words. `same` is the size of the intersection of the
    two bags of words. Precision p = same / words in the answer, recall r = same / words in the
    target, F1 = 2pr / (p + r).
    """
    return max(
        (_f1(normalize_answer(answer), normalize_answer(target)) for target in targets), default=0.0
    )


def _f1(answer: str, target: str) -> float:
    # HotpotQA's rule: yes/no is right or wrong. Otherwise "yes, no" would score 2/3 on every such
    # question.
    if answer != target and (answer in _ALL_OR_NOTHING or target in _ALL_OR_NOTHING):
        return 0.0
    answer_words = answer.split()
    target_words = target.split()
    same = sum((Counter(answer_words) & Counter(target_words)).values())
    if same == 0:
        return 0.0
    precision = same / len(answer_words)
    recall = same / len(target_words)
    return 2 * precision * recall / (precision + recall)


def sub_em(answer: str, targets: list[str]) -> float:
    """Return 1.0 if the normalised answer contains any normalised target as a substring, else 0.0.

    Many papers report this as EM. It is far more generous ("no" is in "norway"), so never compare
    the two. A target that normalises to nothing matches only an equal answer.
    """
    normalized_answer = normalize_answer(answer)
    if exact_match(answer, targets):
        return 1.0
    for target in targets:
        part = normalize_answer(target)
        if part and part in normalized_answer:
            return 1.0
    return 0.0
