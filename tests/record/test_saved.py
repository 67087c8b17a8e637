"""What a forward saves for its backward: by hand and by measurement."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from mpkit.trace.record.hooks import watch
from mpkit.trace.record.recorder import Recorder

BATCH = 3

# What each layer's backward needs, for 3 rows of fp32; a number is counted once, whoever else needs it.
BY_HAND = {
    "the input of a linear layer": (nn.Sequential(nn.Linear(4, 8)), 0),  # the input itself is tracked before
    "ReLU keeps its output, which the next layer needs too": (
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)),
        BATCH * 8 * 4,
    ),
    "GELU keeps its input, the next layer needs its output": (
        nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)),
        2 * BATCH * 8 * 4,
    ),
    "tanh keeps its output, which is tracked by itself": (nn.Sequential(nn.Linear(4, 8), nn.Tanh()), 0),
    "a norm keeps its input, the mean and 1/deviation of each row": (
        nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8)),
        BATCH * (8 + 2) * 4,
    ),
    "a frozen first layer needs nothing": (
        nn.Sequential(nn.Linear(4, 8).requires_grad_(False), nn.Linear(8, 2)),
        BATCH * 8 * 4,
    ),
}


@pytest.mark.parametrize(("model", "nbytes"), BY_HAND.values(), ids=BY_HAND)
def test_what_is_saved_is_what_the_layers_need(tmp_path: Path, model: nn.Module, nbytes: int) -> None:
    record = Recorder(tmp_path, 0)
    watch(record, model)
    x = torch.ones(BATCH, 4)
    record.ledger.track(x, "activations")
    with record.memory.saving():
        out = model(x)
    record.ledger.track(out, "activations")
    assert record.ledger.held["activations"] == x.nbytes + out.nbytes + nbytes
    out.sum().backward()
    assert record.ledger.held["activations"] == x.nbytes + out.nbytes
    del x, out
    assert record.ledger.held["activations"] == 0


def test_a_write_in_place_is_an_error_as_in_plain_pytorch(tmp_path: Path) -> None:
    record = Recorder(tmp_path, 0)
    weight = torch.ones(4, requires_grad=True)
    with record.memory.saving():
        saved = weight.exp()
        loss = saved.sum()
    saved.data.add_(1)  # unseen by autograd
    loss.backward(retain_graph=True)
    with torch.no_grad():
        saved.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*Write `x = x \+ y`"):
        loss.backward()
