#!/usr/bin/env bash
# Both sides in turn, on a quiet machine, then one table. Options go to both (see `run.py --help`).
#
#   bash benchmarks/trl_compare/compare.sh --steps 30 --eval 500
#   ROUNDS=3 THREADS=2 bash benchmarks/trl_compare/compare.sh --steps 10
#   SEEDS="0 1 2" TRL_ROWS=4 bash benchmarks/trl_compare/compare.sh --preset pocket --steps 1 --warmup 1
#
# Each of SEEDS has its own ROUNDS. TRL_ROWS is the number of TRL's rows in a pass.
# Needs: data, index and cold start of the preset and of each seed (README.md), and setup.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
here=benchmarks/trl_compare
threads=${THREADS:-2}
export PYTHONPATH=src:benchmarks OMP_NUM_THREADS=$threads HF_HUB_OFFLINE=1

lines=$(mktemp)
trap 'rm -f "$lines"' EXIT
# Alternating rounds, so that other load on the machine affects both sides equally.
for seed in ${SEEDS:-0}; do
    for _ in $(seq "${ROUNDS:-1}"); do
        both=(--threads "$threads" --seed "$seed" "$@")
        "${OUR_VENV:-.venv}/bin/python" benchmarks/step_time.py "${both[@]}" | tee -a "$lines"
        "${TRL_VENV:-$here/.venv}/bin/python" $here/run.py ${TRL_ROWS:+--rows-per-pass "$TRL_ROWS"} "${both[@]}" | tee -a "$lines"
    done
done
grep '^{' "$lines" > $here/results.jsonl
"${OUR_VENV:-.venv}/bin/python" $here/table.py $here/results.jsonl
