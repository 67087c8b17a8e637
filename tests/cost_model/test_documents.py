"""Packed documents in estimates: the busiest rank's attention is that of a run, and advice balances it."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mpkit as mk
from mpkit.cli import main
from mpkit.models import GPT, PackedGPT, next_token_loss
from mpkit.plan.tensor_checks import ORDERS
from mpkit.prediction.cost_model.known_models import architecture_of
from mpkit.prediction.dry_run.memory import held_at_peak
from mpkit.prediction.workload.documents import busiest_share
from mpkit.strategies.comm.process_group import FakeGroup
from mpkit.strategies.context.block import Tiles
from mpkit.strategies.context.layout import SequenceLayout
from tests.recipes import adamw

MACHINE = "8x-h100-nvlink"
LONG: dict[str, Any] = {"global_batch": 8, "sequence": 65_536}
DOCUMENTS = [4096] * 4 + [49_152]


def attention(plan: mk.Plan, documents: list[int] | None, **more: Any) -> float:
    """Seconds of attention, of a stack whose attention has no more causes than its scores."""
    asked: dict[str, Any] = {"stack": "mpkit"} | LONG | more
    return mk.estimate("llama3-8b", plan, MACHINE, documents=documents, **asked).because["attention"]


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6), st.sampled_from([1, 2, 3]), st.sampled_from(ORDERS)
)
def test_the_busiest_rank_computes_what_a_ring_does(blocks: list[int], n: int, order: str) -> None:
    documents = tuple(2 * n * each for each in blocks)
    s = sum(documents)
    layout, pairs = SequenceLayout(n, order, 1, (documents,)), []
    for rank in range(n):
        ring = Tiles(FakeGroup(n, rank), True, layout, s // n)
        pairs.append(sum(tile.count_pairs(1) for r in range(n) for tile in ring.tiles_of(r, s // n)))
    assert pairs == mk.attention_work(documents, n, order)
    share = busiest_share(documents, n, order)
    assert share * s**2 / n + s / n / 2 == pytest.approx(
        max(pairs)
    )  # of each token with itself, half is counted


@pytest.mark.parametrize(("order", "stack"), [*product(ORDERS[:3], ("pytorch", "mpkit"))])
def test_one_document_is_a_sequence(order: str, stack: str) -> None:
    plan = mk.Plan(cp=4, cp_order=order)
    asked: dict[str, Any] = LONG | {"stack": stack, "global_batch": 1}
    whole = mk.estimate("llama3-8b", plan, MACHINE, **asked)
    assert mk.estimate("llama3-8b", plan, MACHINE, documents=[65_536], **asked).step_time == whole.step_time


def test_attention_takes_as_long_as_the_busiest_ranks() -> None:
    took = {order: attention(mk.Plan(cp=8, cp_order=order), DOCUMENTS) for order in ORDERS}
    busiest = {order: busiest_share(tuple(DOCUMENTS), 8, order) for order in ORDERS}
    for order in ORDERS:
        assert took[order] / took["contiguous"] == pytest.approx(
            busiest[order] / busiest["contiguous"], rel=1e-6
        )
    heads = attention(mk.Plan(cp=8, cp_method="ulysses"), DOCUMENTS)
    whole = busiest_share(tuple(DOCUMENTS), 1, "contiguous")
    assert heads / took["contiguous"] == pytest.approx(whole / busiest["contiguous"], rel=1e-6)


def test_whole_sequences_attend_with_a_mask_as_a_dry_run_does(
    clusters: Callable[[int], mk.Cluster],
) -> None:
    """Where no ranks share sequences a mask hides the other documents' scores, which are computed."""

    tokens = torch.empty(4, 2048, dtype=torch.long, device="meta")
    asked: dict[str, Any] = {"global_batch": 4, "sequence": 2048, "stack": "mpkit"}
    played, said = [], []
    for kind, inputs, documents in (
        (PackedGPT, {"input_ids": tokens, "position_ids": tokens}, [512] * 4),
        (GPT, tokens, None),
    ):
        make = partial(kind, layers=2, width=512, heads=8, vocab=1024, length=2048)
        trace = mk.trace_fake(
            make, mk.Plan(), batch=(inputs, tokens), loss=next_token_loss, optimizer=adamw, hardware="8x-a100-nvlink",
            cluster=clusters(1), steps=2,
        )  # fmt: skip
        played.append((mk.Timeline.of(trace).step(1).step_time, held_at_peak(trace.ranks[0])["activations"]))
        found = mk.estimate(make(), mk.Plan(), "8x-a100-nvlink", documents=documents, **asked)
        said.append((found.step_time, found.stage_memory[0]["activations"]))
        assert found.step_time == pytest.approx(played[-1][0], rel=0.05)
    more = [packed[1] - plain[1] for packed, plain in (played, said)]
    assert more[1] == pytest.approx(more[0], rel=0.01) and said[0][0] > 1.1 * said[1][0]


def test_shorter_documents_take_less_time_and_count_fewer_flops() -> None:
    plan = mk.Plan(zero=3, dp=8, precision="bf16")
    found = [
        mk.estimate("llama3-8b", plan, MACHINE, documents=[65_536 // n] * n, **LONG)
        for n in (1, 2, 4, 16, 64)
    ]
    times = [each.step_time for each in found]
    assert times == sorted(times, reverse=True) and times[-1] < 0.5 * times[0]
    flops = [each.tflops_per_gpu * each.step_time for each in found]
    per_document = architecture_of("llama3-8b").forward_flops(1024, causal=False)
    assert flops == sorted(flops, reverse=True)
    assert flops[-1] == pytest.approx(3 * 64 * per_document / 1e12, rel=1e-9)


def test_tokens_of_a_model_that_looks_both_ways_attend_to_their_whole_document() -> None:
    bert = {"layers": 12, "hidden": 768, "heads": 12, "vocabulary": 30_522, "causal": False}
    asked: dict[str, Any] = {"global_batch": 1, "sequence": 8192, "stack": "pytorch"}
    for how in ({}, {"causal": True}):
        whole, half = (
            mk.estimate(bert | how, mk.Plan(), MACHINE, documents=each, **asked).because["attention"]
            for each in (None, [4096, 4096])
        )
        assert half == pytest.approx(whole / 2, rel=0.01)


def test_advice_balances_the_documents() -> None:
    """Each plan has the order in which the busiest rank has least; its estimate is that of the search."""
    advice = mk.advise("llama3-8b", MACHINE, documents=DOCUMENTS, **LONG)
    orders = {plan.cp_order for plan in advice.plans if plan.mesh.cp_ring > 1}
    assert orders == {"documents"} and "1.00 times the mean" in str(advice)
    for plan, found in zip(advice.plans, advice.found, strict=False):
        assert advice.estimate(plan).step_time == pytest.approx(found.seconds, rel=1e-9)
    odd = mk.advise("llama3-8b", MACHINE, documents=[4095, 61_441], **LONG)
    assert {plan.cp_order for plan in odd.plans if plan.mesh.cp_ring > 1} == {"balanced"}
    zigzag = mk.advise("llama3-8b", MACHINE, documents=DOCUMENTS, stack="megatron", **LONG)
    assert {each.layout.cp_order for each in zigzag.found if each.layout.ring > 1} <= {"zigzag"}


def test_what_fits_is_said_of_the_same_documents() -> None:
    plan = mk.Plan(cp=8, zero=3, cp_order="balanced", precision="bf16")
    found = mk.fits("llama3-8b", plan, MACHINE, documents=DOCUMENTS, **LONG)
    assert found.remedy is not None and found.remedy.estimate.layout.documents == tuple(DOCUMENTS)
    assert "Assumed of documents: 5 per sequence" in str(found)


@pytest.mark.parametrize(
    ("documents", "plan", "words"),
    [
        ([4096] * 3, mk.Plan(), "add up to 12288 tokens, and sequence=65536: the 53248 tokens of padding are a doc"),
        ([65_536, 1], mk.Plan(), "add up to 65537 tokens, and sequence=65536: sequence=65537"),
        ([65_536, 0], mk.Plan(), r"the lengths, in tokens, .*documents=\[16384, 49152\]"),
        ("65536", mk.Plan(), "the lengths, in tokens"),
        ([36, 65_500], mk.Plan(cp=8, cp_order="documents"), r"pad it to 48.*Plan\(cp=8, cp_order='balanced'\)"),
    ],
)  # fmt: skip
def test_documents_that_cannot_be_are_rejected(documents: Any, plan: mk.Plan, words: str) -> None:
    for call in (mk.estimate, mk.fits):
        with pytest.raises(ValueError, match=words):
            call("llama3-8b", plan, MACHINE, documents=documents, **LONG)
    if plan.cp == 1:
        with pytest.raises(ValueError, match=words):
            mk.advise("llama3-8b", MACHINE, documents=documents, **LONG)
    else:
        assert mk.estimate(
            "llama3-8b", mk.Plan(cp=8, cp_order="balanced"), MACHINE, documents=documents, **LONG
        )


def test_only_models_of_tokens_have_documents_and_positions_begin_anew_in_each() -> None:
    asked: dict[str, Any] = {"global_batch": 1, "sequence": 2048}
    with pytest.raises(ValueError, match="has an encoder and a decoder"):
        mk.estimate("t5-large", mk.Plan(), MACHINE, documents=[1024, 1024], **asked)
    with pytest.raises(ValueError, match=r"sequence=2048.*learned positions for 1024"):
        mk.estimate("gpt2", mk.Plan(), MACHINE, **asked)
    assert mk.estimate("gpt2", mk.Plan(), MACHINE, documents=[1024, 1024], **asked).step_time > 0
    with pytest.raises(
        ValueError, match=r"a document of 1536 tokens: .* for 1024 tokens.*documents of as many"
    ):
        mk.advise("gpt2", MACHINE, documents=[512, 1536], **asked)


def test_documents_in_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "llama3-8b", "--hardware", MACHINE, "--documents", "4096", "12288"]
    main(["estimate", *words, "--plan", "cp8+zero3+zigzag+bf16"])
    printed = capsys.readouterr().out
    assert (
        re.search(r"samples of 16384 tokens", printed)
        and "2 per sequence, of 4096 to 12288 tokens" in printed
    )
