#!/usr/bin/env bash
# Chat with a trained model, yours or the one that ships here. Two commands of `agent-r1`, both in src/agent_r1/inference.
#
#   bash inference.sh --demo                           the agent that ships with the repository: no training needed
#   bash inference.sh                                  the newest run, served by vLLM
#   bash inference.sh --run discover-grpo --step 40      another run, another checkpoint
#   bash inference.sh --backend local                  in one process: no server, nothing more to install
#   bash inference.sh --help                           all options, and more examples
#
# A second call skips the export. The server listens on the loopback interface only, and ends with the chat. Messages before the
# chat go to standard error, because standard output may be --json, for a program.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

# Parse the options, and make .venv with the pinned packages and vLLM. Sets $agent, and the arguments to pass on.
source requirements/inference.sh

# The shipped agent needs no export. Its world and index are generated at the first call.
[ -z "$demo" ] || exec "$agent" chat --demo --backend "$backend" ${chat[@]+"${chat[@]}"}

# Export: convert the checkpoint to a model folder for any program, and compare it with the checkpoint.
if [ -z "$model" ]; then
    said=$("$agent" export ${export[@]+"${export[@]}"})
    echo "$said" >&2
    model=${said##*, in }  # the last line ends with the folder
fi

# Serve and chat: the training episode loop, with that model.
exec "$agent" chat --model "$model" --backend "$backend" ${chat[@]+"${chat[@]}"}
