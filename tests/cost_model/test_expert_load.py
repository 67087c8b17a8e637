"""How busy experts are, in estimates: the rows and the memory of the busiest rank are those of a run."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

import mpkit as mk

MACHINE, MIXTRAL = "8x-h100-nvlink", "mixtral-8x7b"
ASKED: dict[str, Any] = {"global_batch": 64, "sequence": 4096}
PLAN = mk.Plan(dp=8, ep=8, zero=1, microbatches=8, precision="bf16")


@pytest.mark.parametrize("stack", ["pytorch", "megatron", "torchtitan"])
def test_the_busier_the_slower_and_the_fuller(stack: str) -> None:
    """Wherever experts are divided, with tensor parallelism or without; not where each rank has all."""
    for tp, ep, etp in ((1, 8, None), (2, 4, 2), (2, 8, 1), (2, 4, None)):
        plan = mk.Plan(dp=8 // tp, tp=tp, ep=ep, etp=etp, precision="bf16", sequence_parallel=tp > 1)
        found = [
            mk.estimate(MIXTRAL, plan, MACHINE, expert_load=load, stack=stack, **ASKED)
            for load in (None, 1.5, 3)
        ]
        for less, more in pairwise(found):
            assert less.step_time < more.step_time and less.peak_memory < more.peak_memory
    whole = mk.Plan(dp=8, precision="bf16")
    times = {mk.estimate(MIXTRAL, whole, MACHINE, expert_load=load, **ASKED).step_time for load in (None, 3)}
    assert len(times) == 1
