"""Claims tried in Stop: the verdict by hand, exact scores, and what one training does."""

import json

import pytest
import torch
import yaml
from lab.experiments import claims
from lab.experiments.claims import (
    BETS,
    CLAIMS,
    centre,
    chances_of,
    divide,
    draw,
    kl_of,
    mean_score,
    open_world,
    train,
    verdict,
    weights_of,
)

BET = {"margin": 0.1, "precondition_least": 1.0}


@pytest.fixture(scope="module")
def world():
    return open_world("stop-start")


@pytest.mark.parametrize(
    ("effects", "precondition", "expected"),
    [
        ([0.3, 0.31, 0.29], 1.0, "holds"),
        ([0.05, 0.06, 0.04], 1.0, "fails"),
        ([-0.5, -0.6, -0.4], 1.0, "fails"),
        ([0.0, 0.2, 0.4], 1.0, "not decided"),
        ([0.3, 0.31, 0.29], 0.9, "cannot show"),
    ],
)
def test_a_verdict_compares_the_interval_with_the_margin(effects, precondition, expected):
    assert verdict(effects, [precondition] * 3, BET) == expected


def test_every_claim_has_a_bet_that_a_verdict_could_refute():
    bets = yaml.safe_load(BETS.read_text())
    assert list(bets) == list(CLAIMS)
    for bet in bets.values():
        assert bet["bet"] in ("holds", "fails") and bet["margin"] > 0


def test_advantages_by_hand():
    """Scores 1, 0, 0, 0: mean .25, deviation (n - 1) .5."""
    scores_QG = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]], dtype=torch.float64)
    centred = torch.tensor([[0.75, -0.25, -0.25, -0.25], [0.0] * 4], dtype=torch.float64)
    torch.testing.assert_close(centre(scores_QG), centred)
    torch.testing.assert_close(divide(scores_QG), 2 * centred, rtol=1e-5, atol=0)


def test_the_world_is_whole(world):
    chance_N = chances_of(world)
    ones_N = torch.ones_like(chance_N)
    assert mean_score(world, chance_N, ones_N) == pytest.approx(1.0, abs=1e-5)
    # The start answers right in about a fourth of its plays, and hardly ever says "nothing".
    assert 0.2 < mean_score(world, chance_N, world.right_N) < 0.35
    assert 0.0 < mean_score(world, chance_N, world.fools_N.double()) < 0.02
    assert not (world.fools_N & (world.right_N > 0)).any()
    assert kl_of(world, chance_N, chance_N.log()) == pytest.approx(0.0, abs=1e-9)
    assert kl_of(world, chance_N, chance_N.log() - 1.0) == pytest.approx(1.0, abs=1e-5)


def test_drawn_plays_belong_to_their_question_and_weigh_by_count(world):
    drawn_QG = draw(world, chances_of(world), torch.Generator().manual_seed(0))
    numbers_Q = torch.arange(world.plays.questions)
    assert (world.plays.question_N[drawn_QG] == numbers_Q[:, None]).all()
    weight_N = weights_of(world, drawn_QG, torch.ones(drawn_QG.shape))
    assert float(weight_N.sum()) == pytest.approx(1.0)
    play = int(drawn_QG[0, 0])
    assert float(weight_N[play]) == pytest.approx(int((drawn_QG == play).sum()) / drawn_QG.numel())


def test_training_on_a_fooled_judge_follows_the_judge():
    world = open_world("stop-start")
    judged_N = torch.where(world.fools_N, claims.EXPLOIT, world.right_N)
    chances = train(world, 900, 20, judged_N, centre)
    before, after = (mean_score(world, chances[i], judged_N) for i in (0, -1))
    assert after > before + 0.03


def test_the_table_has_what_was_written_before():
    record = {
        "judge": {
            "verdict": "fails",
            "effect": [0.1, 0.05, 0.15],
            "runs": [{"precondition": 0.2}, {"precondition": 0.4}],
        }
    }
    row = claims.table(record).splitlines()[-1]
    assert "+0.100 (+0.050 to +0.150), 2 seeds | 0.2 |" in row
    assert row.endswith("at least .1 first: 0.30 | holds | **fails** |")


def test_an_interrupted_command_goes_on_where_it_was(tmp_path, monkeypatch, capsys):
    ran = []

    def fake(seed):
        ran.append(seed)
        if len(ran) == 2:
            raise KeyboardInterrupt
        return {"effect": 0.5 + seed / 100, "precondition": 9.0}

    monkeypatch.setattr(claims, "CLAIMS", {"judge": fake})
    out = tmp_path / "claims.json"
    monkeypatch.setattr("sys.argv", ["claims", "--seeds", "3", "--out", str(out)])
    with pytest.raises(KeyboardInterrupt):
        claims.main()
    claims.main()
    assert ran == [0, 1, 1, 2]
    record = json.loads(out.read_text())["judge"]
    assert record["verdict"] == "holds" and record["effect"][0] == 0.51
    assert "judge: effect +0.5100 (+0.4852 to +0.5348): holds" in capsys.readouterr().out
