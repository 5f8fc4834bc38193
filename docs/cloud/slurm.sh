#!/usr/bin/env bash
# Agent-R1 on a Slurm cluster, on one node or on several. From the checkout, which all nodes must see under this path:
#
#   sbatch docs/cloud/slurm.sh grpo --preset hotpotqa-4xh100
#   sbatch --nodes=2 --gpus-per-node=8 docs/cloud/slurm.sh grpo --preset hotpotqa-8xh100
#
# The arguments are speedrun-nodocker.sh's; its stages run on the first node. Make the environment once, on a node with
# network: docs/cloud.md. Not run by this project yet: it had no cluster.
#
# These fit one node of four H100; your cluster may also require --partition and --account.
#SBATCH --job-name=agent-r1
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --mem=300G
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --output=agent-r1-%j.log
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?start it with sbatch, from the checkout}"
die() { echo "slurm: $1" >&2; exit 1; }

# Absolute, and known on all nodes.
export AGENT_R1_STACK=gpu AGENT_R1_HOME=${AGENT_R1_HOME:-$PWD} AGENT_R1_VENV=${AGENT_R1_VENV:-$PWD/.venv-gpu}
bin=$AGENT_R1_VENV/bin
[ -x "$bin/agent-r1" ] || die "there is no environment in $AGENT_R1_VENV; make it once (docs/cloud.md)"
words=("$@" --resume)  # continues after a requeue; a first job has nothing to resume
speedrun() {  # 130: trainer.max_hours is over and the step is saved, so the job goes back into the queue
    local code=0
    bash speedrun-nodocker.sh "${words[@]}" "$@" || code=$?
    [ "$code" -ne 130 ] || scontrol requeue "$SLURM_JOB_ID"
    exit "$code"
}

# Slurm runs this script on the first node, with all of that node's GPUs, which is enough for one node.
if [ "$SLURM_NNODES" -eq 1 ]; then
    speedrun
fi

# Several nodes: our own Ray over all nodes, which verl joins (RAY_ADDRESS) instead of starting one. Every caller of a Ray
# can run code in it, so it requires this job's token, a file that only you may read. Ray gets no keys, because it shows
# its environment.
address=$(hostname --ip-address | cut -d ' ' -f 1)
token=$AGENT_R1_HOME/.ray-token-$SLURM_JOB_ID
(umask 077 && "$bin/python" -c "import secrets; print(secrets.token_hex(32), end='')" >"$token")
trap 'rm -f "$token"; kill $(jobs -p) 2>/dev/null || true' EXIT
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$token RAY_ADDRESS=$address:6379 RAY_USAGE_STATS_ENABLED=0
export AGENT_R1_SEARCH_HOST=$address  # agents on other nodes use the search service here; it has no password

# Ray places nothing beyond this nominal number of CPUs: 3 for each rank, and 20 for all else.
ray=(env -u WANDB_API_KEY -u HF_TOKEN "$bin/ray" start --block --num-cpus=$((3 * SLURM_GPUS_ON_NODE + 20)))
"${ray[@]}" --head --node-ip-address="$address" --port=6379 --include-dashboard=false &
srun --relative=1 --nodes=$((SLURM_NNODES - 1)) --ntasks-per-node=1 "${ray[@]}" --address="$RAY_ADDRESS" &

gpus=$((SLURM_NNODES * SLURM_GPUS_ON_NODE))
count='import ray; ray.init(logging_level="ERROR", log_to_driver=False); print(int(ray.cluster_resources().get("GPU", 0)))'
until [ "$("$bin/python" -c "$count" 2>/dev/null)" = "$gpus" ]; do
    [ "$SECONDS" -lt 600 ] || die "after 10 minutes Ray does not see $gpus GPUs on $SLURM_NNODES nodes; see above"
    sleep 5
done
speedrun verl.nodes="$SLURM_NNODES" verl.ranks="$gpus"
