#!/bin/sh
# Installs into .venv, once, what `make book` needs besides what the set-up holds: Sphinx, its reader
# of notebooks and its theme.
set -eu
cd "$(dirname "$0")/.."

venv=.venv
stamp=$venv/.mpkit-book
log=$venv/.mpkit-book.log
wanted=$(cat pyproject.toml constraints.txt scripts/book.sh | cksum)

[ "$(cat "$stamp" 2>/dev/null || true)" != "$wanted" ] || exit 0
echo "mpkit: installing sphinx, myst-nb and pydata-sphinx-theme into $venv (log: $log)" >&2
PIP_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 \
    "$venv/bin/python" -m pip install --no-input --progress-bar off sphinx myst-nb pydata-sphinx-theme \
    >"$log" 2>&1 || {
    tail -n 5 "$log" >&2
    echo "mpkit: Sphinx cannot be installed here, so the book cannot be built" >&2
    exit 1
}
echo "$wanted" >"$stamp"
