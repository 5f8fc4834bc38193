"""Rewards on the way in the inspector and in the report."""

from __future__ import annotations

from letters import letters_run, write_letters
from runs import main

from agent_r1.config import load_config, to_yaml
from agent_r1.training.run_dir import RunDir
from agent_r1.watch.log import STEP_KEY
from agent_r1.watch.report import write_report


def test_what_was_paid_on_the_way_is_told_apart(chat, monkeypatch, tmp_path, capsys):
    """LetterEnv pays its first turn on the way, and its last as an outcome: in the inspector and in
    the report."""
    played, run = letters_run(chat, monkeypatch, "ppo", "trainer.steps=5"), RunDir(tmp_path / "run")
    last = played.trajectories[-1]
    assert {t.process for t in last} == {0.0, 0.5}
    path = run.path / "rollouts" / "step_000005.jsonl"
    path.parent.mkdir(parents=True)
    run.config.write_text(to_yaml(load_config("small")))
    for step, metrics in enumerate(played.metrics, start=1):
        run.metrics.append({STEP_KEY: step} | metrics)
    write_letters(path, played.batches[-1], chat, 5)
    for number, trajectory in enumerate(last):
        assert main("inspect", str(path), "-i", str(number)) == 0
        first = trajectory.steps[0].reward
        assert ("(+0.50 of it on the way)" in capsys.readouterr().out) == (
            first == 0.5 == trajectory.process
        )
    page = write_report(run.path).read_text()
    assert "of it on the way</" in page and page.count("(+0.50 of it on the way)") >= 1
