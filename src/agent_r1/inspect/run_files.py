"""A run directory in memory, as far as it exists.

In: `runs/<name>/`. Out: `RunFiles` for `charts.py` and `report.py`. A run may have been interrupted at any moment, so
everything but the configuration may be missing; what is missing or damaged is said in a sentence and not raised.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from agent_r1.errors import AgentR1Error
from agent_r1.files import read_jsonl
from agent_r1.training.log import STEP, with_val_em

Record = dict[str, Any]


@dataclass
class RunFiles:
    """What a run left behind."""

    path: Path
    config: Record
    """config.yaml as plain dicts: a report must also open runs of another version."""
    config_text: str
    metrics: list[Record] = field(default_factory=list)
    before: Record | None = None
    """eval_before.json, the card of the model that RL started from."""
    after: Record | None = None
    """eval.json, the card of the trained model."""
    rollouts_before: list[Record] = field(default_factory=list)
    rollouts_after: list[Record] = field(default_factory=list)
    rollouts_train: list[Record] = field(default_factory=list)
    """Of the last training step that was dumped; these have advantages."""
    missing: list[str] = field(default_factory=list)
    """A sentence for each thing that the report cannot show."""

    @property
    def score_name(self) -> str:
        """What the score of its evaluations is: em, or reward where the environment measures no exact match."""
        return next((card["score_name"] for card in (self.after, self.before) if card), "em")

    def series(self, key: str) -> list[tuple[int, float]]:
        """(step, value) of every line of metrics.jsonl that has a number at `key`."""
        pairs = ((line.get(STEP), line.get(key)) for line in self.metrics)
        return [(step, value) for step, value in pairs if _is_number(step) and _is_number(value)]


def load_run(run_dir: Path) -> RunFiles:
    """Read a run directory. Raises AgentR1Error when it is none (no readable config.yaml)."""
    try:
        text = (run_dir / "config.yaml").read_text(encoding="utf-8")
        config = yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError):
        config = None
    if not isinstance(config, dict):
        there = ", ".join(sorted(path.parent.name for path in run_dir.parent.glob("*/config.yaml"))) or "none yet"
        raise AgentR1Error(f"{run_dir} holds no readable config.yaml; name a run with --run (there are: {there})")
    run = RunFiles(run_dir, config, text)
    run.metrics = [with_val_em(m) for m in _lines(run, "metrics.jsonl", "there are no learning curves")]
    run.before = _card(run, "eval_before.json", "the model that RL started from was not evaluated")
    run.after = _card(run, "eval.json", "the trained model was not evaluated; was the run interrupted?")
    run.rollouts_before = _lines(run, "rollouts/eval_before.jsonl", "there are no transcripts from before RL")
    run.rollouts_after = _lines(run, "rollouts/eval.jsonl", "there are no transcripts from after RL")
    dumps = sorted((run_dir / "rollouts").glob("step_*.jsonl"))
    last = f"rollouts/{dumps[-1].name}" if dumps else "rollouts/step_*.jsonl"
    run.rollouts_train = _lines(run, last, "there is no training batch to look into")
    return run


def _lines(run: RunFiles, name: str, consequence: str) -> list[Record]:
    try:
        lines = read_jsonl(run.path / name)
    except (AgentR1Error, OSError) as error:
        run.missing.append(f"{error} ({consequence}).")
        return []
    if not lines:
        run.missing.append(f"{name} is missing or empty: {consequence}.")
    return lines


def _card(run: RunFiles, name: str, consequence: str) -> Record | None:
    try:
        card = json.loads((run.path / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        run.missing.append(f"{name} is missing: {consequence}.")
        return None
    except (OSError, ValueError):
        card = None
    if isinstance(card, dict) and "score" not in card:  # one of an earlier version
        card |= {"score": card.get("em"), "score_name": "em"}
    if not isinstance(card, dict) or not _is_number(card["score"]):
        run.missing.append(f"{name} cannot be read as an eval card; make it again with `agent-r1 eval`.")
        return None
    return card


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
