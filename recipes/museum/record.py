"""Keep what the exhibits' runs showed: `python -m agent_r1_recipes.museum.record`.

In: runs in AGENT_R1_HOME/museum. Out: recorded.zip with a folder for each, which
`agent-r1 diagnose` reads like a run. It has the metrics, the test score, and six groups of the
first and of a late step, without ids and log-probabilities.
"""

from __future__ import annotations

import gzip
import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from agent_r1 import json_records, signs
from agent_r1_recipes.diagnose.archive import pack, unpack
from agent_r1_recipes.diagnose.causes import findings
from agent_r1_recipes.diagnose.files import read_evidence
from agent_r1_recipes.museum.run import HERE, Exhibit, base_of, read_exhibits

RECORDINGS = HERE / "recorded.zip"
STEPS, GROUPS, ALONE = ("step_000001.jsonl", "step_000031.jsonl"), 6, 48
"""The recorded steps, and the number of groups; of episodes without a group (ppo) so many."""
KEPT_PREFIXES = (
    "training/",
    "critic/score/mean",
    "reward/",
    "episode/sub_em",
    "episode/em",
    "tool_calls/mean",
    "tool_calls/invalid_rate",
    "groups/zero_advantage",
    "actor/entropy",
    "actor/ppo_kl",
    "actor/kl_loss",
    "actor/grad_norm",
    "response_length/mean",
    "stop/",
    "val-core/",
    "test/",
)
"""Beginnings of the names of metrics."""
TEST = "test/score"
"""The last step's metric with the score of `agent-r1 eval`."""
FACTS = (
    "step",
    "group_id",
    "question",
    "ground_truth",
    "kind",
    "stop_reason",
    "reward",
    "reward_parts",
    "process",
    "metrics",
)


def record(exhibit: Exhibit, seed: int, recordings: Path) -> Path | None:
    """Write the folder of a finished run to `recordings`; None if there is no run."""
    run = base_of(exhibit) / "runs" / f"{exhibit.name}-s{seed}"
    if not (run / "checkpoints/step_000032").exists():
        return None
    target = recordings / run.name
    (target / "rollouts").mkdir(parents=True, exist_ok=True)
    lines = [line for _, line in json_records(run / "metrics.jsonl")]
    if (run / "eval.json").exists():
        lines[-1][TEST] = json.loads((run / "eval.json").read_text())["score"]
    _write(
        target / "metrics.jsonl.gz",
        [{k: _short(v) for k, v in line.items() if k.startswith(KEPT_PREFIXES)} for line in lines],
    )
    for step in STEPS:
        records = [line for _, line in json_records(run / "rollouts" / step)]
        groups = list(dict.fromkeys(r["group_id"] for r in records))
        group_ids = groups[:ALONE] if len(groups) == len(records) else groups[:GROUPS]
        _write(
            target / "rollouts" / f"{step}.gz",
            [_shorten_record(r) for r in records if r["group_id"] in group_ids],
        )
    return target


def _shorten_record(record: dict[str, Any]) -> dict[str, Any]:
    def calls(step: dict[str, Any]) -> list[dict[str, Any]]:
        return [
            {key: call[key] for key in ("name", "arguments", "content")}
            for call in step["info"].get("tool_calls", ())
        ]

    steps = [
        {"text": step["text"], "info": {"tool_calls": calls(step)}} for step in record["steps"]
    ]
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


def table(recordings: Path) -> str:
    """Format what was recorded.

    Means over the seeds, signs of the sentinel, and the first cause that `diagnose` names.
    """
    out = [
        "| exhibit | seeds | EM in training | greedy | sampled | difference | test | sentinel | "
        "`diagnose` |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, exhibit in read_exhibits().items():
        folders = sorted(recordings.glob(f"{name}-s*"))
        runs = [read_evidence(folder) for folder in folders]
        curves = [score_of(run.lines) for run in runs]
        ends = " → ".join(
            f"{fmean(map(fmean, end)):.2f}"
            for end in ([c[:5] for c in curves], [c[-5:] for c in curves])
        )
        greedy_scores, sampled_scores = zip(*map(read_validation, folders), strict=True)
        other = [
            read_validation(recordings / f"{exhibit.compare}{folder.name[-3:]}")[1]
            for folder in folders
        ]
        differences = (
            [mine - its for mine, its in zip(sampled_scores, other, strict=True)]
            if exhibit.patch
            else []
        )
        test = [run.lines[-1][TEST] for run in runs if TEST in run.lines[-1]]
        sign_names = [
            sorted({sign.name for sign in signs(run.lines) if not sign.over}) for run in runs
        ]
        cause_names = [[sign.cause.name for sign in findings(run)][:1] for run in runs]
        figures = map(_spread, (greedy_scores, sampled_scores, differences, test))
        cells = [
            f"`{name}`",
            str(len(runs)),
            ends,
            *figures,
            _count_names(sign_names),
            _count_names(cause_names),
        ]
        out.append(f"| {' | '.join(cells)} |")
    return "\n".join(out)


def read_validation(folder: Path) -> list[float]:
    """Return the last validation of a recorded run: greedy and sampled."""
    return [
        value
        for key, value in read_evidence(folder).lines[-1].items()
        if key.startswith("val-core/")
    ]


def confusion(recordings: Path, held_back: bool) -> str:
    """Format how often `diagnose` names a run's cause, for seed 0 or the others."""
    out = ["| | runs | named first | named | only others | nothing |", "|---|---|---|---|---|---|"]
    counts: dict[str, Counter[str]] = {
        "a cause that can be seen": Counter(),
        "no such cause": Counter(),
    }
    for name, exhibit in read_exhibits().items():
        for folder in sorted(recordings.glob(f"{name}-s*")):
            if folder.name.endswith("-s0") == held_back:
                continue
            cause_names = [sign.cause.name for sign in findings(read_evidence(folder))]
            row = counts["a cause that can be seen" if exhibit.cause else "no such cause"]
            verdict = (
                "first"
                if cause_names[:1] == [exhibit.cause]
                else "named"
                if exhibit.cause in cause_names
                else "others"
                if cause_names
                else ""
            )
            row.update(["runs", verdict or "nothing"])
    for kind, row in counts.items():
        cells = row["runs"], row["first"], row["named"], row["others"], row["nothing"]
        out.append(f"| {kind} | {' | '.join(map(str, cells))} |")
    return "\n".join(out)


def page(text: str, *tables: str) -> str:
    """Replace the tables between the marks of a page."""
    before, rest = text.split("<!-- table -->")
    after = rest.split("<!-- end of table -->")[1]
    return "\n\n".join([f"{before}<!-- table -->", *tables, f"<!-- end of table -->{after}"])


PAGES = {
    HERE / "README.md": lambda recordings: [table(recordings)],
    HERE.parent / "diagnose" / "README.md": lambda recordings: [
        "Seed 0:", confusion(recordings, False),
        "Seeds 1 and 2, held back:", confusion(recordings, True),
    ],
}  # fmt: skip
"""Pages with tables -> the tables, of a folder with recordings."""


def score_of(lines: list[dict[str, float]]) -> list[float]:
    """Return exact match of each step, which is measured also where it is not paid."""
    return [line.get("episode/em", line.get("reward/em", 0.0)) for line in lines]


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "-"
    return f"{fmean(values):.2f}" + (
        f" ({min(values):.2f} to {max(values):.2f})" if len(values) > 1 else ""
    )


def _count_names(lists: list[list[str]]) -> str:
    return (
        ", ".join(
            f"{name} ({n} of {len(lists)})" for name, n in Counter(sum(lists, [])).most_common()
        )
        or "-"
    )


def main() -> None:
    """Add the finished runs to the archive, and write the tables anew."""
    with tempfile.TemporaryDirectory() as temporary:
        recordings = unpack(RECORDINGS, Path(temporary))
        for exhibit in read_exhibits().values():
            for seed in range(3):
                if folder := record(exhibit, seed, recordings):
                    print(folder.name)
        pack(recordings, RECORDINGS)
        for path, tables in PAGES.items():
            path.write_text(page(path.read_text(), *tables(recordings)))


if __name__ == "__main__":
    main()
