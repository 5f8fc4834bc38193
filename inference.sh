#!/usr/bin/env bash
# Agent-R1: talk to what you have trained. Two commands of `agent-r1`, both of room 9 (src/agent_r1/inference).
#
#   bash inference.sh                                  the newest run, served by vLLM
#   bash inference.sh --run laptop-grpo --step 40      another run, another checkpoint
#   bash inference.sh --backend transformers           in one process: no server, nothing more to install
#   bash inference.sh --help                           all words, and more examples
#
# A second call skips what is done. The server listens on the loopback only, and ends with the chat. What is said before the
# chat goes to standard error: standard output may be --json, for a program.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

# Reads the words, and makes .venv with the pinned packages and vLLM. From here on: $agent, and the words to pass on.
source requirements/inference.sh

# Export: the checkpoint becomes a model folder that anyone can use, and is held against the checkpoint.
if [ -z "$model" ]; then
    said=$("$agent" export ${export[@]+"${export[@]}"})
    echo "$said" >&2
    model=${said##*, in }  # its last line says where it is
fi

# Serve and chat: the episode loop of training, over that model.
exec "$agent" chat --model "$model" --backend "$backend" ${chat[@]+"${chat[@]}"}
