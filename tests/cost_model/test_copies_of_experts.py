"""Copies of experts in estimates: what a rank borrows and sends is what a dry run holds and sends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mpkit as mk
from mpkit.models import GPT, next_token_loss, place_experts
from mpkit.prediction.dry_run.memory import held_at_peak
from mpkit.prediction.workload.routed_load import RoutedLoad, placed_load
from mpkit.strategies.comm.process_group import FakeGroup
from mpkit.strategies.experts.copies import ExpertCopies
from mpkit.timeline.traffic import flows
from mpkit.trace.expert_load import ExpertLoad
from tests.recipes import adamw

ORDERS = {
    "block0.mlp.experts": [0, 1, 2, 3, 0, 4, 5, 6, 0, 7, 1, 0],
    "block1.mlp.experts": [0, 1, 2, 3, 3, 4, 5, 6, 5, 7, 1, 0],
}
EACH = 2 * 256 * 1024 * 4
"""The bytes of an expert."""
MACHINE = "8x-a100-nvlink"
ASKED: dict[str, Any] = {"global_batch": 16, "sequence": 256, "stack": "mpkit"}


def gpt() -> torch.nn.Module:
    return GPT(layers=2, width=256, heads=8, vocab=512, length=256, experts=8, top_k=2)


def copied() -> torch.nn.Module:
    return place_experts(gpt(), ORDERS)


@pytest.mark.parametrize(
    "plan",
    [
        mk.Plan(dp=4, ep=4, microbatches=2),
        *(
            pytest.param(plan, marks=pytest.mark.soak)
            for plan in (mk.Plan(dp=4, ep=4), mk.Plan(dp=4, ep=2, zero=1), mk.Plan(dp=4, ep=2, zero=3))
        ),
    ],
    ids=repr,
)
def test_copies_take_what_they_take_in_a_dry_run(
    clusters: Callable[[int], mk.Cluster], plan: mk.Plan
) -> None:
    tokens = torch.empty(16, 256, dtype=torch.long, device="meta")
    params, sent, said, played, guessed = [], [], [], [], []
    for make in (gpt, copied):
        trace = mk.trace_fake(
            make, plan, batch=(tokens, tokens), loss=next_token_loss, optimizer=adamw, hardware=MACHINE,
            cluster=clusters(1), steps=2,
        )  # fmt: skip
        timeline = mk.Timeline.of(trace)
        params.append(np.array([held_at_peak(rank)["params"] for rank in trace.ranks]))
        routed = [flow for flow in flows(timeline) if flow.axis == "ep"]
        sent.append(
            np.array([sum(flow.payload for flow in routed if flow.rank == rank) for rank in range(4)])
        )
        said.append(mk.estimate(make(), plan, MACHINE, **ASKED))
        peak = max(sum(held_at_peak(rank).values()) for rank in trace.ranks)
        played.append((timeline.step(1).step_time, peak))
        memory = said[-1].stage_memory[0]
        guessed.append((said[-1].step_time, sum(memory.values()) - memory["context"]))
        assert memory["params"] == params[-1].max()
    for guess, play, off in zip(
        zip(*guessed, strict=True), zip(*played, strict=True), (0.09, 0.06), strict=True
    ):
        assert guess[1] / guess[0] == pytest.approx(play[1] / play[0], rel=off)  # what copies add
    assert said[1].layout.load is not None and said[0].layout.load is None
    copies = said[1].layout.load.copies(plan.ep)
    place = np.arange(4) % plan.ep
    assert (params[1] - params[0]).tolist() == (EACH * copies.borrowed.sum(0)[place]).tolist()
    weights = EACH * (copies.borrowed + copies.lent).sum(0)[place]
    counts = (sent[1] - sent[0]) - weights  # of rows: int64 for each slot more
    assert (counts >= 0).all() and counts.max() < 1e-4 * weights.max()
    assert said[1].step_time > said[0].step_time and said[1].peak_memory > said[0].peak_memory


@given(st.permutations([0, 0, 0, 1, 1, 2, 3, 3]), st.sampled_from([1, 2, 4]))
def test_ranks_borrow_and_lend_what_a_training_does(order: list[int], ep: int) -> None:
    module = GPT(layers=1, width=8, heads=2, experts=4).block0.mlp.experts
    found = RoutedLoad("given", orders=(tuple(order),)).copies(ep)
    ranks = [ExpertCopies(module, order, 4, FakeGroup(ep, rank)) for rank in range(ep)]
    assert found.borrowed[0].tolist() == [rank.count for rank in ranks]
    assert found.lent[0].tolist() == [rank.lent for rank in ranks]
    assert found.most_borrowed == found.borrowed.max() and found.most_moved == max(
        found.borrowed.max(), found.lent.max()
    )


def test_the_orders_are_those_of_the_model_or_of_a_balance() -> None:
    """A balance says where experts would be; a measured load is that of the slots that the model's have."""
    plan = mk.Plan(dp=4, ep=4)
    rows = {name: np.array([[[16.0, *[1.0] * 7]]]) for name in ORDERS}
    load = ExpertLoad(rows, first=0)
    even, busy, placed, balanced = (
        mk.estimate(make(), plan, MACHINE, expert_load=each, **ASKED)
        for make, each in ((copied, None), (gpt, load), (copied, load), (gpt, load.balance(12, gpus=4)))
    )
    # Expert 0 has four slots in the first layer, of which one is beside 3 and 4; and two in the second.
    layers = [1 + 16 / 4 + 1, 16 / 2 + 1 / 2 + 1]
    assert placed.layout.busiest == pytest.approx(sum(layers) / (2 * 23 / 4))
    assert even.layout.busiest == pytest.approx((2.25 + 2.0) / 2 / 2) and busy.layout.busiest == 17 / (23 / 4)
    assert balanced.layout.busiest < placed.layout.busiest < busy.layout.busiest
    assert (
        balanced.step_time < busy.step_time
        and balanced.stage_memory[0]["params"] > busy.stage_memory[0]["params"]
    )
    assert "copies: 1 experts per layer" in str(even) and "uniform routing" in str(even)
    alone = mk.estimate(copied(), mk.Plan(dp=4), MACHINE, **ASKED)
    assert alone.step_time == mk.estimate(gpt(), mk.Plan(dp=4), MACHINE, **ASKED).step_time
    one = place_experts(gpt(), {"block0.mlp.experts": ORDERS["block0.mlp.experts"]})
    found = placed_load(None, one, 2)
    assert found is not None and found.copies(4).borrowed[1].tolist() == [0] * 4


def test_advice_about_copies_has_their_memory_and_time() -> None:
    rows = np.ones((1, 1, 8))
    rows[..., 0] = 8
    load = ExpertLoad({"any": rows}, first=0)
    asked: dict[str, Any] = {"global_batch": 64, "sequence": 4096, "expert_load": load.balance(12, gpus=4)}
    advice = mk.advise("mixtral-8x7b", "2x8-h100-ndr", **asked)
    assert all(12 % each.layout.ep == 0 for each in advice.found)
    copies = [(plan, each) for plan, each in zip(advice.plans, advice.found, strict=False) if plan.ep > 1]
    for plan, each in copies:
        assert advice.estimate(plan).step_time == pytest.approx(each.seconds, rel=1e-9)
        assert advice.fullest_bytes(advice.estimate(plan)) == pytest.approx(each.memory, rel=1e-9)
    with pytest.raises(ValueError, match=r"ep=8 ranks cannot have equally many of 12 slots .*: ep=4"):
        mk.estimate("mixtral-8x7b", mk.Plan(dp=8, ep=8), MACHINE, **asked)
