#!/usr/bin/env bash
# Run the stages of speedrun-nodocker.sh in an image built from ./Dockerfile. Same options, same files in runs/ and
# artifacts/, owned by you. It needs Docker and, for GPUs, nvidia-container-toolkit; no key, no sudo, no terminal.
#
#   ./speedrun.sh grpo --preset hotpotqa-4xh100 --dry-run
#   ./speedrun.sh grpo
#   ./speedrun.sh --help
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

main() {
    help_if_asked "$@"
    choose_stack "$@"      # packages for GPUs or for a CPU, as speedrun-nodocker.sh would install here
    check_docker           # does it answer, is it rootless, can it use the GPUs?
    check_cards "$@"       # can the packages use these GPUs with this driver?
    get_image "$@"         # AGENT_R1_IMAGE, or one built here; a changed source rebuilds only the last layers
    use_older_driver       # CUDA's compatibility libraries, if the cards need them
    share_folders "$@"     # runs/, artifacts/, files in settings, the caches of models and compiled kernels
    run_stages             # speedrun-nodocker.sh in a container, with your user id
}

die() { echo "speedrun: $1" >&2; exit "${2:-1}"; }
without="or do without Docker: bash speedrun-nodocker.sh"

help_if_asked() {
    case " $* " in
        *" -h "*|*" --help "*)
            echo "Runs in Docker, in an image that is built here, or in the existing image AGENT_R1_IMAGE. All else is as in:"
            echo
            exec bash speedrun-nodocker.sh --help ;;
    esac
}

# CUDA 13 needs driver 580. The image has libraries with which data-centre cards work with an older one.
compat=/usr/local/cuda/compat

choose_stack() {  # a dry run without an environment checks the options and names the packages to install
    local said
    said=$(AGENT_R1_IMAGE_COMPAT=$compat AGENT_R1_VENV=/nonexistent bash speedrun-nodocker.sh --dry-run "$@")
    case "$said" in
        *verl-gpu.txt*) stack=gpu gpus=(--gpus all) ;;
        *) stack=cpu gpus=() ;;
    esac
    case "$said" in
        *" needs GPUs of NVIDIA"*) [[ " $* " == *" --dry-run "* ]] || die "${said%%$'\n'*}; --dry-run prints its plan" ;;
        # Why no GPU is used; the container cannot tell, because it sees none.
        "preset "*" on the CPU, "*) [ "$stack" = gpu ] || echo "${said%%$'\n'*}" ;;
    esac
}

check_docker() {
    local said
    command -v docker >/dev/null || die "there is no Docker; install it, $without"
    said=$(docker info --format '{{.SecurityOptions}} {{json .Runtimes}}' 2>&1) ||
        die "Docker does not answer (${said##*$'\n'}); start its daemon, join its group, $without"
    # In rootless Docker, root in the container is your user on the host.
    # It may not raise the limit of locked memory.
    case "$said" in
        *rootless*) user=0:0 limits=() ;;
        *) user=$(id -u):$(id -g) limits=(--ulimit memlock=-1) ;;
    esac
    if [ "$stack" = gpu ] && [[ "$said" != *nvidia* ]] && ! command -v nvidia-container-cli nvidia-ctk >/dev/null; then
        die "Docker cannot reach the GPUs; install nvidia-container-toolkit and restart Docker, $without"
    fi
}

check_cards() {  # before 11 GB are built; a host without Python is judged by `agent-r1 doctor` in the container
    found=""
    if [ "$stack" = cpu ] || [ "${AGENT_R1_PREFLIGHT:-}" = no ] || ! command -v python3 >/dev/null; then return; fi
    found=$(AGENT_R1_IMAGE_COMPAT=$compat python3 src/agent_r1/ground/preflight.py --cards) || {
        echo "$found"
        [[ " $* " == *" --dry-run "* ]] ||
            die "the GPU packages cannot use these GPUs (see above); AGENT_R1_PREFLIGHT=no skips this check"
    }
}

use_older_driver() {
    local path
    [[ "$found" == *"with CUDA's compatibility libraries"* ]] || return 0
    # In front of the image's own path, which `-e` replaces.
    path=$(docker image inspect --format '{{range .Config.Env}}{{println .}}{{end}}' "$image" 2>/dev/null |
        sed -n 's/^LD_LIBRARY_PATH=//p')
    gpus+=(-e "LD_LIBRARY_PATH=$compat${path:+:$path}")
}

get_image() {
    image=${AGENT_R1_IMAGE:-agent-r1:$stack}
    local get="docker build -t $image --build-arg STACK=$stack ." here=""
    [ -z "${AGENT_R1_IMAGE:-}" ] || get="docker pull $image"
    ! docker image inspect "$image" >/dev/null 2>&1 || here=yes
    if [[ " $* " == *" --dry-run "* ]] && [ -z "$here" ]; then
        echo "image: to do, $image; the plan requires it: $get"
        exit 0
    elif [ -z "${AGENT_R1_IMAGE:-}" ]; then
        docker build --tag "$image" --build-arg STACK="$stack" --build-arg PIP_EXTRA_INDEX_URL . ||
            die "the image could not be built (see above); $without"
    elif [ -z "$here" ]; then
        docker pull "$image" || die "AGENT_R1_IMAGE=$image cannot be pulled (see above); unset it to build one, $without"
    fi
}

share_folders() {  # each has the same path inside and outside, so paths in messages are valid
    home=$(realpath "${AGENT_R1_HOME:-.}")
    local cache=${HF_HOME:-$HOME/.cache/huggingface} kernels=${XDG_CACHE_HOME:-$HOME/.cache}/agent-r1/kernels word file
    mkdir -p "$home/runs" "$home/artifacts" "$cache" "$kernels"  # otherwise Docker would make them as root
    volumes=(-v "$home/runs:$home/runs" -v "$home/artifacts:$home/artifacts"
        -v "$cache:/cache/huggingface" -v "$kernels:/cache/kernels")
    words=()
    local before=""
    for word; do  # your files in settings are mounted read-only
        case "$before" in --recipe|--preset) word="$before=$word" before="" ;; esac
        case "$word" in
            --recipe|--preset) before=$word; continue ;;
            --recipe=*|--preset=*.yaml|--preset=*.yml)  # with the folder of its code and questions
                if [ -e "${word#*=}" ]; then
                    file=$(realpath "${word#*=}") word="${word%%=*}=$file"
                    [ -d "$file" ] || file=$(dirname "$file")
                    volumes+=(-v "$file:$file:ro")
                fi ;;
            data.source=?*|data.corpus=?*|model.path=?*)
                if [ -e "${word#*=}" ]; then
                    file=$(realpath "${word#*=}") word="${word%%=*}=$file"
                    volumes+=(-v "$file:$file:ro")
                fi ;;
        esac
        words+=("$word")
    done
}

run_stages() {
    local terminal=()  # with a terminal, Ctrl-C passes through it (-i); without, docker forwards the signal
    if [ -t 0 ] && [ -t 1 ]; then terminal=(-i -t); fi
    # Workers exchange tensors through /dev/shm, for which Docker's default is 64 MB. Keys are passed by name: their
    # values are neither in the process list nor in the image.
    exec docker run --rm --init ${terminal[@]+"${terminal[@]}"} ${gpus[@]+"${gpus[@]}"} \
        --shm-size=32g ${limits[@]+"${limits[@]}"} --ulimit stack=67108864 --ulimit nofile=65536 \
        --user "$user" "${volumes[@]}" -e AGENT_R1_HOME="$home" \
        -e WANDB_API_KEY -e HF_TOKEN -e CUDA_VISIBLE_DEVICES \
        "$image" bash speedrun-nodocker.sh ${words[@]+"${words[@]}"}
}

main "$@"
