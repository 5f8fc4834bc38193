#!/usr/bin/env bash
# The race of docs/algorithms.md: each estimator from the cold start of its seed, read against episodes and against seconds.
#   bash benchmarks/race.sh                                five seeds for grpo, ppo and steppo, three for the others
#   bash benchmarks/race.sh --only rloo trainer.threads=1  one arm, with settings; runs that are finished are only read
#   PRESET=smoke SEEDS=0 bash benchmarks/race.sh           one seed of each, in small
set -euo pipefail
cd "$(dirname "$0")/.."
arms="grpo ppo steppo rloo reinforce++ reinforce++-baseline remax gigpo" preset=${PRESET:-laptop}
if [ "${1:-}" = --only ]; then arms=${2:?"--only needs the name of an arm: $arms"}; shift 2; fi
bin=${AGENT_R1_VENV:-.venv}/bin
for arm in $arms; do
    case $arm in grpo|ppo|steppo) seeds=${SEEDS:-0 1 2 3 4} ;; *) seeds=${SEEDS:-0 1 2} ;; esac
    for seed in $seeds; do
        options=(--preset "$preset" --seed "$seed" "$arm" "$@")
        for command in data index cold-start; do "$bin/agent-r1" $command "${options[@]}"; done
        "$bin/agent-r1" train "${options[@]}" --run "race-$preset-$arm-s$seed" --plain --resume
        "$bin/agent-r1" eval "${options[@]}" --run "race-$preset-$arm-s$seed"
    done
done
"$bin/python" benchmarks/race.py "race-$preset-"
