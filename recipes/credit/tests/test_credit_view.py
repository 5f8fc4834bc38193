"""Room 9: `inspect --compare` shows what the loop has credited, and what others would have."""

from __future__ import annotations

import pytest
from letters import letters_run, write_letters
from runs import main


@pytest.fixture
def file(chat, monkeypatch, tmp_path):
    record = letters_run(chat, monkeypatch, "ppo", "trainer.steps=2")
    path = tmp_path / "step_000002.jsonl"
    write_letters(path, record.batches[1], chat, 2)
    return path, record.batches[1]


def test_each_estimator_beside_the_others(file, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    path, batch = file
    assert main("inspect", str(path), "--compare", "ppo,grpo,steppo,gigpo") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == ["episode", "turn", "said", "reward", "ppo", "grpo", "steppo", "gigpo"]
    turns = [line for line in lines[2:] if line]
    assert len(turns) == 8 * 2 and [line[1] for line in turns[:4]] == ["1", "2", "1", "2"]
    # The run's own estimator shows what the loop has credited: the mean over the turn's tokens.
    for line in turns[:2]:
        at = batch.mask_BT[0].bool() & (batch.steps_BT[0] == int(line[1]) - 1)
        assert float(line[-4]) == pytest.approx(batch.advantages_BT[0][at].mean().item(), abs=6e-4)
    assert main("inspect", str(path), "--compare", "ppo", "--table", "-i", "1") == 0
    tokens = [line for line in capsys.readouterr().out.splitlines()[2:] if line.strip()]
    assert len(tokens) == int(batch.mask_BT[1].sum()) and all(line.split()[0] == "1" for line in tokens)
