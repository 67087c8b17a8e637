"""Folding of experts beside attention, as published: it is faster, since their tokens stay inside the node."""

from __future__ import annotations

from dataclasses import replace

import pytest

import mpkit as mk
from mpkit.prediction.cost_model.architecture import Architecture
from mpkit.prediction.cost_model.fits import FRAGMENTATION
from mpkit.prediction.cost_model.layout import Layout
from mpkit.prediction.cost_model.memory import stage_memory
from mpkit.prediction.cost_model.preset import preset_for
from mpkit.prediction.cost_model.shares import ParameterShares
from mpkit.prediction.cost_model.stack import stack_of
from mpkit.prediction.cost_model.step import step_time

MIXTRAL = Architecture(56, 6144, 48, kv_heads=8, ffn=16384, vocabulary=32768, gated=True, experts=8, top_k=2)
FINE = replace(MIXTRAL, experts=64, top_k=8, expert_ffn=2048)
LLAMA = Architecture(80, 8192, 64, kv_heads=8, ffn=28672, vocabulary=128256, gated=True, experts=8, top_k=2)
QWEN = Architecture(
    28, 3584, 28, kv_heads=4, vocabulary=151936, gated=True, experts=64, top_k=8, expert_ffn=2560, shared_ffn=20480
)  # fmt: skip
PUBLISHED = {
    "8x22B": (MIXTRAL, 128, [(4, 8, 1), (2, 4, 8), (2, 8, 8)], [36.6, 46.3, 49.3]),
    "G8T8": (FINE, 128, [(8, 8, 1), (2, 8, 8), (4, 8, 8)], [8.7, 17.1, 28.8]),
    "57B-A14B": (QWEN, 64, [(4, 4, 1), (2, 4, 4), (2, 4, 4)], [23.1, 35.3, 39.0]),
    "8x70B": (LLAMA, 256, [(8, 4, 8), (8, 8, 16)], [38.8, 41.6]),
}
"""By model: GPUs; (tp, ep, pp) of TP+EP+DP where it fits, of MCore, and of MCore with folding (etp = 1); their model
FLOPs utilization in %. Megatron-Core on H100, 256 samples of 4,096 tokens (Liu et al. 2025, arXiv 2504.14960, table 3;
micro-batches and recomputation are not given)."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_methods_are_in_the_published_order(name: str) -> None:
    model, gpus, meshes, utilization = PUBLISHED[name]
    found = []
    for tp, ep, pp in meshes:
        found.append(best_step(model, gpus, tp, ep, pp, etp=1 if len(found) == len(meshes) - 1 else tp))
    assert utilization == sorted(utilization) and found == sorted(found, reverse=True)


def best_step(model: Architecture, gpus: int, tp: int, ep: int, pp: int, *, etp: int) -> float:
    """Return the seconds of the fastest step that fits, over sizes of micro-batches, with and without recomputation."""
    machine, stack, dp = (
        mk.hardware("h100", nodes=gpus // 8, nic="ndr"),
        stack_of("megatron"),
        gpus // tp // pp,
    )
    constants, steps = preset_for(machine.device.name, "megatron").constants, []
    for size in (size for size in (1, 2, 4) if 256 % (dp * size) == 0):
        for recompute in ("none", "full"):
            layout = Layout(
                pp=pp, dp=dp, tp=tp, ep=ep, etp=etp, zero=1, sequence_parallel=True, microbatch=size,
                microbatches=256 // dp // size, recompute=recompute,
            )  # fmt: skip
            shares = ParameterShares(model, layout, stack)
            stages = stage_memory(model, layout, 4096, stack, shares, device=machine.device)
            needed = max(sum(held.values()) for held in stages) * (1 + FRAGMENTATION)
            if needed <= machine.device.memory:
                steps.append(step_time(model, layout, 4096, machine, stack, constants).seconds)
    return min(steps)
