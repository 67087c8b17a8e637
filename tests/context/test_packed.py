"""Packed documents over ranks: equal to serial training, and the attention that each rank computes.

A wrong distribution of chunks is a right permutation of tokens: no comparison of results sees that it is slow. So the
work per rank is asserted, as it was counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import mpkit as mk
from mpkit.models import GPTConfig, PackedGPT, document_mask, next_token_loss
from mpkit.plan.chunks import deal_chunks
from mpkit.strategies.context.layout import packed_lengths
from mpkit.trace.attention_work import AttentionWork
from tests.recipes import adamw
from tests.serial import EXACT, Train, check_equal, same, serial

Clusters = Callable[[int], mk.Cluster]
Documents = list[tuple[int, ...]]
ORDERS = ("contiguous", "zigzag", "documents", "balanced")
HOW: dict[str, Any] = {"loss": next_token_loss, "optimizer": adamw, "steps": 2}
THREE: Documents = [(4, 12), (4, 8, 4), (16,), (12, 4)]
SMALL = GPTConfig(vocab=11, layers=2, width=8, heads=2, length=32)


def gpt() -> nn.Module:
    torch.manual_seed(3)
    return PackedGPT(SMALL).double()


def packed(*batches: Documents) -> list[tuple[dict[str, Tensor], Tensor]]:
    """Batches of packed documents of these lengths."""
    torch.manual_seed(4)
    found = []
    for samples in batches:
        positions = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in samples])
        inputs = {"input_ids": torch.randint(11, positions.shape), "position_ids": positions}
        found.append((inputs, torch.randint(11, positions.shape)))
    return found


# ---- the work of each rank ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("documents", "expected"),
    [
        ([4, 12], {"contiguous": [20, 68], "zigzag": [52, 36], "documents": [44, 44], "balanced": [44, 44]}),
        (
            [4, 8, 4],
            {"contiguous": [20, 36], "zigzag": [20, 36], "documents": [28, 28], "balanced": [28, 28]},
        ),
    ],
)
def test_the_work_of_two_ranks_by_order(documents: list[int], expected: dict[str, list[int]]) -> None:
    """torch 2.13's _PerDocumentHeadTailLoadBalancer has 26 and 62 of the first; contiguous and zigzag are its own."""
    assert {order: mk.attention_work(documents, 2, order) for order in ORDERS} == expected


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(2, 8))
def test_balanced_blocks_are_all_tokens_once_and_nearly_equal_work(documents: list[int], n: int) -> None:
    """The last document is longer, so that ranks have equally many tokens."""
    documents[-1] += -sum(documents) % (8 * n)
    dealt = deal_chunks(documents, n, "balanced")
    tokens = [[token for chunk in chunks for token in range(*chunk)] for chunks in dealt]
    assert sorted(token for mine in tokens for token in mine) == list(range(sum(documents)))
    assert {len(mine) for mine in tokens} == {sum(documents) // n}
    work = mk.attention_work(documents, n, "balanced")
    assert max(work) * n <= 1.05 * sum(work)


def test_positions_that_begin_anew_are_documents() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]])
    assert packed_lengths({"position_ids": positions}) == ((3, 2), (5,))
    assert packed_lengths({"position_ids": positions[1:] + 2}) is None and packed_lengths(positions) is None
    assert document_mask(positions)[0, 0].sum() == 6 + 3


# ---- equal to serial training, and as balanced as the order is ----------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
def test_two_ranks_compute_what_the_order_gives_them(train: Train, order: str) -> None:
    run = check_equal(train, gpt(), packed(THREE), mk.Plan(cp=2, cp_order=order), **HOW)
    each = [mk.attention_work(documents, 2, order) for documents in THREE]
    times = SMALL.heads * SMALL.layers
    assert run.attention_work.by_rank == [times * sum(of) for of in zip(*each, strict=True)]
    assert run.proof is not None and "equal to serial training" in str(run.proof)


PLANS: list[dict[str, Any]] = [
    {"cp": 2, "cp_method": "ulysses", "dp": 2, "zero": 3},
    {"cp": 4, "cp_method": (2, 2), "cp_order": "balanced", "recompute": "full", "microbatches": 2},
    {"pp": 2, "cp": 2, "tp": 2, "schedule": "1f1b", "cp_order": "documents", "sequence_parallel": True,
     "microbatches": 2},
    {"pp": 3, "cp": 2, "schedule": "zb_h1", "cp_order": "balanced", "zero": 1, "recompute": "selective",
     "microbatches": 4},
]  # fmt: skip


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: " ".join(f"{k}={v}" for k, v in plan.items()))
def test_packed_documents_on_meshes(train: Train, plan: dict[str, Any]) -> None:
    """Also on ranks in the middle of a pipeline, which have no data; each has the same attention."""
    run = check_equal(train, gpt(), packed(THREE, THREE[::-1]), mk.Plan(**plan), **HOW)
    assert run.attention_work.imbalance == 1.0


def test_a_model_of_transformers_packs_documents(train: Train) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=11, hidden_size=8, intermediate_size=9, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=32, use_cache=False,
        )
    ).double()  # fmt: skip

    def loss(outputs: Any, targets: Tensor) -> Tensor:
        return next_token_loss(outputs.logits, targets)

    run = check_equal(
        train, model, packed(THREE[:2]), mk.Plan(cp=2, cp_order="balanced"), **{**HOW, "loss": loss}
    )
    assert run.attention_work.imbalance == 1.0


def test_the_work_as_text_and_as_a_picture() -> None:
    """Three steps of four ranks, of which two share a sequence each."""
    work = AttentionWork(
        np.array([[9.0, 9, 9, 9]] * 2 + [[20, 68, 44, 44]]), first=5, groups=[(0, 1), (2, 3)]
    )
    assert work.imbalance == pytest.approx(68 / 44) and len(work.to_dataframe()) == 12
    text, picture = str(work), work.to_svg()
    assert "in step 7" in text and "0.45 x mean" in text and "1.55 x the mean" in text
    assert picture.count("<title>pairs") == 4 and "68, 1.55 x mean" in picture


# ---- a loss over uneven numbers of tokens ---------------------------------------------------------------------------


def without_ends(data: list[Any]) -> list[Any]:
    """No target at the end of a document, as in packed training; the samples have different numbers of them."""
    for inputs, targets in data:
        ends = F.pad(inputs["position_ids"][:, 1:] == 0, (0, 1), value=True)
        targets[ends] = -100
        targets[0, 3:] = -100
    return data


MEAN = mk.mean_loss(lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()))


@pytest.mark.parametrize(
    ("plan", "loss"),
    [
        (mk.Plan(dp=2, microbatches=2, zero=2), next_token_loss),
        (mk.Plan(cp=2, cp_order="balanced", microbatches=2), MEAN),
        (mk.Plan(pp=2, dp=2, cp=2, schedule="1f1b", microbatches=2), next_token_loss),
    ],
    ids=["dp", "cp", "pp dp cp"],
)
def test_a_loss_over_uneven_numbers_of_tokens_is_that_of_the_whole_batch(
    train: Train, plan: mk.Plan, loss: Any
) -> None:
    """In micro-batches, replicas and parts of sequences: the mean is over all tokens with a target."""
    data = without_ends(packed(THREE, THREE[::-1]))
    losses, weights = serial(gpt(), data, loss=next_token_loss, optimizer=adamw, steps=2)
    same(train(gpt(), data, plan, **{**HOW, "loss": loss}), losses, weights, **EXACT)


# ---- what is rejected -----------------------------------------------------------------------------------------------


def test_documents_that_an_order_cannot_divide(clusters: Clusters) -> None:
    with pytest.raises(ValueError, match=r"one has 5 tokens: pad it to 8, .*cp_order='balanced'\)$"):
        clusters(2).train(gpt(), packed([(4, 12)], [(5, 11)]), mk.Plan(cp=2, cp_order="documents"), **HOW)
    with pytest.raises(ValueError, match=r"Plan\(cp=2, cp_method='ulysses'\)"):
        mk.Plan(cp=2, cp_method="ulysses", cp_order="balanced")
    with pytest.raises(ValueError, match="3 ranks cannot share 16 tokens equally: 15 they can"):
        mk.attention_work([4, 12], 3)
    run = clusters(1).train(gpt(), packed([(4, 12)]), mk.Plan.serial(), **HOW).wait()
    with pytest.raises(ValueError, match=r"mk\.Plan\(cp=2\)"):
        run.attention_work  # noqa: B018


# ---- at random ------------------------------------------------------------------------------------------------------


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore::mpkit.errors.UnwisePlan")
@settings(max_examples=15)
@given(data=st.data())
def test_random_documents_and_meshes_equal_serial_training(train: Train, data: Any) -> None:
    cp = data.draw(st.sampled_from([2, 2, 3, 4]))
    method = data.draw(st.sampled_from(["ring", (2, 2)])) if cp == 4 else "ring"
    pp, tp = data.draw(st.sampled_from([(1, 1), (2, 1), (1, 2)])) if cp < 4 else (1, 1)
    order = data.draw(st.sampled_from(["contiguous", "zigzag", "balanced"]))
    s = 4 * cp * data.draw(st.integers(1, 2))
    samples: Documents = []
    for _ in range(data.draw(st.integers(2, 4))):
        cuts = sorted(data.draw(st.sets(st.integers(1, s - 1), min_size=1, max_size=4)))
        samples.append(tuple(b - a for a, b in zip([0, *cuts], [*cuts, s], strict=True)))
    plan = mk.Plan(
        pp=pp, tp=tp, cp=cp, cp_method=method, cp_order=order, microbatches=data.draw(st.integers(1, 2)),
        zero=data.draw(st.integers(0, 3)), recompute=data.draw(st.sampled_from(["none", "selective", "full"])),
        schedule="1f1b" if pp > 1 else "gpipe",
    )  # fmt: skip
    run = check_equal(train, gpt(), packed(samples), plan, **HOW)
    each = [mk.attention_work(documents, plan.mesh.cp_ring, order) for documents in samples]
    pairs = SMALL.heads * SMALL.layers * sum(map(sum, each))
    assert sum(run.attention_work.by_rank) == pairs * (tp if tp > SMALL.heads else 1)
