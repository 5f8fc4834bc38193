"""Keep what the exhibits' runs showed: `python -m agent_r1_recipes.museum.record`.

In: runs in AGENT_R1_HOME/museum. Out: a folder for each in recorded/, which `agent-r1 diagnose` reads like a run. It has
the metrics, the evaluation, and the episodes of six groups of a late step, without ids and log-probabilities.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from agent_r1 import json_records
from agent_r1_recipes.museum.run import HERE, Exhibit, base_of, read_exhibits

RECORDED = HERE / "recorded"
LATE, GROUPS, ALONE = "step_000031.jsonl", 6, 48
"""The recorded step, and the number of groups; of episodes without a group (ppo) so many."""
KEPT = ("training/", "critic/score/mean", "reward/", "episode/sub_em", "episode/em", "tool_calls/mean",
        "tool_calls/invalid_rate", "groups/zero_advantage", "actor/entropy", "actor/ppo_kl", "actor/kl_loss",
        "actor/grad_norm", "response_length/mean", "stop/", "val-core/")  # fmt: skip
"""Beginnings of the names of metrics."""
FACTS = ("step", "group_id", "question", "ground_truth", "kind", "stop_reason", "reward", "reward_parts", "process",
         "metrics")  # fmt: skip


def record(exhibit: Exhibit, seed: int) -> Path | None:
    """Write the folder of one finished run; None if there is no such run."""
    run = base_of(exhibit) / "runs" / f"{exhibit.name}-s{seed}"
    if not (run / "checkpoints/step_000032").exists():
        return None
    target = RECORDED / run.name
    (target / "rollouts").mkdir(parents=True, exist_ok=True)
    lines = [line for _, line in json_records(run / "metrics.jsonl")]
    _write(
        target / "metrics.jsonl.gz", [{k: _short(v) for k, v in line.items() if k.startswith(KEPT)} for line in lines]
    )
    records = [line for _, line in json_records(run / "rollouts" / LATE)]
    groups = list(dict.fromkeys(r["group_id"] for r in records))
    chosen = groups[:ALONE] if len(groups) == len(records) else groups[:GROUPS]
    _write(target / "rollouts" / f"{LATE}.gz", [_shortened(r) for r in records if r["group_id"] in chosen])
    if (run / "eval.json").exists():
        card = json.loads((run / "eval.json").read_text())
        kept = {
            key: card[key] for key in ("score", "score_ci95", "n", "search_rate", "mean_tool_calls", "stop_reasons")
        }
        (target / "eval.json").write_text(json.dumps(kept) + "\n")
    return target


def _shortened(record: dict[str, Any]) -> dict[str, Any]:
    def calls(step: dict[str, Any]) -> list[dict[str, Any]]:
        return [
            {key: call[key] for key in ("name", "arguments", "content")} for call in step["info"].get("tool_calls", ())
        ]

    steps = [{"text": step["text"], "info": {"tool_calls": calls(step)}} for step in record["steps"]]
    rows = [
        {
            "tokens": row["tokens"],
            "action_mask": row["action_mask"],
            **{key: [_short(v) for v in row[key]] for key in ("rewards", "advantages")},
        }
        for row in record["rows"]
    ]
    return {key: record[key] for key in FACTS} | {"steps": steps, "rows": rows}


def _short(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _write(file: Path, records: list[dict[str, Any]]) -> None:
    text = "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records)
    file.write_bytes(gzip.compress(text.encode(), 9, mtime=0))  # equal records give equal files


if __name__ == "__main__":
    for exhibit in read_exhibits().values():
        for seed in range(3):
            if folder := record(exhibit, seed):
                print(folder)
