"""The plans of 8 ranks that `python -m benchmarks order` runs: a sample that stands for all of them."""

from __future__ import annotations

from collections import Counter

from benchmarks.bench_order import MICROBATCHES, PLANS, sample
from mpkit.prediction.advice.try_out import every_plan


def test_each_mesh_is_drawn_equally_often_and_the_same_each_time() -> None:
    plans = list(every_plan(8, MICROBATCHES))
    drawn = sample(plans, PLANS[8] or 0)
    meshes = Counter(plan.mesh for plan in drawn)
    assert len(set(drawn)) == len(drawn) == 40
    assert set(meshes) == {plan.mesh for plan in plans}
    possible = Counter(plan.mesh for plan in plans)
    assert all(min(2, possible[mesh]) <= count <= 3 for mesh, count in meshes.items())
    assert drawn == sample(plans, 40)
    assert {plan.zero for plan in drawn} == {0, 1, 2, 3}
    assert {plan.schedule for plan in drawn} >= {"gpipe", "1f1b", "zb_h1", "interleaved_1f1b"}
