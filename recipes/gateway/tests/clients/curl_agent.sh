#!/usr/bin/env bash
# An agent of curl: it searches with the question's own words, and asks once with what it found.
set -euo pipefail
read -r task
question=$(printf '%s' "$task" | sed -n 's/.*"question": "\([^"]*\)".*/\1/p')
post() {
    curl -sS --fail --max-time 30 -H "Authorization: Bearer $OPENAI_API_KEY" -d "$2" "$1"
}
found=$(post "$AGENT_R1_TOOLS_URL/search" "{\"query\": \"$question\"}" | tr -d '"\\{}' | head -c 200)
stream=false
[ "${STREAM:-0}" = 1 ] && stream=true
message="{\"role\": \"user\", \"content\": \"$question $found\"}"
post "$OPENAI_BASE_URL/chat/completions" \
    "{\"model\": \"agent\", \"stream\": $stream, \"messages\": [$message]}" >/dev/null
