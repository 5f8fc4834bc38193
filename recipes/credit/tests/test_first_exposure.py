"""First exposure of the evidence: which turn is paid, and what an estimator makes of it."""

import torch
from conftest import fails_with

from agent_r1 import (
    AdvantageConfig,
    Step,
    StopReason,
    Trajectory,
    collate,
    load_config,
    trajectory_rows,
)
from agent_r1_recipes.credit.estimators import reinforce_plus_plus
from agent_r1_recipes.credit.first_exposure import Exposed, pay_exposures

ROW = {"extra_info": {"lookups": [{"passage_id": "Sosnum"}, {"passage_id": "Vos"}]}}


def turn(*results, ids=(1, 2)):
    """A turn of two tokens whose calls returned these results."""
    calls = [{"content": text} for text in results]
    return Step([5], list(ids), [0.0] * len(ids), info={"tool_calls": calls})


def episode(*steps, row=ROW):
    # The prompt of a later turn holds the earlier ones, so that all turns are one row.
    ids = [5]
    for step in steps:
        step.observation_ids = list(ids)
        ids = ids + step.action_ids + [6]
    return Trajectory(list(steps), "q", StopReason.ANSWERED, row)


def test_each_passage_is_paid_once_where_it_is_first_shown():
    shown = episode(
        turn("Sosnum is a book by Vos from Gax.\nTel is a film.\n"),
        turn("Sosnum is a book by Vos from Gax.\n"),
        turn("Vos from Gax works for Kir.\n"),
        turn(),
    )
    shown.steps[-1].reward = 1.0
    assert pay_exposures(shown, 0.5) == 1.0
    # A passage that only mentions Vos is not the passage of Vos.
    assert [step.reward for step in shown.steps] == [0.25, 0.0, 0.25, 1.0]
    assert shown.steps[0].token_rewards == [(1, 0.25)] and shown.process == 0.5
    # Two in one turn.
    both = episode(turn("Vos from Gax.\n", "Sosnum is a book.\n"), turn())
    assert pay_exposures(both, 0.5) == 1.0
    assert [step.reward for step in both.steps] == [0.5, 0.0]


def test_a_question_that_names_no_evidence_pays_nothing():
    plain = episode(turn("Sosnum is a book.\n"), row={})
    assert pay_exposures(plain, 0.5) == 0.0 and plain.steps[0].reward == 0.0


def test_the_turn_that_shows_it_is_credited():
    """Four turns of one token, alone in a batch: the return to go is .25, 0, 0 and 0."""
    shown = episode(*[turn("Vos from Gax.\n" * (n == 0), ids=(1,)) for n in range(4)])
    pay_exposures(shown, 0.5)
    batch = collate(trajectory_rows(shown, 0), [shown])
    _, returns_BT = reinforce_plus_plus(batch, AdvantageConfig(normalize_std=False))
    torch.testing.assert_close(
        returns_BT[batch.mask_BT.bool()], torch.tensor([0.25, 0.0, 0.0, 0.0])
    )


def test_rollouts_report_the_share_that_was_shown():
    class Inner:
        policy = episodes = None

        def choose(self, step):
            episodes = [episode(turn("Vos from Gax.\n")), episode(turn(""))]
            return episodes[:1], episodes, {"rollout/episodes_played": 2}

    rollout = load_config("small", ["rollout.exposure_reward=0.5"]).rollout
    chosen, _, metrics = Exposed(Inner(), rollout).choose(1)
    assert chosen[0].reward == 0.25
    assert metrics == {"rollout/episodes_played": 2, "episode/exposed": 0.25}


def test_it_is_refused_where_episodes_would_be_compared_without_it():
    words = ["rollout.exposure_reward=0.5"]
    with fails_with("unused_setting"):
        load_config("small", [*words, "rollout.dynamic_sampling_rounds=1"])
    with fails_with("unused_setting"):
        load_config("small", words, algorithm="remax")
    with fails_with("local_engine_only"):
        load_config("small", [*words, "engine=verl"])
