#!/usr/bin/env bash
# Agent-R1 on this machine, from nothing to a trained agent. Read it as the table of contents of the project: each stage is
# one `agent-r1` command, and the room of src/agent_r1 that it lives in is named above it.
#
#   bash speedrun-nodocker.sh                        PPO, with the preset that fits this machine (no GPU: laptop)
#   bash speedrun-nodocker.sh grpo --preset smoke    GRPO; the laptop run in about a minute
#   bash speedrun-nodocker.sh --help                 all words, and more examples
#
# A second call skips what is done. No key, no sudo; without a GPU no download but Python packages. ./speedrun.sh runs
# this same script in Docker.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
begin=$SECONDS

# Reads the words, makes .venv with the pinned packages, chooses the preset. From here on: $agent, and the words to pass on.
source requirements/environment.sh

# Can this machine do it? Versions, memory, disk, GPUs, each with a remedy, before any minute is spent.
"$agent" doctor "${config[@]}"

# With GPUs: do Ray, FSDP2, NCCL and vLLM work here? The run in small, in five minutes, before an hour of it (--no-check: skip).
check_gpus

# Room 1, data: questions with known answers, and the passages that hold them. A world made from nothing, or HotpotQA.
"$agent" data "${config[@]}"

# Room 2, search: every passage becomes a vector, all vectors a FAISS index, so that a query finds its nearest passages.
"$agent" index "${config[@]}"

# Room 7, training: RL needs a model that sometimes succeeds. A tiny one is taught the format and to play badly.
"$agent" cold-start "${config[@]}"

# With GPUs, or by --search-server: one process holds the index for all that run episodes.
start_search

# Room 9, inference: how badly does it play? Held-out questions, exact match, with an interval.
"$agent" eval --before "${run[@]}"

# Rooms 3 to 7, the heart: episodes with tools, rewards on the agent's own tokens, advantages, updates. Again and again.
"$agent" train "${run[@]}" ${resume:+"$resume"}

# And now? The same questions, the same episode loop.
"$agent" eval "${run[@]}"

# One page: learning curves, and the same questions before and after, every token coloured by who chose it.
"$agent" report "${run[@]}"

echo "done in $((SECONDS - begin)) s; talk to it: bash inference.sh"
