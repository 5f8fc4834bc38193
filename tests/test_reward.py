"""Room 6: exact match, F1 and format, against the published rules and against hostile text."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_env import model_text

from agent_r1.env.hermes import answer_of, is_well_formed
from agent_r1.reward.qa import qa_outcome
from agent_r1.reward.scorers import exact_match, f1_score, normalize_answer, sub_em

# ---------------------------------------- the official rules once more, by another route (no regex)

ASCII_PUNCTUATION = set("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")


def official_words(text: str) -> list[str]:
    """SQuAD's description, word by word: lower, remove punctuation, remove articles, split on white
    space."""
    kept = [c for c in text.lower() if c not in ASCII_PUNCTUATION]
    # An article is a maximal run of word characters (letters and digits of any script) that spells
    # a, an or the.
    runs = ["".join(run) for _, run in itertools.groupby(kept, key=str.isalnum)]
    return "".join(" " if run in ("a", "an", "the") else run for run in runs).split()


def official_em(answer: str, target: str) -> float:
    """But for a target without words ("The"), which any answer without words would equal: ours is
    compared as it is written."""
    if official_words(answer) or official_words(target):
        return float(official_words(answer) == official_words(target))
    return float(answer.strip() == target.strip())


def official_f1(answer: str, target: str) -> float:
    """HotpotQA's: a yes/no/noanswer on either side scores 0 unless both sides are the same."""
    a, t = official_words(answer), official_words(target)
    for special in (["yes"], ["no"], ["noanswer"]):
        if (a == special) != (t == special):
            return 0.0
    left, same = list(t), 0
    for word in a:
        if word in left:
            left.remove(word)
            same += 1
    return (
        0.0
        if same == 0
        else 2 * (same / len(a)) * (same / len(t)) / (same / len(a) + same / len(t))
    )


TRICKY = [
    "",
    " ",
    "the",
    "The The",
    "A",
    "a.n",
    "an apple",
    "Theatre",
    "theatre",
    "the-atre",
    "U.S.",
    "US",
    "u s",
    "rock-pop",
    "rock pop",
    "yes",
    "Yes.",
    "no",
    "No!",
    "no one",
    "noanswer",
    "no answer",
    "yes, no",
    "Norway",
    "AC/DC",
    "ac dc",
    "don't",
    "dont",
    "“quoted”",
    '"quoted"',
    "naïve café",
    "cafe\u0301",
    "a\u0301",
    "İstanbul",
    "ΣΑΣ",
    "straße",
    "STRASSE",
    "42",
    "42.0",
    "3,000",
    "3000",
    "a_b",
    "the\u00a0end",
    "end",
    "x\x1cy",
    "x y",
    "東京",
    "the 東京",
    "a東",
    "\ud800",
    "\x00",
    "New York, New York",
    "New York",
    "a New York",
    "Q\u200bR",
    "QR",
    "１",
    "1",
    "ﬁsh",
    "fish",
]


@pytest.mark.parametrize("answer", TRICKY)
def test_tricky_strings_score_as_the_official_scorer(answer):
    assert normalize_answer(answer) == " ".join(official_words(answer))
    for target in TRICKY:
        assert exact_match(answer, [target]) == official_em(answer, target), (answer, target)
        assert f1_score(answer, [target]) == pytest.approx(official_f1(answer, target)), (
            answer,
            target,
        )


WORDS = st.sampled_from(
    [
        "a",
        "an",
        "the",
        "The",
        "yes",
        "no",
        "noanswer",
        "of",
        "Rome",
        "rome",
        ".",
        "-",
        "'",
        " ",
        "\u0301",
        "İ",
    ]
)
TEXT = st.one_of(
    st.lists(WORDS, max_size=8).map("".join),
    st.lists(WORDS, max_size=8).map(" ".join),
    st.text(max_size=30),
    st.text(st.characters(exclude_categories=[]), max_size=12),  # lone surrogates too
)


@given(TEXT, TEXT)
def test_any_pair_scores_as_the_official_scorer(answer, target):
    assert exact_match(answer, [target]) == official_em(answer, target)
    assert f1_score(answer, [target]) == pytest.approx(official_f1(answer, target))


@given(TEXT, st.lists(TEXT, max_size=3))
def test_how_the_metrics_relate(answer, targets):
    em, f1, sub = exact_match(answer, targets), f1_score(answer, targets), sub_em(answer, targets)
    assert em in (0.0, 1.0) and sub in (0.0, 1.0) and 0.0 <= f1 <= 1.0 + 1e-9
    assert sub >= em
    if normalize_answer(
        answer
    ):  # the official F1 of two empty strings is 0 though they match exactly
        assert f1 >= em
    if targets:
        assert f1 == max(f1_score(answer, [t]) for t in targets)
        assert em == max(exact_match(answer, [t]) for t in targets)
    assert normalize_answer(normalize_answer(answer)) == normalize_answer(answer)


@pytest.mark.parametrize("target", ["The", "A", "!!!", "a an the", "...", ""])
def test_a_target_without_words_is_compared_as_it_is_written(target):
    for answer in ("a", "the", "?", "-", "an", "The A", " "):
        assert (
            exact_match(answer, [target])
            == sub_em(answer, [target])
            == float(answer.strip() == target)
        ), answer
    assert exact_match(f" {target} ", ["Oslo", target]) == 1.0
    assert qa_outcome("a", True, [target], 0.2)[0] == 0.0


def test_f1_by_hand():
    # answer {mount, everest, nepal}, target {mount, everest}: p = 2/3, r = 2/2, F1 = 2 * 2/3 * 1 /
    # (5/3) = 0.8
    assert f1_score("Mount Everest, Nepal", ["the Mount Everest"]) == pytest.approx(0.8)
    # A word counts as often as it is in both: {new, york, new, york} against {new, york}: p = 2/4,
    # r = 1, F1 = 2/3
    assert f1_score("New York, New York", ["New York"]) == pytest.approx(2 / 3)
    assert f1_score("Everest", ["K2", "Everest"]) == 1.0  # the best target counts
    assert f1_score("Everest", []) == 0.0


def test_yes_and_no_are_right_or_wrong():
    assert f1_score("yes", ["yes"]) == 1.0 and exact_match("Yes.", ["yes"]) == 1.0
    assert f1_score("yes, no", ["yes"]) == 0.0  # hedging: 2/3 without the rule
    assert f1_score("yes it is", ["yes"]) == 0.0
    assert f1_score("no", ["no one"]) == 0.0
    assert f1_score("noanswer", ["noanswer given"]) == 0.0
    assert f1_score("hedge yes or no", ["yes or no"]) == pytest.approx(
        2 * (3 / 4) / (7 / 4)
    )  # longer texts are ordinary


def test_sub_em_is_not_em():
    assert sub_em("It is in Norway, I think", ["no"]) == 1.0  # why it is never paid for
    assert exact_match("It is in Norway, I think", ["no"]) == 0.0
    assert sub_em("Oslo, Bergen or Turku", ["Bergen"]) == 1.0
    assert (
        sub_em("Oslo", ["the"]) == 0.0
    )  # a target of articles only is not contained in everything
    assert sub_em("Oslo", []) == 0.0


# -------------------------------------------------------------------------------------- the outcome


def score(text: str | None, targets: list[str], penalty: float):
    """A last turn to its reward, as the environment does it."""
    text = text or ""
    return qa_outcome(answer_of(text), is_well_formed(text), targets, penalty)


def test_outcome():
    right = score("<think>x</think><answer>The Oslo.</answer>", ["Oslo"], 0.2)
    assert right == (1.0, {"em": 1.0, "format": 0.0}, {"em": 1.0, "sub_em": 1.0, "f1": 1.0})
    reward, parts, metrics = score("<answer>Oslo</answer> !", ["Oslo"], 0.2)  # right, but malformed
    assert (
        reward == pytest.approx(0.8)
        and parts == {"em": 1.0, "format": -0.2}
        and metrics["em"] == 1.0
    )
    # Wrong but well-formed; {oslo, or, rome} against {oslo}: p 1/3, r 1, F1 = 2/3 / (4/3) = 0.5,
    # not paid
    reward, parts, metrics = score("<answer>Oslo or Rome</answer>", ["Oslo"], 0.2)
    assert reward == 0.0 and parts == {"em": 0.0, "format": 0.0}
    assert metrics == {"em": 0.0, "sub_em": 1.0, "f1": pytest.approx(0.5)}


@pytest.mark.parametrize("text", [None, "", "Oslo", "<answer>Oslo"])
def test_no_answer_is_penalised_and_scores_nothing(text):
    nothing = {"em": 0.0, "sub_em": 0.0, "f1": 0.0}
    # "the" normalises to nothing: no answer must not match it as an empty answer would
    assert score(text, ["Oslo", "the"], 0.2) == (-0.2, {"em": 0.0, "format": -0.2}, nothing)


@given(model_text)
def test_outcome_holds_together_on_any_text(text):
    reward, parts, metrics = score(text, ["Oslo"], 0.2)
    assert reward == pytest.approx(parts["em"] + parts["format"])
    assert parts["em"] == metrics["em"] <= metrics["sub_em"]
    assert (parts["format"] == 0.0) == is_well_formed(text)
    if answer_of(text) is None:
        assert reward == -0.2


HOSTILE = [
    "<answer>",
    "</answer>",
    "<answer></answer>",
    "<think>",
    "<tool_call",
    "<",
    "a ",
    "the the ",
    " ",
    "İ",
    "\ud800",
]


@pytest.mark.parametrize("piece", HOSTILE)
@pytest.mark.timeout(120)  # takes 0.01 to 0.07 s; anything quadratic takes longer than this
def test_a_hundred_kilobytes_of_anything_are_read(piece):
    text = piece * (100_000 // len(piece))
    for hostile in (
        text,
        f"<answer>{text}</answer>",
        f"<answer>Oslo</answer>{text}x",
        f"{text}<answer>Oslo</answer>",
    ):
        reward, _, _ = score(hostile, ["Oslo", "a" * 1000], 0.2)
        assert reward in (-0.2, 0.0, 0.8, 1.0)
