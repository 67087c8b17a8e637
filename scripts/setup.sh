#!/bin/sh
# Builds .venv once and leaves it alone until pyproject.toml or constraints.txt change.
#
# .venv/.mpkit-setup   written last, holds what the set-up was made from: present and equal means done
# .venv/.mpkit-busy    written first, removed last: present means an earlier set-up was cut short
#
# What was cut short is built anew, since pip may take a half-unpacked package for a whole one. Where uv is installed,
# it installs instead of pip: faster, and with the build of torch that fits the machine (pyproject.toml). Where it
# cannot, because the index of torch's builds cannot be reached, pip does.
set -eu
cd "$(dirname "$0")/.."

venv=.venv
stamp=$venv/.mpkit-setup
busy=$venv/.mpkit-busy
log=$venv/.mpkit-setup.log

say() { printf 'mpkit: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

# The interpreter that $1 really starts, or nothing where it does not run, is older than 3.11,
# or as new as $2. (A pyenv or asdf shim on PATH may exist and still refuse to run.)
interpreter() {
    "$1" -c "import sys
if (3, 11) <= sys.version_info < (3, ${2:-99}): print(sys._base_executable)" 2>/dev/null || true
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        found=$(interpreter "$PYTHON")
        [ -n "$found" ] || die "PYTHON=$PYTHON is not a Python of version 3.11 or newer that runs"
        echo "$found"
        return
    fi
    # Left to choose, none newer than the pinned torch has wheels for.
    for name in python3 python3.13 python3.12 python3.11 python3.14 python; do
        found=$(interpreter "$name" 15)
        if [ -n "$found" ]; then
            echo "$found"
            return
        fi
    done
    die "found no Python from 3.11 to 3.14 on PATH that runs; install one, or name it:" \
        "make PYTHON=/path/to/python3.12"
}

# What a finished set-up depends on: the two files, and the folder (an editable install holds its path).
wanted() { cat pyproject.toml constraints.txt scripts/setup.sh | cksum; pwd; }

is_whole() { [ ! -e "$busy" ] && "$venv/bin/python" -m pip --version >/dev/null 2>&1; }

# Cheap enough to precede every target.
is_done() {
    [ -f "$stamp" ] && [ ! -e "$busy" ] && [ "$(cat "$stamp")" = "$(wanted)" ] || return 1
    made_by=$(interpreter "$venv/bin/python")
    [ -n "$made_by" ] || return 1
    [ -z "${PYTHON:-}" ] || [ "$(interpreter "$PYTHON")" = "$made_by" ]
}

! is_done || exit 0

# One set-up at a time, where the system has flock; the second finds the first one's work done.
if [ -z "${MPKIT_SETUP_LOCKED:-}" ] && command -v flock >/dev/null 2>&1; then
    MPKIT_SETUP_LOCKED=1 exec flock .venv.lock sh scripts/setup.sh
fi

python=$(find_python)
version=$("$python" -c 'import platform; print(platform.python_version())')
"$python" -c 'import ensurepip, venv' 2>/dev/null || die \
    "Python $version ($python) lacks the venv module;" \
    "on Debian or Ubuntu: sudo apt-get install python${version%.*}-venv"

# Rebuild what is broken, cut short, moved here from another folder, or of another Python.
rm -rf .venv.old.*
if [ -e "$venv" ]; then
    if ! is_whole; then
        reason="is broken or was cut short"
    elif [ -f "$stamp" ] && [ "$(tail -n 1 "$stamp")" != "$(pwd)" ]; then
        reason="was made in another folder"
    elif [ -n "${PYTHON:-}" ] && [ "$(interpreter "$venv/bin/python")" != "$python" ]; then
        reason="is of another Python"
    else
        reason=
    fi
    if [ -n "$reason" ]; then
        say "$venv $reason: building it anew"
        mv "$venv" ".venv.old.$$"  # in one step, so that no half-deleted .venv is ever seen
        rm -rf ".venv.old.$$"
    fi
fi

mkdir -p "$venv"
: >"$busy"
rm -f "$stamp"
what="setting up $venv with Python $version"
[ -x "$venv/bin/python" ] && what="bringing $venv up to date"
say "$what (the first time takes some minutes; log: $log)"

extras='.[notebook,dev,systems]'

with_uv() {
    command -v uv >/dev/null 2>&1 || return 1
    uv pip install --python "$venv/bin/python" -c constraints.txt -b constraints.txt -e "$extras"
}

# The environment variables, not -c, so that the build backend is held to the same versions too.
# They take a relative path only: pip splits them at spaces. Compiling all would take a minute; Python compiles what it imports.
with_pip() {
    PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 \
        "$venv/bin/python" -m pip install --no-compile --no-input --progress-bar off -e "$extras"
}

if ! {
    { [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"; } && { with_uv || with_pip; }
} >"$log" 2>&1; then
    tail -n 15 "$log" >&2
    die "set-up failed; the lines above end $log. It starts afresh the next time."
fi

wanted >"$stamp.new"
mv "$stamp.new" "$stamp"
rm -f "$busy"
say "set-up done"
