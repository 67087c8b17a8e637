"""The bubble in a sentence: its parts add up to it, and it names the axis that ranks wait for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import mpkit as mk
from mpkit.models import GPT, next_token_loss
from mpkit.plan.mesh_of_trace import axis_of
from mpkit.timeline import simulation
from mpkit.timeline.diagnosis.bubble_words import bubble_words
from mpkit.timeline.traffic import members_of
from mpkit.trace import Kind

SLOW = "4x-titan-rtx"
PLANS = {
    "ring": mk.Plan(pp=2, cp=2, schedule="gpipe", microbatches=2),
    "ep": mk.Plan(dp=4, ep=2),
}


def waited_by_axis(timeline: mk.Timeline) -> dict[str, float]:
    """Return the seconds that ranks wait for each axis's communication, inside actions and between them."""
    one = timeline.step(timeline.steps[-1])
    waited: dict[str, float] = {}
    for wait in one.spans[(one.spans["kind"] == Kind.WAIT) & (one.spans["cause"] >= 0)]:
        call = one.spans[wait["cause"]]
        kind, rank, group, peer = (int(call[name]) for name in ("kind", "rank", "group", "peer"))
        members = members_of(one, kind, rank, group, peer)
        axis = axis_of(one.mesh, members, one.meta, exchange=kind == Kind.ALL_TO_ALL)
        # Until a message is sent its receiver waits for the sender's work, which is not communication.
        since = max(wait["start"], call["start"])
        waited[axis] = waited.get(axis, 0.0) + max(float(wait["end"] - since), 0.0)
    return waited


@pytest.fixture(scope="module")
def cluster() -> Iterator[mk.Cluster]:
    with mk.Cluster(1, device="cpu") as one:
        yield one


@pytest.mark.filterwarnings("ignore::mpkit.errors.UnwisePlan")
@pytest.mark.parametrize("name", PLANS)
def test_the_axis_that_ranks_wait_for_is_named(name: str, cluster: mk.Cluster) -> None:
    model = (
        (lambda: GPT(layers=2, width=32, heads=4, experts=4))
        if name == "ep"
        else (lambda: GPT(layers=2, width=32, heads=4))
    )
    tokens = torch.empty(16, 32, dtype=torch.long, device="meta")
    trace = mk.trace_fake(
        model, PLANS[name], batch=(tokens, tokens), loss=next_token_loss, optimizer=torch.optim.AdamW, hardware=SLOW,
        cluster=cluster,
    )  # fmt: skip
    timeline = mk.Timeline.of(trace, SLOW)
    waited = waited_by_axis(timeline)
    most = max(waited, key=lambda axis: waited[axis])
    words = bubble_words(0.2, timeline)
    named = re.search(r"communication \((.*?)\)", words)
    assert named and most in named[1].split(", "), (words, waited)
    assert np.isclose(sum(waited.values()) / 4, sum(timeline.exposed_comm) / 4, rtol=0.3), waited


def test_unlike_times_of_equal_actions_are_jitter_and_no_imbalance(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank whose first micro-batch touches memory for the others has no more to do than its peers."""
    whole = simulation._tables

    def slow_first(*rows: Any) -> tuple[Any, Any]:
        ops, memory = whole(*rows)
        ops["flops"][np.flatnonzero(ops["kind"] == Kind.FORWARD)[0]] *= 3
        return ops, memory

    monkeypatch.setattr(simulation, "_tables", slow_first)
    plan = mk.Plan.gpipe(3, 4)
    timeline = replace(mk.simulate(plan), clock="virtual")
    words = bubble_words(1 / 3, timeline)
    assert "jitter (equal actions took unlike times)" in words and "imbalance" not in words
    shares = [float(share) for share in re.findall(r"([\d.]+) %", words.partition("The ")[2])]
    assert (
        shares[0] == pytest.approx(100 * timeline.bubble, abs=0.06) == pytest.approx(sum(shares[1:]), abs=0.2)
    )
