#!/usr/bin/env bash
# What the action mask is for: GRPO on the laptop task, three arms from one cold start.
#   masked                the loss sees sampled tokens only (the default)
#   tool tokens           tool results are in the loss too, as if the policy had written them
#   tool tokens, agent n  the same, but divided by the number of sampled tokens only: this separates the effect of the
#                         tokens from the effect of their number (a larger denominator shrinks every gradient)
#   bash benchmarks/ablation.sh "0 1"        seeds
set -euo pipefail
cd "$(dirname "$0")/.."
agent=${AGENT_R1_VENV:-.venv}/bin/agent-r1
runs=()
for seed in ${1:-0}; do
    for arm in masked tool-tokens tool-tokens-agent-n; do
        case $arm in
            masked) settings=() ;;
            tool-tokens) settings=(actor.mask_tool_tokens=false) ;;
            tool-tokens-agent-n) settings=(actor.mask_tool_tokens=false actor.ablation_normalizer=agent) ;;
        esac
        options=(--preset laptop --seed "$seed" grpo trainer.steps=40 ${settings[@]+"${settings[@]}"})
        for command in data index cold-start; do "$agent" $command "${options[@]}"; done
        run=(--run "ablation-$arm-s$seed")
        "$agent" eval --before "${options[@]}" "${run[@]}"
        "$agent" train --plain --resume "${options[@]}" "${run[@]}"
        "$agent" eval "${options[@]}" "${run[@]}"
        runs+=("ablation-$arm-s$seed")
    done
done
"${AGENT_R1_VENV:-.venv}/bin/python" benchmarks/summary.py "${runs[@]}"
