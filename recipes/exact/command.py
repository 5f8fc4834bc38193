"""Run `agent-r1 exact`: the exact truth of an agent, or of its estimators.

In: the command line. Out: tables in the terminal, and files on request. `plays` is about one agent
(`report.py`), `table` and `score` are about estimators (`table.py`).
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from agent_r1 import ConfigError, command, option

ACTIONS = ("plays", "table", "score")


@command(
    "exact", "enumerate an agent's plays: its exact chance of success, and each estimator's bias",
    [
        "                                # the newest run: success, pass@k, entropy by hop",
        "plays --run smoke-grpo --step 0 --questions 40 --mass .99",
        "plays --run smoke-grpo --step 0 --guide 30        # a rare success, by a later checkpoint",
        "plays --run smoke-grpo --show 3 --gradient        # V, Q of each turn; the true gradient",
        "table                           # a row per estimator, in the world Stop",
        "table --run smoke-grpo grpo rloo --latex table.tex --figure table.svg",
        "score mine.py:mine              # is your own estimator biased?",
    ],
    option("settings", nargs="*", metavar="plays|table|score|ESTIMATOR|section.key=value",
           help="what to do (default: plays), estimators by name or as FILE.py:NAME (default: "
           "all), and settings"),
    option("--run", help="use a run's last checkpoint (default: the newest run; table: the world "
           "Stop)"),
    option("--step", type=int, help="the run's checkpoint of this step; 0: the start model"),
    option("--checkpoint-dir", type=Path, metavar="DIR", help="a checkpoint folder"),
    option("--model", metavar="PATH", help="a model folder"),
    option("--preset", help="preset of the world (default: the model's own)"),
    option("--mass", type=float, default=0.95, metavar="SHARE",
           help="share of the probability to enumerate (default: .95; the tail is heavy)"),
    option("--questions", type=int, default=20, metavar="N", help="questions (default: 20)"),
    option("--split", default="test", choices=("train", "val", "test"), help="default: test"),
    option("--seed", type=int, default=0, help="of questions and samples (default: 0)"),
    option("--samples", type=int, default=32, metavar="N",
           help="sampled plays of each question's rest (default: 32; 0: strict intervals only)"),
    option("--max-tokens", type=int, default=30_000, metavar="N",
           help="tokens that the model reads for a question, at most (default: 30000)"),
    option("--range", type=float, nargs=2, metavar=("LEAST", "MOST"),
           help="least and largest reward of any play (default: from env.format_penalty and "
           "so on)"),
    option("--guide", type=int, metavar="STEP",
           help="plays: a checkpoint of the run that succeeds more often, to find rare successes"),
    option("--show", type=int, metavar="N", help="plays: V and Q of each turn of question N"),
    option("--gradient", action="store_true", help="plays: the true gradient, by hop"),
    option("--batches", type=int, default=200, metavar="N",
           help="table, score: sampled batches of each estimator (default: 200)"),
    option("--json", type=Path, metavar="FILE", help="also write everything to a file"),
    option("--latex", type=Path, metavar="FILE", help="table: also write it in LaTeX"),
    option("--figure", type=Path, metavar="FILE", help="table: also draw it (SVG or PDF)"),
)  # fmt: skip
def exact(a: Namespace) -> int | None:
    """Run the command. `score` returns 1 for a biased estimator."""
    words = list(a.settings or [])
    action = words.pop(0) if words and words[0] in ACTIONS else ACTIONS[0]
    a.overrides = [word for word in words if "=" in word]
    a.estimators = [word for word in words if "=" not in word]
    _check(a, action)
    if action == "plays":
        from agent_r1_recipes.exact.report import report_plays

        return report_plays(a)
    from agent_r1_recipes.exact.table import report_table, score

    return report_table(a) if action == "table" else score(a)


def _check(a: Namespace, action: str) -> None:
    """Raise ConfigError for options that do not fit together."""
    if not 0 < a.mass <= 1:
        raise ConfigError(
            f"--mass {a.mass:g} is a share of the probability, above 0 and at most 1",
            code="out_of_range",
        )
    if min(a.questions, a.batches, a.max_tokens) < 1 or a.samples < 0:
        raise ConfigError(
            "--questions, --batches and --max-tokens are at least 1, and --samples at least 0",
            code="out_of_range",
        )
    if action == "plays" and a.estimators:
        raise ConfigError(
            f"agent-r1 exact plays takes no estimator, and got {a.estimators[0]!r}; for a row of "
            "the table: agent-r1 exact table NAME",
            code="unknown_name",
        )
    if action == "score" and not a.estimators:
        raise ConfigError(
            "agent-r1 exact score names an estimator, such as grpo or mine.py:mine",
            code="missing_name",
        )
