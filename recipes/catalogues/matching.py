"""Compare words and rank texts, as WebShop does. In: texts. Out: a similarity, or a ranking.

`token_set_ratio` is the measure of that name in the package `thefuzz`, which WebShop's reward uses.
`Ranking` is BM25 with the constants of WebShop's search engine (Lucene through Pyserini: k1 = .9,
b = .4).
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict

K1 = 0.9
"""How fast repetitions of a word stop counting."""
B = 0.4
"""How much a long text is discounted."""
WORD = re.compile(r"[a-z0-9]+")


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case, in order."""
    return WORD.findall(text.lower())


def ratio(a: str, b: str) -> float:
    """Return 2 L / (len a + len b), in [0, 1]: L letters are in common.

    They are the longest common subsequence.
    """
    if not a and not b:
        return 1.0
    longest = [0] * (len(b) + 1)
    for letter in a:
        diagonal = 0
        for place, other in enumerate(b, 1):
            above = longest[place]
            longest[place] = diagonal + 1 if letter == other else max(above, longest[place - 1])
            diagonal = above
    return 2 * longest[-1] / (len(a) + len(b))


def token_set_ratio(a: str, b: str) -> float:
    """Return the similarity, in [0, 1], of two sets of words.

    C has the common words, A and B the rest of each text. It is the best `ratio` of two among C,
    C + A and C + B. So a text whose words are all in the other one has 1.
    """
    words_a = set(words_of(a))
    words_b = set(words_of(b))
    if not words_a or not words_b:
        return 0.0
    common = " ".join(sorted(words_a & words_b))
    rest_a = " ".join(sorted(words_a - words_b))
    rest_b = " ".join(sorted(words_b - words_a))
    if common and not (rest_a and rest_b):
        return 1.0
    with_a = f"{common} {rest_a}".strip()
    with_b = f"{common} {rest_b}".strip()
    best = ratio(with_a, with_b)
    if common:
        best = max(best, ratio(common, with_a), ratio(common, with_b))
    return best


class Ranking:
    """Rank documents by BM25.

    Args:
        texts: Name -> text of each document.
    """

    def __init__(self, texts: dict[str, str]):
        self._counts: dict[str, dict[str, int]] = defaultdict(dict)
        """Word -> documents with it, and how often."""
        self._lengths: dict[str, int] = {}
        for name, text in texts.items():
            words = words_of(text)
            self._lengths[name] = len(words)
            for word, count in Counter(words).items():
                self._counts[word][name] = count
        self._mean_length = sum(self._lengths.values()) / max(len(texts), 1)

    def search(self, query: str, count: int) -> list[str]:
        """Return the names of the best documents; ties are broken by name."""
        scores: dict[str, float] = defaultdict(float)
        for word in set(words_of(query)):
            documents = self._counts.get(word, {})
            rarity = math.log(
                1 + (len(self._lengths) - len(documents) + 0.5) / (len(documents) + 0.5)
            )
            for name, times in documents.items():
                length = self._lengths[name] / self._mean_length
                scores[name] += rarity * times * (K1 + 1) / (times + K1 * (1 - B + B * length))
        # Rounded: the order of a set's words changes the last bits of a sum.
        ranking = sorted(scores, key=lambda name: (-round(scores[name], 9), name))
        return ranking[:count]
