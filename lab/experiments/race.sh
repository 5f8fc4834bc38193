#!/usr/bin/env bash
# Race the estimators of docs/lab/estimators.md, each from the cold start of its seed, by episodes and by seconds.
#   bash lab/experiments/race.sh trainer.threads=1              five seeds for grpo, ppo and steppo, three for the others
#   bash lab/experiments/race.sh --only rloo,gigpo              some arms; finished runs are skipped, interrupted ones continue
#   PRESET=small SEEDS="0 1" bash lab/experiments/race.sh       another preset, these seeds (by turns: first all arms of seed 0)
# Afterwards docs/lab/race/PRESET.json holds the curves of these runs, and those of runs made on other machines.
set -euo pipefail
cd "$(dirname "$0")/../.."
arms="grpo ppo steppo rloo reinforce++ reinforce++-baseline remax gigpo" preset=${PRESET:-laptop}
if [ "${1:-}" = --only ]; then arms=${2:?"--only needs names of arms, with commas between them: $arms"}; arms=${arms//,/ }; shift 2; fi
bin=${AGENT_R1_VENV:-.venv}/bin
for seed in ${SEEDS:-0 1 2 3 4}; do
    for arm in $arms; do
        case $arm in grpo|ppo|steppo) ;; *) [ -n "${SEEDS:-}" ] || [ "$seed" -lt 3 ] || continue ;; esac
        run=race-$preset-$arm-s$seed
        [ ! -e "${AGENT_R1_HOME:-.}/runs/$run/eval.json" ] || continue
        # Often validated, which costs time and changes no weight. All arms of a seed share its data, index and cold start.
        options=(--preset "$preset" --seed "$seed" --run "$run" "$arm" trainer.eval_every=2 "$@")
        "$bin/agent-r1" train "${options[@]}" --plain --resume
        "$bin/agent-r1" eval "${options[@]}"
        "$bin/python" lab/experiments/race.py "$preset" > /dev/null
    done
done
"$bin/python" lab/experiments/race.py "$preset"
