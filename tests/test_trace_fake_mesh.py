"""Any mesh played on tensors without content does what the real one does, and ranks that are alike are played once."""

from __future__ import annotations

import sys
from collections.abc import Callable

import cloudpickle
import numpy as np
import pytest

import mpkit as mk
from tests.fakes import adamw, both, check_same

cloudpickle.register_pickle_by_value(sys.modules[__name__])

Clusters = Callable[[int], mk.Cluster]


# ---------------------------------------------------------------- equal to the real run

MESHES = [
    ("deep", mk.Plan(dp=2, tp=2, microbatches=2)),
    ("deep", mk.Plan(pp=2, dp=2, tp=2, zero=1, sequence_parallel=True, schedule="1f1b", microbatches=2)),
    ("deep", mk.Plan(pp=2, dp=2, cp=2, schedule="zb_h1", microbatches=3)),  # of 6 samples: 1 each
    ("deep", mk.Plan(pp=2, tp=2, schedule="zbv", microbatches=4)),  # of 2, 2, 1, 1 samples
    ("deep", mk.Plan(dp=2, cp=2, tp=2, zero=2, precision="bf16")),
    ("mlp", mk.Plan(pp=3, dp=2, schedule="gpipe", microbatches=2, recompute="full", precision="fp16")),
    ("tied", mk.Plan(pp=2, dp=2, schedule="interleaved_1f1b", virtual_stages=2, microbatches=2)),
]


@pytest.mark.parametrize(("kind", "plan"), MESHES, ids=repr)
def test_memory_communication_and_flops_are_those_of_the_real_run(
    clusters: Clusters, kind: str, plan: mk.Plan
) -> None:
    real, fake = both(clusters, kind, plan, adamw, max_grad_norm=1.0)
    check_same(real, fake)
    activations = [[held["activations"] for held in mk.Timeline.of(t).peak_memory] for t in (real, fake)]
    assert activations[0] == activations[1]
    assert np.isnan(fake.losses).all()
