"""Runs on real meshes: what they send, by axis, is what the papers say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mpkit as mk
from mpkit.models import GPT, next_token_loss


@pytest.mark.parametrize(
    ("degrees", "axes"),
    [
        ({"pp": 2, "dp": 2, "tp": 2, "microbatches": 2}, ["pp", "dp", "tp"]),
        ({"dp": 2, "tp": 2, "zero": 3}, ["dp", "tp"]),
        ({"pp": 2, "tp": 2, "microbatches": 2, "sequence_parallel": True}, ["pp", "tp"]),
        ({"tp": 2, "recompute": "full"}, ["tp"]),
    ],
)
def test_a_mesh_sends_what_the_formulas_say(train, degrees: dict[str, Any], axes: list[str]) -> None:
    torch.manual_seed(0)
    model = GPT(layers=4, width=32, heads=4, length=16)
    tokens = torch.randint(0, 256, (8, 16))
    run = train(
        model,
        [(tokens, tokens)],
        mk.Plan(**degrees),
        loss=next_token_loss,
        optimizer=torch.optim.SGD,
        steps=2,
    )
    timeline = run.timeline()
    matrix = timeline.comm_matrix()
    assert matrix.axes == axes
    ratios = {(row.axis, row.kind): row.ratio for row in timeline.comm_volume().rows}
    # Small beside them: the cross-entropy's sums, the loss on its way to the first stage, and under sequence
    # parallelism, where there is little else in all-reduces, the sums of layer norms' gradients.
    divided = degrees.get("sequence_parallel", False)
    small = {("tp", "all_reduce"): 0.2 if divided else 0.02, ("pp", "send"): 0.01}
    # Who holds what is what the plan said.
    placed = run.placement(hardware="8x-h100-nvlink")
    assert [talk.axis for talk in placed.talks] == axes[::-1]
    assert placed.part("block0.mlp.up.weight", 1) == "rows 64-127"
    assert placed.stages == tuple(map(tuple, run.trace.meta["stages"]))
    for kind, ratio in ratios.items():
        assert ratio == pytest.approx(1.0, abs=small.get(kind, 1e-9)), kind
