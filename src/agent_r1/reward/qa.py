"""Turn an answer into a reward for question answering.

In: the answer that the dialect read from the last turn, and the accepted answers. Out: the outcome
reward, its parts by name, and unrewarded metrics. Next: the episode loop adds the reward to the
last action.

Rewarded: exact match (EM), minus a penalty for a malformed last turn. Not rewarded: F1 and sub-EM.
A long list of candidates scores on both, so an agent trained on them learns to ramble.

The input is model output, so nothing here may raise or hang. `scorers.py` has EM and F1 as the
official scorers compute them.
"""

from __future__ import annotations

from agent_r1.config.settings import EnvConfig
from agent_r1.core import Row
from agent_r1.reward.scorers import exact_match, f1_score, sub_em


def qa_outcome(
    answer: str | None, well_formed: bool, targets: list[str], format_penalty: float
) -> tuple[float, dict[str, float], dict[str, float]]:
    """Score a finished episode.

    `answer` is None if there is none, for example after a cut-off. `well_formed` tells whether the
    last turn has the right format. Returns (reward, parts, metrics): parts `em` (0 or 1) and
    `format` (0 or -format_penalty), reward their sum, metrics `em`, `sub_em` and `f1` in [0, 1]. A
    right answer in a malformed turn still earns its EM.
    """
    # No answer is not the empty answer, which matches a target that normalises to nothing.
    metrics = {"em": 0.0, "sub_em": 0.0, "f1": 0.0}
    if answer is not None:
        metrics["em"] = exact_match(answer, targets)
        # Measured, not rewarded: "Landir or Bumvel" has sub-EM 1 and F1 0.5 (lesson 4).
        metrics["sub_em"] = sub_em(answer, targets)
        metrics["f1"] = f1_score(answer, targets)
    # 0.2 in the presets. With 1.5, an agent would first learn the form, because a malformed answer
    # costs more than a right one earns (lesson 4).
    parts = {"em": metrics["em"], "format": 0.0 if well_formed else -format_penalty}
    return sum(parts.values()), parts, metrics


async def sub_em_reward(answer: str, targets: list[str], row: Row, config: EnvConfig) -> float:
    """Return `sub_em` as the reward (`env.reward=sub_em`).

    It is for comparisons with papers that train on it.
    """
    return sub_em(answer, targets)


async def exact_match_reward(answer: str, targets: list[str], row: Row, config: EnvConfig) -> float:
    """Return exact match, for `env.rules`."""
    return exact_match(answer, targets)
