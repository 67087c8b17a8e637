"""What a timeline says of a machine on which its plan is unwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import mpkit as mk
from mpkit.common.units import memory_share
from mpkit.devices.placement_notes import TP_INSIDE
from mpkit.models import GPT, next_token_loss
from mpkit.prediction.advice.rules import rules_of


@pytest.fixture(scope="module")
def trace(clusters: Callable[[int], mk.Cluster]) -> mk.Trace:
    tokens = torch.empty(8, 1024, dtype=torch.long, device="meta")
    return mk.trace_fake(
        lambda: GPT(layers=2, width=4096, heads=32, length=1024), mk.Plan(dp=2, tp=4), batch=(tokens, tokens),
        loss=next_token_loss, optimizer=torch.optim.AdamW, cluster=clusters(2),
    )  # fmt: skip


def test_tensor_parallelism_across_nodes_is_told_of_in_the_words_of_the_advice(trace: mk.Trace) -> None:
    inside = mk.Timeline.of(trace, mk.hardware("a100", nodes=2, per_node=4, nic="hdr"))
    across = mk.Timeline.of(trace, mk.hardware("a100", nodes=4, per_node=2, nic="hdr"))
    assert not [note for note in inside.notes if TP_INSIDE in note]
    (note,) = [note for note in across.notes if TP_INSIDE in note]
    assert "a group of 4 spans 2 nodes of 2 devices" in note
    advice = mk.advise("llama3-8b", "4x8-h100-ndr", global_batch=512, sequence=4096)
    assert any(TP_INSIDE in rule.says for rule in rules_of(advice.priced, advice.found))


def test_a_device_that_is_too_small_is_told_of(trace: mk.Trace) -> None:
    held = max(mk.Timeline.of(trace).memory, key=lambda held: sum(held.values()))
    peak = sum(held.values())
    assert peak == max(most["total"] for most in mk.Timeline.of(trace).peak_memory)
    machine = mk.hardware("a100", per_node=8)
    tight, enough = (
        replace(machine, device=replace(machine.device, memory=int(peak * share))) for share in (0.99, 1.01)
    )
    (note,) = [note for note in mk.Timeline.of(trace, tight).notes if "does not fit" in note]
    assert f"it needs {memory_share(peak, int(peak * 0.99))}, out by" in note
    assert f"the largest part is {max(held, key=held.__getitem__)}" in note
    assert not [note for note in mk.Timeline.of(trace, enough).notes if "does not fit" in note]
