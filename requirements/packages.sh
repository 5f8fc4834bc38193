# shellcheck shell=bash
#
# Make a virtual environment with the pinned packages: shared by requirements/environment.sh and requirements/inference.sh.
#
# In: `me`, the script's name; `stack`, cpu or gpu. Out: `venv`, and `agent`, the command in it.
# shellcheck disable=SC2154  # me and stack

die() { echo "$me: $1" >&2; exit "${2:-1}"; }

nearest() {  # nearest WORD KNOWN...: print " (did you mean 'preset'?)" if there is a Python and a known word is close
    "${PYTHON:-python3}" - "$@" 2>/dev/null <<'PY' || true
import sys
from difflib import get_close_matches

for close in get_close_matches(sys.argv[1], sys.argv[2:], 1):
    print(f" (did you mean '{close}'?)", end="")
PY
}

choose_packages() {
    case "$stack" in
        cpu) requirements=requirements/cpu.txt venv=${AGENT_R1_VENV:-.venv} ;;
        gpu) requirements=requirements/verl-gpu.txt venv=${AGENT_R1_VENV:-.venv-gpu} ;;
        *) die "AGENT_R1_STACK=$stack is unknown; set it to cpu or gpu" 2 ;;
    esac
    agent="$venv/bin/agent-r1"
}

pinned() {  # succeed if this checkout is installed, and every package of a requirements file at its pinned version
    [ -x "$agent" ] && "$venv/bin/python" - "$1" 2>/dev/null <<'PY'
import sys
from pathlib import Path

import agent_r1
from agent_r1.ground.machine import installed, read_pins, same_version

pins = read_pins(Path(sys.argv[1]).read_text())
here = Path("src/agent_r1").samefile(Path(agent_r1.__file__).parent)
sys.exit(not (here and all(same_version(installed(name), pin) for name, pin in pins.items())))
PY
}

bring_python() {  # rented machines have an older Python: uv, from PyPI, installs a 3.12 with the headers that Triton needs
    local own=$venv.uv
    echo "environment: there is no Python 3.12 here, so uv installs one into $venv ..."
    { python3 -m pip install --quiet --disable-pip-version-check --target "$own" uv &&
        "$own/bin/uv" venv --quiet --seed --python 3.12 "$venv"; } ||
        die "no Python 3.12 found, and uv could not install one (see above); install python3.12-venv and python3.12-dev, or \
with a network: pip install uv && uv venv --seed --python 3.12 $venv; then run this again"
    rm -rf "$own"
}

pythons() {  # list Pythons of these names, and for GPUs the 3.12s of pyenv, conda and uv
    local found
    command -v "${names[@]}" || true
    [ "$stack" = cpu ] || for found in "$HOME"/.pyenv/versions/3.12.*/bin/python "$HOME"/*conda3/bin/python3.12 \
        /opt/*/bin/python3.12 "$HOME"/.local/share/uv/python/cpython-3.12.*/bin/python3.12; do
        [ ! -x "$found" ] || echo "$found"
    done
}

preflight() {  # before 11 GB are installed: driver, system libraries, compiler, disk, network, hub, in seconds
    [ "$stack" = gpu ] && command -v "${PYTHON:-python3}" >/dev/null || return 0
    # shellcheck disable=SC2086  # one word or none
    "${PYTHON:-python3}" src/agent_r1/ground/preflight.py "$venv" ${hub_model:-} ||
        die "this machine is not ready (see above); fix what failed, or skip these checks with AGENT_R1_PREFLIGHT=no"
}

find_python() {  # for a CPU 3.11 or 3.12; for GPUs 3.12, for which verl-gpu.txt is resolved
    local names=(python3.11 python3.12 python3) wanted="3.11 or 3.12" least=11
    [ "$stack" = cpu ] || names=(python3.12) wanted="3.12" least=12
    python=$venv/bin/python
    if [ ! -x "$venv/bin/pip" ]; then  # missing or incomplete
        python=${PYTHON:-$(pythons | head -n 1)}
    fi
    if [ -z "$python" ] && [ "$stack" = gpu ]; then bring_python; python=$venv/bin/python; fi
    [ -n "$python" ] || die "no Python $wanted found; install it, or set PYTHON"
    "$python" -c "import sys; sys.exit(not (3, $least) <= sys.version_info[:2] <= (3, 12))" ||
        die "$("$python" --version 2>&1) is not supported; install Python $wanted, or set PYTHON"
}

verified() {  # verified FILE wheel|source: print the lines of hashes.txt for the pins of FILE and of the files that it includes
    awk -v folder="$(dirname "$1")" -v hashes="$(dirname "$1")/hashes.txt" -v kind="$2" '
        function read(file,  line) {
            while ((getline line < file) > 0) {
                sub(/(^| +)#.*/, "", line)
                if (line ~ /^-r / || line == "-c constraints.txt") read(folder "/" substr(line, 4))
                else { sub(/\[.*\]/, "", line); sub(/ *;.*/, "", line); gsub(/_/, "-", line); pinned[tolower(line)] = 1 }
            }
        }
        BEGIN {
            read(ARGV[1])
            while ((getline line < hashes) > 0) {
                split(line, words, " ")
                if (words[1] in pinned && (line ~ /# source$/) == (kind == "source")) print line
            }
        }' "$1"
}

verify() {  # verify PIP FILE: install each package of FILE whose hash is known, and refuse any other file
    local pip=("$1" install --disable-pip-version-check --no-deps --require-hashes)
    "${pip[@]}" -r <(verified "$2" wheel) || return
    # Without isolation, the pinned setuptools builds them; with it, pip would fetch the newest one.
    [ -z "$(verified "$2" source)" ] || "${pip[@]}" --no-build-isolation -r <(verified "$2" source)
}

install() {  # install WHAT PIP-ARGUMENTS...: hashed packages first; print pip's progress, seconds and size
    local begin=$SECONDS file="" pip=("$venv/bin/pip" install --disable-pip-version-check)
    local moving='/^ *(Downloading|Using cached) / {sub(/^ */, "  "); print; fflush()}
            /^Installing/ {print "  unpacking all of them ..."; fflush()}'
    echo "environment: $1 into $venv ..."
    [ "${*: -2:1}" != -r ] || file=${*: -1}
    { { [ -z "$file" ] || verify "$venv/bin/pip" "$file" | sed '/^Installing/d'; } &&
        "${pip[@]}" "${@:2}"; } | awk "$moving" ||
        die "the packages could not be installed (see above): a full disk, a broken connection, or a package that this system cannot \
use; then run this again"
    echo "  $((SECONDS - begin)) s, $(du -sh "$venv" | cut -f1) in $venv"
}

make_environment() {
    local size="about 1.7 GB with PyTorch for a CPU, several GB more with CUDA (docs/laptop.md); one to five minutes"
    [ "$stack" = cpu ] || size="11 GB; five to ten minutes"
    [ "${AGENT_R1_PREFLIGHT:-}" = no ] || preflight
    find_python
    [ -x "$venv/bin/pip" ] || "$python" -m venv "$venv" ||
        die "cannot make $venv; free space, install python3-venv, or set AGENT_R1_VENV"
    install "$requirements ($size)" -r "$requirements"
    install "agent-r1" --no-deps --no-build-isolation -e .
}
