# shellcheck shell=bash
#
# Prepare speedrun-nodocker.sh, which sources this file: options, an environment with the pinned packages, and with GPUs a
# search service.
#
# In: the command line. Out: `stage` and `run_stages`; `config`, the arguments of every stage; `check_gpus`; `start_search`,
# which sets `run`, the arguments of the stages of a run; `preset`, `resume`.
#
# shellcheck disable=SC2034  # the script uses them

usage() {
    cat <<'TEXT'
usage: bash speedrun-nodocker.sh [ALGORITHM] [--preset NAME | --recipe FOLDER] [--run NAME] [--seed N] [--resume]
                                 [--dry-run] [--search-server] [--no-check] [section.key=value ...]

  ALGORITHM          grpo (default), ppo, rloo, reinforce++, reinforce++-baseline, remax, steppo or gigpo
                     (docs/algorithms.md)
  --preset NAME      discover, smoke, small, tinymath, hotpotqa-tiny: on a CPU; hotpotqa-*, search-r1-3b, gsm8k, dapo-math: on GPUs
                     (default: what fits the GPUs here and their driver; without a GPU that can train, discover)
  --recipe FOLDER    your own recipe (`agent-r1 new` writes one), or the name of one in recipes/; instead of --preset
  --run NAME         folder of the run in runs/ (default: PRESET-ALGORITHM)
  --seed N           random seed of all stages (default: 0)
  --resume           continue an interrupted run from its newest checkpoint
  --dry-run          print configuration, plan and estimates; start nothing
  --search-server    hold the index once, in a service on 127.0.0.1:8100, instead of in every process that searches
                     (always so with a GPU preset, unless search.url=... names your own service)
  --no-check         with GPUs: skip `agent-r1 gpu-check`, which tests verl for about ten minutes
  section.key=value  any setting, for example trainer.steps=50 actor.lr=5e-4

environment: PYTHON (default: python3.11, python3.12 or python3; for GPUs python3.12)
             AGENT_R1_STACK (cpu or gpu: which packages; default: gpu for a GPU preset, cpu for others)
             AGENT_R1_VENV (default: .venv, or .venv-gpu: the two need different versions of PyTorch)
             AGENT_R1_HOME (folder of artifacts/ and runs/; default: here)
             AGENT_R1_SEARCH_HOST (address of the search service, for agents on other machines; default: 127.0.0.1)
             AGENT_R1_PREFLIGHT=no (skip the checks of driver, libraries and disk before packages for GPUs are installed)
             WANDB_API_KEY, HF_TOKEN (both optional)

examples:
  bash speedrun-nodocker.sh
  bash speedrun-nodocker.sh grpo --preset smoke --seed 3
  bash speedrun-nodocker.sh grpo --preset hotpotqa-4xh100 --dry-run
  bash speedrun-nodocker.sh grpo --run few-questions rollout.prompts_per_step=8
TEXT
}

me=speedrun
source requirements/packages.sh

# ------------------------------------------------------------------------------------------------------- arguments
preset="" search="" check=yes resume="" config=() run=() dry_run=()
while [ $# -gt 0 ]; do
    case "$1" in --preset=*|--recipe=*|--run=*|--seed=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;; esac
    case "$1" in
        -h|--help) usage; exit 0 ;;
        --preset|--recipe|--run|--seed)
            [ $# -ge 2 ] || die "$1 needs a value; see --help" 2
            case "$1" in
                --recipe) preset=$(tr _ - <<<"$2")  # as src/agent_r1/config/recipes.py resolves it
                          [ ! -d "$2" ] || preset=${2%/}/preset.yaml
                          [ ! "$2" -ef "recipes/$(basename "$2")" ] || preset=$(basename "$2" | tr _ -) ;;
                --preset) preset=$2 ;;
                --run) run=(--run "$2") ;;
                --seed) config+=(--seed "$2") ;;
            esac
            shift 2 ;;
        --resume) resume=--resume; shift ;;
        --dry-run) dry_run=(--dry-run); shift ;;
        --search-server) search=ours; shift ;;
        --no-check) check=""; shift ;;
        search.url=?*) search=theirs; config+=("$1"); shift ;;
        [!-]*=*) config+=("$1"); shift ;;
        *)  # the name of an algorithm, each of which has a heading in a table of names
            known=$(sed -n 's/^\[estimator\.\(.*\)\].*/\1/p' src/agent_r1/config/names.toml recipes/*/recipe.toml | tr -d '"')
            # shellcheck disable=SC2086  # one word each
            grep -qxF -- "$1" <<<"$known" || die "unknown argument '$1'$(nearest "${1%%=*}" $known \
                --preset --recipe --run --seed --resume --dry-run --search-server --no-check --help); see --help" 2
            config+=("$1"); shift ;;
    esac
done

# ----------------------------------------------------------------------------------------------------- environment
# Pinned packages in a virtual environment. A CPU's are about 1.7 GB, of which PyTorch is 0.75; a GPU's several times that.
case "$preset" in
    *.yaml|*.yml) [ -f "$preset" ] || die "there is no preset file $preset; see --help" 2 ;;
    ?*) presets=$(for file in recipes/*/*.yaml; do  # a recipe's preset.yaml has the recipe's name
            case "$file" in */preset.yaml) basename "$(dirname "$file")" | tr _ - ;; *) basename -s .yaml "$file" ;; esac
        done)
        if ! grep -qx -- "$preset" <<<"$presets"; then  # reported before minutes of installing
        # shellcheck disable=SC2086  # one word each
        die "unknown preset '$preset'$(nearest "$preset" $presets); choose from ${presets//$'\n'/ }" 2
    fi ;;
esac

is_tiny() { case "$preset" in discover|smoke|small|*tiny*) ;; *) false ;; esac; }

preset_value() {  # preset_value PRESET SED-PATTERN: print the value that the preset has, or the first that it extends
    local name=$1 file value
    while [ -n "$name" ]; do
        for file in "$name" recipes/*/"$name.yaml" "recipes/$(tr - _ <<<"$name")/preset.yaml"; do
            [ ! -f "$file" ] || break
        done
        [ -f "$file" ] || return 0
        value=$(sed -n "s/^$2.*/\\1/p" "$file")
        [ -z "$value" ] || { echo "$value"; return; }
        name=$(sed -n 's/^extends: *\([^ #]*\).*/\1/p' "$file")
    done
}
trains_with_verl() { [ "$(preset_value "$1" 'engine: *\([a-z]*\)')" = verl ]; }

choose_preset() {  # by name, memory and driver of the GPUs, before anything is downloaded
    local choice words
    preset=discover
    if [ "$stack" = cpu ]; then
        echo "preset discover, for a CPU; --preset smoke is a shorter run"
        return
    fi
    choice=$("${PYTHON:-python3}" src/agent_r1/ground/preflight.py --choose 2>/dev/null) ||
        choice="discover cpu"$'\n'"because ${PYTHON:-python3} cannot look for GPUs here"
    read -r -a words <<<"${choice%%$'\n'*}"
    preset=${words[0]} stack=${stack:-${words[1]}} setting=${words[2]:-}
    # A card that the user names is the user's word.
    case " ${config[*]-} " in *" verl.gpu="*) setting="" ;; esac
    [ -z "$setting" ] || config+=("$setting")
    echo "preset $preset${setting:+ with $setting}, ${choice#*$'\n'}"
}

stack=${AGENT_R1_STACK:-}
if [ -z "$preset" ]; then
    choose_preset
elif [ -z "$stack" ] && trains_with_verl "$preset"; then
    if nvidia-smi -L >/dev/null 2>&1; then
        stack=gpu
    else
        none_here="the preset $preset needs GPUs of NVIDIA, and nvidia-smi finds none here"
        [ ${#dry_run[@]} -gt 0 ] ||  # a plan can be made on any machine
            die "$none_here; --dry-run prints its plan, and AGENT_R1_STACK=gpu installs its packages all the same"
        echo "$none_here"
    fi
fi
stack=${stack:-cpu}
choose_packages
hub_model=""
if [ "$stack" = gpu ] && [ "${HF_HUB_OFFLINE:-0}" != 1 ]; then
    hub_model=$(preset_value "$preset" 'model: *{.*path: *\([^ ,}]*\)')
    for word in ${config[@]+"${config[@]}"}; do
        case "$word" in model.path=*) hub_model=${word#*=} ;; esac
    done
    hub_model=${hub_model%%@*}  # without a revision
    case "$hub_model" in */*:*|/*|.*) hub_model="" ;; */*) ;; *) hub_model="" ;; esac  # a folder, or a package
fi

if ! pinned "$requirements"; then
    if [ ${#dry_run[@]} -gt 0 ]; then
        echo "environment: to do, install $requirements into $venv. The plan requires it: run this without --dry-run," \
            "or 'make install' on a CPU"
        exit 0
    fi
    make_environment
fi
if [ "$preset" = pocket ] && [ ${#dry_run[@]} = 0 ] && ! pinned requirements/pocket.txt; then
    install "requirements/pocket.txt (readers of pretrained weights)" -r requirements/pocket.txt
fi

config=(--preset "$preset" ${config[@]+"${config[@]}"})

if [ ${#dry_run[@]} -gt 0 ]; then
    exec "$agent" train "${config[@]}" ${run[@]+"${run[@]}"} --dry-run
fi

# ---------------------------------------------------------------------------------------------------------- stages
# Starting Python and PyTorch takes up to two seconds. So the stages of a tiny model are collected, and run in one process.
# Those of others run one by one, because a process that has ended holds no memory.
stages=()
stage() {
    stages+=(${stages[@]+then} "$@")
    if [ "$stack" = gpu ] || ! is_tiny; then run_stages; fi
}
run_stages() {
    [ ${#stages[@]} -gt 0 ] || return 0
    # The hours of trainer.max_hours count from here, also for a training that is resumed below.
    [ "${stages[0]}" != train ] || { AGENT_R1_FIRST_START=$(date +%s); export AGENT_R1_FIRST_START; }
    "$agent" "${stages[@]}" || resume_after_hang $?
    stages=()
}

resume_after_hang() {  # once, and only a training in which nothing moved (exit code 75): its last checkpoint is sound
    [ "$1" = 75 ] && [ "${stages[0]}" = train ] && [ -z "${resumed:-}" ] || exit "$1"
    resumed=yes
    echo "speedrun: training hung, see above; it is resumed once, from its newest checkpoint ..."
    [[ " ${stages[*]} " == *" --resume "* ]] || stages+=(--resume)
    "$agent" "${stages[@]}" || exit $?
}

# ------------------------------------------------------------------------------------------------------- GPU check
check_gpus() { [ "$stack" != gpu ] || [ -z "$check" ] || "$agent" gpu-check "${config[@]}"; }

# -------------------------------------------------------------------------------------------------- search service
# 5 million passages fit into memory once, not once per process that runs episodes. So one process holds them, and all
# others query it, from the first evaluation to the last.
answers() { "$venv/bin/python" -c "import httpx; httpx.get('$1/health', trust_env=False).raise_for_status()" 2>/dev/null; }

start_search() {  # if one is wanted
    search_service
    run=("${config[@]}" ${run[@]+"${run[@]}"})
}

search_service() {
    case "$stack$search" in gpu|*ours) ;; *) return ;; esac  # not wanted, or the user has one
    case "$preset" in gsm8k|dapo-math) return ;; esac         # no tool searches
    local host=${AGENT_R1_SEARCH_HOST:-127.0.0.1} log=${AGENT_R1_HOME:-.}/artifacts/search-server.log
    local url=http://$host:8100
    run_stages  # the service needs the index
    ! answers "$url" || die "a search service already runs at $url; stop it, or use it with search.url=$url"
    echo "search: one service for all, at $url (log in $log) ..."
    # In its own session, because Ctrl-C is for the trainer, which may finish its step. The trap ends both. Without
    # GPUs: its encoder would take memory from vLLM and the trainer, and a query is fast on a CPU.
    CUDA_VISIBLE_DEVICES='' setsid "$agent" search-server "${config[@]}" --host "$host" --port 8100 >"$log" 2>&1 </dev/null &
    server=$!
    trap 'kill "$server" 2>/dev/null && wait "$server" || true' EXIT
    trap : HUP  # if the connection breaks, the trainer finishes its step, and needs the service for that
    until answers "$url"; do
        kill -0 "$server" 2>/dev/null || die "the search service ended; $(tail -n 1 "$log")"
        sleep 0.2
    done
    config+=("search.url=$url")
}
