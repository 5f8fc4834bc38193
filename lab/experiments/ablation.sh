#!/usr/bin/env bash
# What the action mask is for: GRPO with lab/laptop.yaml, three arms from the same cold start, for each seed.
#   masked                the loss sees sampled tokens only, as always
#   tool-tokens           tool results are in the loss too, as if the policy had written them (ablation.py)
#   tool-tokens-agent-n   the same, but divided by the number of sampled tokens only: this separates the effect of the
#                         tokens from the effect of their number (a larger denominator shrinks every gradient)
#   bash lab/experiments/ablation.sh "0 1 2" trainer.threads=1        seeds, each with a cold start of its own; settings
set -euo pipefail
cd "$(dirname "$0")/../.."
seeds=${1:-0 1 2} preset=${PRESET:-lab/laptop.yaml}
shift $(( $# > 0 ? 1 : 0 ))
bin=${AGENT_R1_VENV:-.venv}/bin
runs=()
for seed in $seeds; do
    options=(--preset "$preset" --seed "$seed" grpo trainer.steps=40 "$@")
    for command in data index cold-start; do "$bin/agent-r1" $command "${options[@]}"; done
    for arm in masked tool-tokens tool-tokens-agent-n; do
        run=("${options[@]}" --run "ablation-$arm-s$seed")
        train=("$bin/python" lab/experiments/ablation.py "$arm")
        [ "$arm" != masked ] || train=("$bin/agent-r1")
        "$bin/agent-r1" eval --before "${run[@]}"
        "${train[@]}" train --plain --resume "${run[@]}"
        "$bin/agent-r1" eval "${run[@]}"
        runs+=("ablation-$arm-s$seed")
    done
done
"$bin/python" lab/experiments/summary.py "${runs[@]}"
