#!/usr/bin/env bash
# Race methods to three hops in TinyHop (`agent-r1 race`); the tables are in docs/answer-key.md#then-train-with-them.
#   bash lab/experiments/tinyhop_race.sh tune                          grpo: each setting; then screen, final
#   bash lab/experiments/tinyhop_race.sh final --first-seed 205 --seeds 1      one pair, so that two processes can share a race
#   bash lab/experiments/tinyhop_race.sh final --report --json docs/lab/race/tinyhop-final.json     compare the finished runs
# All arms of a seed have one start, and 4,608 episodes. Validation asks 160 questions, 40 of them with three hops.
set -euo pipefail
cd "$(dirname "$0")/../.."
stage=${1:?"name a stage: tune, screen or final"}
shift
case $stage in
tune)
  # Seed 101 of the first four ran before (docs/lab/race/tinyhop-trials.json), with 60 test questions and the same others.
  seeds=(--first-seed 101 --seeds 2)
  arms=(
    grpo
    grpo+actor.lr=5e-4
    grpo+actor.lr=5e-4+actor.lr_final=1
    grpo+actor.lr=5e-4+actor.entropy_coef=0.01
    grpo+actor.lr=5e-4+rollout.prompts_per_step=12+rollout.samples_per_prompt=16
    grpo+actor.lr=5e-4+rollout.prompts_per_step=12+trainer.eval_every=6
  )
  ;;
*)
  echo "no stage $stage: name tune, screen or final" >&2
  exit 2
  ;;
esac
"${AGENT_R1_VENV:-.venv}/bin/agent-r1" race "${arms[@]}" --preset smoke --episodes 4608 "${seeds[@]}" --stair '3-hop>=.3' \
  'data.train_mix={"1-hop": 0.1, "2-hop": 0.4, "3-hop": 0.5}' data.val=160 data.test=20 cold_start.probe=0 \
  trainer.eval_every=3 trainer.threads=1 "$@"
