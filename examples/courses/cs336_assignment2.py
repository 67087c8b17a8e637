"""Stanford CS336, assignment 2: its tests of DDP, the sharded optimizer and FSDP, run against proved wrappers.

    git clone https://github.com/stanford-cs336/assignment2-systems
    python examples/courses/cs336_assignment2.py assignment2-systems

The course's tests are not part of mpkit: fetch them yourself. They call the student's code through
`tests/adapters.py`; this script copies `tests/` into a folder that is thrown away, with the adapters below in place of
that file, and runs pytest there. The FSDP tests import the course's own model: `pip install einops einx jaxtyping`.

DDP is `mk.ddp`; the sharded optimizer and FSDP are torch's, and `mk.prove` compares the first step with the plain
module. One test is left out unless you say --all: `test_fsdp_correctness[fp32]` wants weights that are equal to the
last bit to those of training on the whole batch. Each rank's samples are summed first, and then the ranks, in another
order than one batch is summed: they are 1.5e-8 apart. The assignment's attention kernels are no subject of mpkit.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ADAPTERS = '''
import copy

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor

import mpkit as mk


def get_ddp(module):
    plain = copy.deepcopy(module)
    model = mk.ddp(module)
    mk.prove(model, plain)
    return model


def ddp_on_after_backward(ddp_model, optimizer):
    """Gradients are reduced when `backward` returns."""


def get_sharded_optimizer(params, optimizer_cls, **kwargs):
    return ZeroRedundancyOptimizer(params, optimizer_cls, **kwargs)


def get_fsdp(module, compute_dtype=None):
    for tensor in (*module.parameters(), *module.buffers()):
        dist.broadcast(tensor.detach(), 0)
    plain = copy.deepcopy(module)
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, output_dtype=torch.float32)
    for layer in module.modules():
        if next(layer.parameters(recurse=False), None) is not None and layer is not module:
            fully_shard(layer, mp_policy=policy)
    model = fully_shard(module, mp_policy=policy)
    mk.prove(model, plain, dtype=compute_dtype)
    return model


def fsdp_on_after_backward(fsdp_model, optimizer):
    """Gradients are reduced when `backward` returns."""


def fsdp_gather_full_params(fsdp_model):
    state = fsdp_model.state_dict()
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in state.items()}
'''
FILES = ("test_ddp.py", "test_sharded_optimizer.py", "test_fsdp.py")
CANNOT = "tests/test_fsdp.py::test_fsdp_correctness[fp32]"
MODEL_NEEDS = ("einops", "einx", "jaxtyping")


def main() -> int:
    """Run the tests, and return pytest's exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="a clone of stanford-cs336/assignment2-systems")
    parser.add_argument("--all", action="store_true", help="also the test that cannot pass")
    options = parser.parse_args()
    folder: Path = options.folder.resolve()
    missing = [name for name in FILES if not (folder / "tests" / name).is_file()]
    if missing:
        print(
            f"{folder} has no tests/{missing[0]}: clone https://github.com/stanford-cs336/assignment2-systems there"
        )
        return 2
    files = list(FILES)
    if lacking := [name for name in MODEL_NEEDS if importlib.util.find_spec(name) is None]:
        print(f"test_fsdp.py is left out: the course's model needs `pip install {' '.join(lacking)}`")
        files.remove("test_fsdp.py")
    with tempfile.TemporaryDirectory() as place:
        shutil.copytree(folder / "tests", Path(place, "tests"))
        Path(place, "tests", "adapters.py").write_text(ADAPTERS, encoding="utf-8")
        here = [place, str(folder / "cs336-basics"), *filter(None, sys.path)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(here), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-q", "--tb=line", "-p", "no:cacheprovider", "-rA"]
        command += ["--show-capture=no", "--rootdir", place, *(f"tests/{name}" for name in files)]
        if not options.all:
            print(f"left out, since no sharded sum is equal to the last bit: {CANNOT}", flush=True)
            command += ["--deselect", CANNOT]
        return subprocess.run(command, cwd=place, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
