#!/usr/bin/env bash
# Makes the virtual environment at $1, or does nothing when it is already what the requirements say.
#
# $1/ready holds a hash of the requirements and is written last. An environment without it is one whose
# install was interrupted: pip may take half-copied packages for installed ones, so it starts over.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=$1
ready=$venv/ready
requirements=(requirements-cpu.txt requirements-cpu-nodeps.txt requirements-dev.txt)

find_python() {
    local candidate problems=""
    for candidate in ${PYTHON:-python3.11 python3.12 python3}; do
        if ! "$candidate" -c '' 2>/dev/null; then
            problems+="  $candidate: not found, or does not start"$'\n'
        elif ! "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))'; then
            problems+="  $candidate: is $("$candidate" -V)"$'\n'
        elif ! "$candidate" -c 'import venv, ensurepip' 2>/dev/null; then
            problems+="  $candidate: has no venv or ensurepip (Debian, Ubuntu: apt install $candidate-venv)"$'\n'
        else
            echo "$candidate"
            return
        fi
    done
    {
        echo "make env needs Python 3.11 or 3.12 with venv and ensurepip. Tried:"
        echo -n "$problems"
        echo "Install one, or name it: make env PYTHON=/path/to/python3.11"
    } >&2
    return 1
}

pip_install() {
    "$venv/bin/python" -m pip install --no-warn-conflicts "$@"
}

wanted=$(cat "${requirements[@]}" pyproject.toml tools/make-env.sh | sha256sum)
if [[ -f $ready && $(<"$ready") == "$wanted" ]]; then
    exit
fi

python=$(find_python)
if [[ ! -f $ready ]]; then
    echo "Creating $venv with $("$python" -V)"
    "$python" -m venv --clear "$venv"
fi
rm -f "$ready"

echo "Installing what serves and tests on a CPU: about 1.9 GB"
pip_install -r requirements-cpu.txt -r requirements-dev.txt
pip_install --no-deps -r requirements-cpu-nodeps.txt
pip_install --no-deps --no-build-isolation --editable .
echo "$wanted" >"$ready"
