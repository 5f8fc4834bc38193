#!/usr/bin/env bash
# Make TRL's own environment, so that its pins do not decide ours. About 1.5 GB and a minute or two.
#   bash benchmarks/trl_compare/setup.sh      PYTHON and TRL_VENV choose the interpreter and the place
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=${TRL_VENV:-$here/.venv}
test -x "$venv/bin/python" || "${PYTHON:-python3.11}" -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check -r "$here/requirements.txt"
"$venv/bin/python" -c 'import torch, transformers, trl; print("torch", torch.__version__, "transformers", transformers.__version__, "trl", trl.__version__)'
