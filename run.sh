#!/usr/bin/env bash
# Sets up .venv once, then runs the program: ./run.sh [command] [flags], see ./run.sh --help.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=$root/.venv

fits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; }

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python; do
        if fits "$candidate"; then command -v "$candidate" && return; fi
    done
    echo "error: no Python 3.11, 3.12 or 3.13 found (python3 is: $(python3 --version 2>&1)); install one, or name it: PYTHON=/path/to/python3.12 ./run.sh" >&2
    return 1
}

# Makes the environment hold what a requirements file lists; the file's checksum tells if it does.
install() {
    local requirements=$root/$1 stamp=$venv/.$1.installed sum
    sum=$(cat "$root"/requirements*.txt | cksum)
    if [[ -n ${PYTHON-} && -x $venv/bin/python && $("$PYTHON" --version 2>&1) != $("$venv/bin/python" --version) ]]; then
        echo "note: .venv has $("$venv/bin/python" --version); remove .venv to set it up with $PYTHON" >&2
    fi
    [[ -x $venv/bin/python && -f $stamp && $(<"$stamp") == "$sum" ]] && return
    if [[ ! -x $venv/bin/python ]] || ! fits "$venv/bin/python"; then
        local python
        python=$(find_python)
        echo "setting up $venv with $("$python" --version)" >&2
        if ! "$python" -m venv --clear "$venv"; then
            rm -rf "$venv"
            echo "error: $python cannot make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv" >&2
            return 1
        fi
    fi
    echo "installing $1 (TensorFlow takes a minute, once)" >&2
    if ! "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r "$requirements"; then
        echo "error: pip could not install $requirements; its message is above" >&2
        return 1
    fi
    echo "$sum" >"$stamp"
}

if [[ ${1-} == test ]]; then requirements=requirements-test.txt; else requirements=requirements.txt; fi
if command -v flock >/dev/null; then # several workers of one machine may start at once
    (flock 9 && install $requirements) 9>"$root/.venv.lock"
else
    install $requirements
fi

export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} PYTHONSAFEPATH=1 # our modules, not what lies in the current folder
if [[ ${1-} == test ]]; then
    shift
    cd "$root"
    exec "$venv/bin/python" -m tests "$@"
fi
exec "$venv/bin/python" -m app "$@"
