#!/usr/bin/env bash
# A preset over several seeds, one after another, and a table: final EM, mean and worst, wall time.
#   bash lab/experiments/seeds.sh grpo            seeds 0 to 4
#   bash lab/experiments/seeds.sh ppo "0 1 2" trainer.steps=50
set -euo pipefail
cd "$(dirname "$0")/../.."
algorithm=${1:-grpo} seeds=${2:-0 1 2 3 4} preset=${PRESET:-lab/laptop.yaml}
shift $(( $# > 2 ? 2 : $# ))
agent=${AGENT_R1_VENV:-.venv}/bin/agent-r1
runs=()
for seed in $seeds; do
    run="bench-$(basename "$preset" .yaml)-$algorithm-s$seed"
    options=(--preset "$preset" --seed "$seed" "$algorithm" "$@")
    begin=$SECONDS
    for command in data index cold-start; do "$agent" $command "${options[@]}"; done
    "$agent" eval --before "${options[@]}" --run "$run"
    "$agent" train "${options[@]}" --run "$run" --plain --resume
    "$agent" eval "${options[@]}" --run "$run"
    "$agent" report --run "$run"
    echo "seed $seed: $((SECONDS - begin)) s in all"
    runs+=("$run")
done
"${AGENT_R1_VENV:-.venv}/bin/python" lab/experiments/summary.py "${runs[@]}"
