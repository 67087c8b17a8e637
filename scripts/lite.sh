#!/bin/sh
# Installs into .venv, once, what `make lite` and `make test-lite` need besides what the set-up holds: JupyterLite's
# builder and its Pyodide kernel. The kernel's extension is moved to where JupyterLab does not load it, since it works in
# JupyterLite alone.
set -eu
cd "$(dirname "$0")/.."

venv=.venv
stamp=$venv/.mpkit-lite
log=$venv/.mpkit-lite.log
wanted=$(cat pyproject.toml constraints.txt scripts/lite.sh | cksum)

[ "$(cat "$stamp" 2>/dev/null || true)" != "$wanted" ] || exit 0
echo "mpkit: installing jupyterlite-core and jupyterlite-pyodide-kernel into $venv (log: $log)" >&2
PIP_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 \
    "$venv/bin/python" -m pip install --no-input --progress-bar off jupyterlite-core jupyterlite-pyodide-kernel \
    >"$log" 2>&1 || {
    tail -n 5 "$log" >&2
    echo "mpkit: JupyterLite cannot be installed here, so the browser edition cannot be built" >&2
    exit 1
}
installed="$venv/share/jupyter/labextensions/@jupyterlite"
if [ -d "$installed" ]; then
    rm -rf "$venv/jupyterlite-extensions"
    mv "$installed" "$venv/jupyterlite-extensions"
fi
echo "$wanted" >"$stamp"
