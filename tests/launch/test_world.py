"""What a process has set for all of its code holds on its ranks too; what it has patched is named."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import mpkit as mk

Clusters = Callable[[int], mk.Cluster]


def computed(_: Any = None) -> list[Any]:
    return [str(torch.zeros(1).dtype), np.geterr()["divide"]]


def test_ranks_have_the_settings_of_the_process_that_launches_them(clusters: Clusters) -> None:
    before, errors = torch.get_default_dtype(), np.geterr()
    torch.set_default_dtype(torch.float64)
    np.seterr(divide="raise")
    try:
        assert clusters(2).run(computed) == [["torch.float64", "raise"]] * 2
    finally:
        torch.set_default_dtype(before)
        np.seterr(**errors)
    assert clusters(2).run(computed) == [computed()] * 2


def silu(_: Any) -> list[float]:
    made: list[float] = nn.SiLU()(torch.tensor([-1.0, 0.5, 2.0])).tolist()
    return made


class Norm(nn.Identity):
    """Not what a user expects of nn.LayerNorm."""


def test_patches_of_libraries_are_named(clusters: Clusters, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not carried to ranks; where nothing is patched, nothing is said."""
    here = silu(None)
    assert clusters(2).run(silu) == [here, here]
    with monkeypatch.context() as patched:
        patched.setattr(nn.SiLU, "forward", lambda self, x: 3 * x)
        patched.setattr(nn, "LayerNorm", Norm)
        words = r"torch\.nn\.LayerNorm, torch\.nn\.modules\.activation\.SiLU\.forward as the library has it"
        with pytest.warns(mk.errors.UnwisePlan, match=words):
            assert clusters(2).run(silu) == [here, here]


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
