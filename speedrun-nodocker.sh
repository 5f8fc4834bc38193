#!/usr/bin/env bash
# Agent-R1 on this machine, from nothing to a trained agent. Read it as the table of contents of the project: each
# stage is one `agent-r1` command, and the room of src/agent_r1 that it lives in is named beside it.
#
#   bash speedrun-nodocker.sh                        the laptop run with PPO
#   bash speedrun-nodocker.sh grpo                   with GRPO
#   bash speedrun-nodocker.sh grpo --preset smoke    the same in about a minute
#   bash speedrun-nodocker.sh --help
#
# A second call skips what is done. No key, no GPU, no sudo, no download but Python packages.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

usage() {
    cat <<'TEXT'
usage: bash speedrun-nodocker.sh [ppo|grpo] [--preset NAME] [--run NAME] [--seed N] [--resume] [--dry-run]
                                 [section.key=value ...]

  ppo|grpo           algorithm (default: ppo)
  --preset NAME      smoke, laptop (default: laptop)
  --run NAME         folder of the run in runs/ (default: PRESET-ALGORITHM)
  --seed N           seed of everything random (default: 0)
  --resume           continue an interrupted run from its newest checkpoint
  --dry-run          print configuration, plan and estimates; start nothing
  section.key=value  any setting, for example trainer.steps=50 actor.lr=5e-4

environment: PYTHON (default: python3.11, python3.12 or python3), AGENT_R1_VENV (default: .venv),
             AGENT_R1_HOME (default: here; where artifacts/ and runs/ go)

examples:
  bash speedrun-nodocker.sh
  bash speedrun-nodocker.sh grpo --preset smoke --seed 3
  bash speedrun-nodocker.sh grpo --run small rollout.prompts_per_step=8
TEXT
}

die() { echo "speedrun: $1" >&2; exit "${2:-1}"; }

# ------------------------------------------------------------------------------------------------------- arguments
preset="" config=() run=() resume=() dry_run=()
while [ $# -gt 0 ]; do
    case "$1" in
        -h|--help) usage; exit 0 ;;
        --preset|--run|--seed)
            [ $# -ge 2 ] || die "$1 needs a value; see --help" 2
            case "$1" in
                --preset) preset=$2 ;;
                --run) run=(--run "$2") ;;
                --seed) config+=(--seed "$2") ;;
            esac
            shift 2 ;;
        --resume) resume=(--resume); shift ;;
        --dry-run) dry_run=(--dry-run); shift ;;
        ppo|grpo|*=*) config+=("$1"); shift ;;
        *) die "unknown argument '$1'; see --help" 2 ;;
    esac
done
if [ -z "$preset" ]; then
    preset=laptop
    if nvidia-smi -L >/dev/null 2>&1; then
        echo "preset laptop (the only full one so far; on this GPU the same code runs in bfloat16)"
    else
        echo "preset laptop, because there is no GPU here; --preset smoke does the same in about a minute"
    fi
fi
config=(--preset "$preset" ${config[@]+"${config[@]}"})

# ----------------------------------------------------------------------------------------------------- environment
# Pinned CPU packages in a virtual environment: about 1.3 GB, of which PyTorch is 0.75.
venv=${AGENT_R1_VENV:-.venv}
installed() {  # this very checkout, and every package at its pinned version
    [ -x "$venv/bin/agent-r1" ] && "$venv/bin/python" - 2>/dev/null <<'PY'
import sys
from importlib.metadata import version
from pathlib import Path

import agent_r1
from agent_r1.doctor import read_pins, same_version

pins = read_pins(Path("requirements/cpu.txt").read_text())
here = Path("src/agent_r1").samefile(Path(agent_r1.__file__).parent)
sys.exit(not (here and all(same_version(version(name), pin) for name, pin in pins.items())))
PY
}
if ! installed; then
    if [ ${#dry_run[@]} -gt 0 ]; then
        echo "environment: to do, pinned packages into $venv (about 1.3 GB); the plan of the run needs them: make install"
        exit 0
    fi
    python=$venv/bin/python
    if [ ! -x "$venv/bin/pip" ]; then  # none yet, or one that was interrupted in the making
        python=${PYTHON:-$(command -v python3.11 || command -v python3.12 || command -v python3 || true)}
    fi
    [ -n "$python" ] || die "no Python found; install Python 3.11 or 3.12, or set PYTHON"
    "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' ||
        die "$("$python" --version 2>&1) is not supported; install Python 3.11 or 3.12, or set PYTHON"
    [ -x "$venv/bin/pip" ] || "$python" -m venv "$venv" ||
        die "cannot make $venv; free space, install python3-venv, or set AGENT_R1_VENV"
    echo "environment: pinned packages into $venv ..."
    begin=$SECONDS
    pip=("$venv/bin/pip" install --quiet --disable-pip-version-check)
    "${pip[@]}" -r requirements/cpu.txt && "${pip[@]}" --no-deps -e . ||
        die "the packages could not be installed (see above); mend the network or free space, then run this again"
    echo "  $((SECONDS - begin)) s, $(du -sh "$venv" | cut -f1) in $venv"
fi
agent="$venv/bin/agent-r1"

if [ ${#dry_run[@]} -gt 0 ]; then
    exec "$agent" train "${config[@]}" ${run[@]+"${run[@]}"} --dry-run
fi
begin=$SECONDS

# ------------------------------------------------------------------------------------------------------------ stages
"$agent" doctor --preset "$preset"                                        # can this machine do it?
"$agent" data "${config[@]}"                                              # 1 data:      questions and passages
"$agent" index "${config[@]}"                                             # 2 search:    passages to a FAISS index
"$agent" cold-start "${config[@]}"                                        # 7 training:  a model that plays badly
"$agent" eval --before "${config[@]}" ${run[@]+"${run[@]}"}               # 9 inference: how badly?
"$agent" train "${config[@]}" ${run[@]+"${run[@]}"} ${resume[@]+"${resume[@]}"}  # 3-7: rollout, reward, advantage, update
"$agent" eval "${config[@]}" ${run[@]+"${run[@]}"}                        # 9 inference: and now?
"$agent" report "${config[@]}" ${run[@]+"${run[@]}"}                      # inspect:     curves and transcripts
echo "done in $((SECONDS - begin)) s"
