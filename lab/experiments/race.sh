#!/usr/bin/env bash
# Race the estimators of docs/lab/estimators.md (`agent-r1 race`), and make the table and the picture of all finished runs.
#   bash lab/experiments/race.sh trainer.threads=1              three seeds of all arms; finished runs are read, interrupted ones continue
#   bash lab/experiments/race.sh --only rloo,gigpo              some arms, and grpo
#   PRESET=small SEEDS=5 bash lab/experiments/race.sh           another preset, five seeds
# Afterwards docs/lab/race/PRESET.json holds the curves of these runs, and those of runs made on other machines.
set -euo pipefail
cd "$(dirname "$0")/../.."
arms="ppo steppo rloo reinforce++ reinforce++-baseline remax gigpo" preset=${PRESET:-lab/laptop.yaml}
if [ "${1:-}" = --only ]; then arms=${2:?"--only needs names of arms, with commas between them: $arms"}; arms=${arms//,/ }; shift 2; fi
bin=${AGENT_R1_VENV:-.venv}/bin
# Often validated, which costs time and changes no weight.
# shellcheck disable=SC2086  # the arms are words
"$bin/agent-r1" race grpo $arms --preset "$preset" --seeds "${SEEDS:-3}" trainer.eval_every=2 "$@"
"$bin/python" lab/experiments/race.py "$(basename "$preset" .yaml)"
