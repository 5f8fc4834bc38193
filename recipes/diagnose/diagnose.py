"""Say why a run does not learn: `agent-r1 diagnose FOLDER`.

In: a folder of Agent-R1, TRL, verl or verifiers (`files.py`). Out: symptoms, and likely causes with
their evidence (`causes.py`).
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from agent_r1 import command, option, say

CANNOT = (
    "a KL term that is computed and not applied, and updates that are too many without a collapse",
    "text that was encoded again, where ids are not recorded",
    "leaked test questions: compare with questions that were written after training",
    "a wrong recursion of GAE: compare advantages by hand (recipes/museum)",
    "a reward that measures something else than you want, as long as it differs from answer to "
    "answer",
)
"""What the files do not show."""


@command(
    "diagnose", "explain why a run does not learn: flat, collapsed, or without tool calls",
    ["runs/small-grpo", "trl-output          # TRL, with log_completions=True", "rollout_data_dir  "
        "  # verl",
     "outputs/evals       # verifiers"],
    option("folder", type=Path, metavar="FOLDER", help="a run of Agent-R1, TRL, verl or verifiers"),
)  # fmt: skip
def diagnose(a: Namespace) -> None:
    from agent_r1_recipes.diagnose.causes import findings, symptoms
    from agent_r1_recipes.diagnose.files import read_evidence

    evidence = read_evidence(a.folder)
    say(f"{evidence.source}: {len(evidence.lines):,} steps, {evidence.episode_count}")
    for symptom in symptoms(evidence):
        say(f"  {symptom}")
    causes = findings(evidence)
    for number, sign in enumerate(causes, 1):
        certainty = "certain" if sign.is_proof else "likely"
        say(f"\n{number}. {sign.cause.name} ({certainty})")
        say(f"   seen: {sign.evidence}\n   try:  {sign.cause.remedy}")
    if not causes:
        print("\nthese files show no known cause. They cannot show:")
        for limit in CANNOT:
            say(f"  - {limit}")
