"""What a process has set or patched for all of its code holds on its ranks too, or is reported by name."""

from __future__ import annotations

import importlib
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import plotly.io
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mpkit as mk
from mpkit.strategies.packing.patches import find_patches
from tests.limits import PROGRAM

Clusters = Callable[[int], mk.Cluster]
gelu = F.gelu


def triple(self: nn.SiLU, x: Tensor) -> Tensor:
    return 3 * x * torch.sigmoid(x)


def five_times(x: Tensor, approximate: str = "none") -> Tensor:
    return 5 * gelu(x, approximate=approximate)


class Norm(nn.Identity):
    """Not what a user expects of nn.LayerNorm."""


def computed(_: Any = None) -> list[Any]:
    x = torch.tensor([-1.0, 0.5, 2.0])
    layers = (nn.SiLU(), nn.GELU(), nn.Tanh(), nn.LayerNorm(3))
    errors = np.geterr()["divide"]
    return [
        *(layer(x).tolist() for layer in layers),
        F.gelu(x).tolist(),
        str(x.dtype),
        nn.Dropout.extra,
        errors,
    ]


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A notebook that has patched torch in five ways, and set a default and an option."""
    monkeypatch.setattr(nn.SiLU, "forward", triple)
    monkeypatch.setattr(F, "gelu", five_times)
    monkeypatch.setattr(nn.Tanh, "forward", nn.Sigmoid.forward)  # by torch's own
    monkeypatch.setattr(nn, "LayerNorm", Norm)
    monkeypatch.setattr(nn.Dropout, "extra", 0.25, raising=False)
    before, errors = torch.get_default_dtype(), np.geterr()
    torch.set_default_dtype(torch.float64)
    np.seterr(divide="raise")
    yield
    torch.set_default_dtype(before)
    np.seterr(**errors)


@pytest.mark.usefixtures("patched")
def test_ranks_compute_as_the_process_that_patched_libraries(clusters: Clusters) -> None:
    here = computed()
    assert here[0] == triple(nn.SiLU(), torch.tensor([-1.0, 0.5, 2.0])).tolist()
    assert clusters(2).run(computed) == [here, here]


def test_nothing_is_a_patch_where_nothing_was_patched(clusters: Clusters) -> None:
    assert not [str(patch) for patch in find_patches() if patch.users]
    x = torch.tensor([-1.0, 0.5, 2.0])
    assert clusters(2).run(silu) == [F.silu(x).tolist()] * 2  # nor after another launch was patched


def test_the_program_under_its_second_name_is_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """multiprocessing calls a program __mp_main__ as well, and a notebook's own functions were taken for patches."""
    program = types.ModuleType("__main__")
    exec("import torch\ndef mine(): pass", vars(program))
    for name in ("__main__", "__mp_main__"):
        monkeypatch.setitem(sys.modules, name, program)
    assert not [str(patch) for patch in find_patches() if patch.users]


def test_what_a_library_adds_for_itself_does_not_import_it_on_ranks(
    clusters: Clusters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers does to nn.Module, and its import takes each rank a second."""
    monkeypatch.setattr(nn.Module, "added", plotly.io.to_html, raising=False)
    assert "torch.nn.modules.module.Module.added" in map(str, find_patches())
    assert (
        clusters(2).run(lambda ctx: ["plotly" in sys.modules, hasattr(nn.Module, "added")])
        == [[False] * 2] * 2
    )


def silu(_: Any) -> list[float]:
    made: list[float] = nn.SiLU()(torch.tensor([-1.0, 0.5, 2.0])).tolist()
    return made


def test_a_patch_that_cannot_be_sent_is_reported_by_name(
    clusters: Clusters, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = threading.Lock()
    monkeypatch.setattr(nn.SiLU, "forward", lambda self, x: x * (lock is not None))
    with pytest.warns(mk.errors.UnwisePlan, match=r"SiLU\.forward .*as the library has it"):
        clusters(2).run(silu)


def test_autocast_around_a_launch_is_reported(clusters: Clusters) -> None:
    with torch.autocast("cpu"), pytest.warns(mk.errors.UnwisePlan, match="precision='bf16'"):
        clusters(2).run(silu)


def test_a_module_edited_since_its_import_is_reported(
    clusters: Clusters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "edited_net.py"
    file.write_text("def scale(ctx):\n    return 2\n\ndef other(ctx):\n    return 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    net = importlib.import_module("edited_net")
    assert clusters(2).run(net.scale) == [2, 2]
    file.write_text("# another line\ndef scale(ctx):\n    return 30\n\ndef other(ctx):\n    return 0\n")
    with pytest.warns(mk.errors.UnwisePlan, match=r"^edited_net\.scale: ranks run the file as it is now"):
        assert clusters(2).run(net.scale) == [30, 30]
    importlib.reload(net)
    assert clusters(2).run(net.scale) == [30, 30]


SCRIPT = """
import functools, torch, torch.nn.functional as F, mpkit as mk
from torch import nn

linear = nn.Linear.forward

@functools.wraps(linear)
def forward(self, x):
    return linear(self, x) + 1

def trained(ctx):
    return model(x).tolist()

torch.manual_seed(0)
model, x = nn.Linear(2, 2), torch.ones(1, 2)
nn.Linear.forward = forward
if __name__ == "__main__":
    with mk.Cluster(2, device="cpu") as cluster:
        assert cluster.run(trained) == [model(x).tolist()] * 2
        how = dict(loss=F.mse_loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), steps=1)
        run = cluster.resized(1).train(model, [(x, x)], mk.Plan.serial(), **how).wait()
        assert run.losses == [F.mse_loss(model(x), x).item()], run.losses
"""


@pytest.mark.soak
def test_a_script_that_wraps_a_method_under_its_name(tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    done = subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=PROGRAM)
    assert done.returncode == 0, done.stderr
