#!/bin/sh
# Installs into .venv, once, what tests/systems needs besides what the set-up holds: DeepSpeed and TensorFlow, which
# it watches, and torchtitan and Megatron-LM's core, which check the configurations that `plan.to` writes. A student
# needs none, and together they take 1.6 GB.
set -eu
cd "$(dirname "$0")/.."

venv=.venv
stamp=$venv/.mpkit-systems
log=$venv/.mpkit-systems.log
wanted=$(cat pyproject.toml constraints.txt scripts/systems.sh | cksum)

[ "$(cat "$stamp" 2>/dev/null || true)" != "$wanted" ] || exit 0
: >"$log"
install() {
    echo "mpkit: installing $* into $venv (log: $log)" >&2
    PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 \
        "$venv/bin/python" -m pip install --no-input --progress-bar off "$@" >>"$log" 2>&1 || {
        tail -n 5 "$log" >&2
        echo "mpkit: $* cannot be installed here; systems that need it are left out" >&2
        exit 1
    }
}

install tensorflow-cpu
# DeepSpeed builds against the torch that is there, without its operators in C++.
export DS_BUILD_OPS=0
install --no-build-isolation deepspeed
# Their configurations alone need nothing of what their training does.
install --no-deps torchtitan spmd_types megatron-core
install tyro
echo "$wanted" >"$stamp"
