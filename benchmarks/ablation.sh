#!/usr/bin/env bash
# What the action mask is for: GRPO on the laptop task, three arms from the same cold start, for each seed.
#   masked                the loss sees sampled tokens only (the default)
#   tool tokens           tool results are in the loss too, as if the policy had written them
#   tool tokens, agent n  the same, but divided by the number of sampled tokens only: this separates the effect of the
#                         tokens from the effect of their number (a larger denominator shrinks every gradient)
#   bash benchmarks/ablation.sh "0 1 2" trainer.threads=1        seeds, each with a cold start of its own; settings
set -euo pipefail
cd "$(dirname "$0")/.."
seeds=${1:-0 1 2} preset=${PRESET:-laptop}
shift $(( $# > 0 ? 1 : 0 ))
agent=${AGENT_R1_VENV:-.venv}/bin/agent-r1
runs=()
for seed in $seeds; do
    options=(--preset "$preset" --seed "$seed" grpo trainer.steps=40 "$@")
    for command in data index cold-start; do "$agent" $command "${options[@]}"; done
    for arm in masked tool-tokens tool-tokens-agent-n; do
        case $arm in
            masked) settings=() ;;
            tool-tokens) settings=(actor.mask_tool_tokens=false) ;;
            tool-tokens-agent-n) settings=(actor.mask_tool_tokens=false actor.ablation_normalizer=agent) ;;
        esac
        run=("${options[@]}" ${settings[@]+"${settings[@]}"} --run "ablation-$arm-s$seed")
        "$agent" eval --before "${run[@]}"
        "$agent" train --plain --resume "${run[@]}"
        "$agent" eval "${run[@]}"
        runs+=("ablation-$arm-s$seed")
    done
done
"${AGENT_R1_VENV:-.venv}/bin/python" benchmarks/summary.py "${runs[@]}"
