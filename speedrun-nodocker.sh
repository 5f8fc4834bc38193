#!/usr/bin/env bash
# Agent-R1 on this machine, from nothing to a trained agent. Read it as the table of contents of the project: `stage X`
# is the command `agent-r1 X`. The comment above it names the part of src/agent_r1 with its code.
#
#   bash speedrun-nodocker.sh                        GRPO, with the preset that fits this machine (no GPU: discover)
#   bash speedrun-nodocker.sh ppo                    PPO, with a critic
#   bash speedrun-nodocker.sh --preset smoke         a small run on the CPU: does everything work?
#   bash speedrun-nodocker.sh --help                 all options, and more examples
#
# A second call skips finished stages. It needs no key and no sudo; without a GPU it downloads only Python packages.
# ./speedrun.sh runs this script in Docker.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
begin=$SECONDS

# Parse the options, make .venv with the pinned packages, choose the preset. Defines `stage`, and the arguments to pass on.
source requirements/environment.sh

# Can this machine do it? Versions, memory, disk, GPUs, each with a remedy, before anything is made.
stage doctor "${config[@]}"

# With GPUs: do Ray, FSDP2, NCCL and vLLM work here? A rehearsal of about ten minutes (--no-check skips it).
check_gpus

# Room 1, data: questions with known answers, and the passages that contain them: a generated world, or HotpotQA.
stage data "${config[@]}"

# Room 2, search: encode every passage as a vector, and build a FAISS index that finds the nearest passages of a query.
stage index "${config[@]}"

# Room 7, training: RL needs a model that sometimes succeeds. A tiny model learns the format and a weak policy.
stage cold-start "${config[@]}"

# With GPUs, or with --search-server: one process holds the index for all processes that run episodes.
start_search

# Room 9, inference: how good is it before RL? Held-out questions, exact match, with an interval.
stage eval --before "${run[@]}"

# Rooms 3 to 7, the core: episodes with tools, rewards on the agent's own tokens, advantages, updates, repeated.
stage train "${run[@]}" ${resume:+"$resume"}

# How good is it now? The same questions, the same episode loop.
stage eval "${run[@]}"

# One page: learning curves, and the same questions before and after, every token coloured by its author.
stage report "${run[@]}"

run_stages
echo "done in $((SECONDS - begin)) s; talk to it: bash inference.sh"
