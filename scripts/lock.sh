#!/bin/sh
# Writes pylock.toml (PEP 751): each package that mpkit[notebook] needs, its exact version and where it comes from, with
# hashes. It names the addresses of your package index, so git ignores it and mpkit ships none.
#   sh scripts/lock.sh [FILE]
set -eu
cd "$(dirname "$0")/.."
out=${1:-pylock.toml}

with_uv() {
    command -v uv >/dev/null 2>&1 || return 1
    uv pip compile -q --extra notebook -c constraints.txt --generate-hashes --format pylock.toml -o "$out" pyproject.toml
}

with_pip() {
    PIP_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 \
        .venv/bin/python -m pip lock --no-input -q -o "$out" -e '.[notebook]'
}

with_uv || with_pip || {
    echo "mpkit: no lock was written; what uv and pip said is above. pip has to be 25.1 or newer:" >&2
    echo "    .venv/bin/python -m pip install --upgrade pip" >&2
    exit 1
}
echo "mpkit: wrote $out" >&2
