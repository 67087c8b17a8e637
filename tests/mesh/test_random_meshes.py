"""200 meshes at random, of up to 8 ranks with everything that a Plan divides, equal serial training."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import mpkit as mk
from mpkit.models import GPT, next_token_loss
from tests.recipes import adamw
from tests.serial import Train, check_equal

pytestmark = pytest.mark.filterwarnings("ignore::mpkit.errors.UnwisePlan")

RANKS, HEADS, EXPERTS = 8, 4, 4
STAGES = {
    "looped_bfs": 2, "interleaved_1f1b": 2, "overlapped_1f1b": 2, "interleaved_zb": 2, "zbv": 2, "dualpipev": 2
}  # fmt: skip
WHOLE_GROUPS = ("interleaved_zb", "dualpipev")
HOW: dict[str, Any] = {"loss": next_token_loss, "optimizer": adamw, "steps": 3, "max_grad_norm": 0.5}


def degree(draw: Random, used: int, *degrees: int) -> int:
    """One of the degrees that there are ranks for."""
    return draw.choice([n for n in degrees if used * n <= RANKS])


def some_plan(draw: Random, *, experts: bool) -> mk.Plan:
    """At least two ranks, and one way or another of everything."""
    pp = degree(draw, 1, 1, 2, 2, 3)
    dp = degree(draw, pp, 1, 2, 3, 4)
    tp = degree(draw, pp * dp, 1, 2, 2, 3)
    cp = degree(draw, pp * dp * tp, *([1, 2, 4] if pp * dp * tp > 1 else [2, 4]))
    schedule = draw.choice(["1f1b", "zb_h1", "zb_h2", *STAGES] if pp > 1 else ["gpipe", "overlapped_1f1b"])
    zero, sequence = draw.randrange(4), tp > 1 and draw.random() < 0.7
    methods = {1: ["ring"], 2: ["ring", "ulysses"], 4: ["ring", "ulysses", (2, 2)]}[cp]
    shard = 2 if dp == 4 and zero and draw.random() < 0.7 else None
    etp = draw.choice([1, 1, tp, None] if sequence else [tp, None]) if experts and tp > 1 else None
    tokens_apart = (shard or dp) * cp * (tp if etp == 1 else 1)
    degrees = [n for n in (1, 2, 4) if tokens_apart % n == 0 and (n > 1 or tokens_apart % 2)]
    ep = draw.choice(degrees) if experts else 1
    microbatches = 2 * pp if schedule in WHOLE_GROUPS else draw.randint(1, 3)
    order, method = draw.choice(["contiguous", "zigzag"]), draw.choice(methods if tp < 3 else ["ring"])
    return mk.Plan(
        pp=pp, dp=dp, tp=tp, cp=cp, schedule=schedule, virtual_stages=STAGES.get(schedule, 1) if pp > 1 else 1,
        microbatches=microbatches, cp_order="contiguous" if method == "ulysses" else order, cp_method=method,
        sequence_parallel=sequence, zero=zero, dp_shard=shard, ep=ep, etp=etp,
        recompute=draw.choice(["none", "selective", "full"]), prefetch=draw.randrange(3),
        bucket_mb=draw.choice([0.001, 25]), offload=draw.choice(["none", "none", "optimizer"]) if zero else "none",
    )  # fmt: skip


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(200))
def test_a_random_mesh_equals_serial_training(train: Train, seed: int) -> None:
    draw = Random(seed)
    experts = draw.random() < 0.5
    plan = some_plan(draw, experts=experts)
    torch.manual_seed(seed)
    heads = HEADS * plan.tp if plan.cp_method != "ring" else max(HEADS, plan.tp)
    length = 2 * plan.cp * 2 * plan.tp
    model = GPT(
        vocab=draw.randint(plan.tp, 20), layers=plan.pp * plan.virtual_stages, width=heads * draw.randint(1, 3),
        heads=heads, length=length, experts=EXPERTS if experts else 0, top_k=draw.randint(1, 2),
    ).double()  # fmt: skip
    batch = max(plan.microbatches, 3) + draw.randrange(3)

    def tokens() -> Tensor:
        return torch.randint(model.config.vocab, (batch, length))

    check_equal(train, model, [(tokens(), tokens()) for _ in range(2)], plan, **HOW)
