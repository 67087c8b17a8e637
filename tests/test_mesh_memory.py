"""What ranks of a mesh hold, by the ledger, against the papers.

Activations of a transformer layer in 16 bits, in bytes; N = b s (Korthikanti et al. 2022, section 4, equations 1 to 4):

                          serial                     t ranks                     with sequence parallelism
    the paper's block     s b h (34 + 5 a s/h)       s b h (10 + 24/t + 5 a s/(h t))   s b h (34 + 5 a s/h) / t
    the kit's block       s b h (32 + x)             s b h (8 + 24/t + x_t)            s b h (32 + x) / t

The kit's block keeps, in elements of N h, with dropout 0 and attention that makes no scores in memory:

    norm1     its input 1, and 2 numbers per token
    qkv       its input 1                                       shared by t ranks: q, k, v 3
    attention its output 1/t, which is also the input of `out`; the log-sum-exp, a number in fp32 a token and head
    norm2     its input 1, and 2 numbers per token
    up        its input 1                                       shared: its output 4, the input of GELU
    out       its input 4/t

So 4 + 12/t of N h, two bytes each: 8 + 24/t; and x = 2 x 2 x 2/h + 4 a/h, of which attention's part is shared. Dropout
would add 2 masks: the paper's 34. Selective recomputation drops the log-sum-exp, full recomputation all but 2 s b h.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mpkit as mk
from mpkit.models import GPT, next_token_loss
from mpkit.plan.tensor_plan import Region, TensorPlan
from tests.serial import Train
from tests.test_mesh_training import adamw, sgd, tokens

pytestmark = pytest.mark.filterwarnings("ignore::mpkit.errors.UnwisePlan")

B, S, H, A, VOCAB = 2, 32, 32, 4, 32
"""b, of a micro-batch; s, h and a."""


# ---- a layer -----------------------------------------------------------------------------------------------------


def activations(train: Train, model: nn.Module, **how: Any) -> list[int]:
    """By rank the most that it held in a step."""
    plan = mk.Plan(precision="bf16", **how)
    data = tokens(B * plan.microbatches, S, VOCAB)
    run = train(model, data, plan, loss=next_token_loss, optimizer=sgd, steps=2)
    return [held["activations"] for held in run.timeline().peak_memory]


def gpt(layers: int) -> nn.Module:
    torch.manual_seed(0)
    return GPT(vocab=VOCAB, layers=layers, width=H, heads=A, length=S)


def of_a_layer(train: Train, make: Any, **how: Any) -> list[float]:
    """By rank bytes of a layer, in s b h: what two layers more add, for each that the rank has."""
    few, many = (activations(train, make(layers), **how) for layers in (2, 4))
    more = 2 / how.get("pp", 1) * S * B * H
    return [(after - before) / more for before, after in zip(few, many, strict=True)]


def kit(t: int, divided: bool, lse: bool = True) -> float:
    """Bytes of a layer of the kit's GPT, in s b h."""
    whole = 8 + 2 * 2 * 2 / H  # inputs of norms and of column layers; mean and 1/deviation of norms
    return whole / (t if divided else 1) + 24 / t + lse * 4 * A / H / t


@pytest.mark.soak
@pytest.mark.parametrize(("how", "wanted"), [
    ({}, kit(1, False)),
    ({"recompute": "selective"}, kit(1, False, lse=False)),
    ({"tp": 2}, kit(2, False)),
    ({"tp": 4}, kit(4, False)),
    ({"tp": 2, "sequence_parallel": True}, kit(2, True)),
    ({"tp": 4, "sequence_parallel": True}, kit(4, True)),
    ({"tp": 2, "sequence_parallel": True, "recompute": "selective"}, kit(2, True, lse=False)),
], ids=str)  # fmt: skip
def test_a_layer_of_the_kit_keeps_what_the_formula_says(
    train: Train, how: dict[str, Any], wanted: float
) -> None:
    found = of_a_layer(train, gpt, **how)
    assert found == pytest.approx([wanted] * len(found), rel=0.01)


@pytest.mark.soak
@pytest.mark.parametrize("divided", [False, True])
def test_the_first_stage_of_1f1b_holds_p_micro_batches(train: Train, divided: bool) -> None:
    """And the last one: 1."""
    how = {"pp": 2, "tp": 2, "schedule": "1f1b", "microbatches": 4, "sequence_parallel": divided}
    found = of_a_layer(train, gpt, **how)
    assert found == pytest.approx([2 * kit(2, divided)] * 2 + [kit(2, divided)] * 2, rel=0.01)


@pytest.mark.soak
@pytest.mark.parametrize(("how", "wanted"), [
    ({}, 2),
    ({"tp": 2, "sequence_parallel": True}, 2 / 2),
    ({"pp": 2, "schedule": "gpipe", "microbatches": 4}, 4 * 2),
], ids=str)  # fmt: skip
def test_full_recomputation_keeps_the_input_of_a_layer(
    train: Train, how: dict[str, Any], wanted: float
) -> None:
    """2 s b h, for each micro-batch that waits."""
    found = of_a_layer(train, gpt, recompute="full", **how)
    assert found == pytest.approx([wanted] * len(found), rel=0.01)


# ---- the paper's block -------------------------------------------------------------------------------------------


def dropped(x: Tensor) -> Tensor:
    """With a mask of a byte, as on a GPU."""
    return torch.native_dropout(x, 0.1, True)[0]


class PaperAttention(nn.Module):
    """With scores in memory, and dropout of them."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(H, 3 * H), nn.Linear(H, H)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, -1, H // A).permute(2, 0, 3, 1, 4)
        scores = dropped(torch.softmax(q @ k.transpose(-1, -2) * (H // A) ** -0.5, -1))
        mixed: Tensor = self.out((scores @ v).transpose(1, 2).reshape(b, s, -1))
        return mixed


class PaperBlock(nn.Module):
    """Figure 2 of the paper: layer norm, attention, dropout; layer norm, MLP, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(H), PaperAttention(), nn.LayerNorm(H)
        self.up, self.down = nn.Linear(H, 4 * H), nn.Linear(4 * H, H)

    def forward(self, x: Tensor) -> Tensor:
        x = x + dropped(self.attention(self.norm1(x)))
        return x + dropped(self.down(F.gelu(self.up(self.norm2(x)))))


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, H)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.tokens(x)
        return found


def paper(layers: int) -> nn.Module:
    torch.manual_seed(0)
    blocks = [(f"block{i}", PaperBlock()) for i in range(layers)]
    return nn.Sequential(OrderedDict([("tokens", Tokens()), *blocks, ("head", nn.Linear(H, VOCAB))]))


@cache
def paper_plan(layers: int) -> TensorPlan:
    return TensorPlan(
        (
            Region("block*.attention", ("block*.attention.qkv",), "block*.attention.out", A, (1, 1, 1)),
            Region("block*.up", ("block*.up",), "block*.down"),
        ),
        sequence=("block0", f"block{layers - 1}"),
    )


@pytest.mark.soak
@pytest.mark.parametrize(("t", "divided"), [(1, False), (2, False), (2, True), (4, True)])
def test_the_papers_block_keeps_what_the_paper_says(train: Train, t: int, divided: bool) -> None:
    """Within 5 %: the paper counts no statistics of layer norms."""
    few, many = (
        activations(train, paper(layers), tp=t, sequence_parallel=divided, tensor=paper_plan(layers))
        for layers in (2, 4)
    )
    found = [(after - before) / (2 * S * B * H) for before, after in zip(few, many, strict=True)]
    whole = 34 + 5 * A * S / H
    wanted = whole / t if divided else 10 + 24 / t + 5 * A * S / (H * t)
    assert found == pytest.approx([wanted] * t, rel=0.05)


# ---- parameters, gradients, optimizer ----------------------------------------------------------------------------


@pytest.mark.soak
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("mesh", [
    {"dp": 2, "tp": 2}, {"cp": 2, "tp": 2}, {"pp": 2, "dp": 2, "tp": 2, "cut": ["block1"]},
], ids=str)  # fmt: skip
def test_states_are_divided_by_every_axis(train: Train, mesh: dict[str, Any], zero: int) -> None:
    """To the byte: layers over tp, stages over pp, and by ZeRO over dp x cp. fp32: 4 psi, 4 psi, 8 psi for Adam."""
    plan = mk.Plan(zero=zero, **mesh)
    model, data = gpt(2), tokens(4, S, VOCAB)
    # The last of 4 steps: after the first ones DDP lays out its buckets anew, and for a moment has both.
    run = train(model, data, plan, loss=next_token_loss, optimizer=adamw, steps=4)
    divided = ("qkv", "up", "attention.out.weight", "mlp.out.weight", "tokens", "logits")
    n = plan.dp * plan.cp
    for rank, held in enumerate(run.timeline().peak_memory):
        mine = [
            p.numel() // (2 if any(d in name for d in divided) else 1)
            for name, p in model.named_parameters()
            if plan.pp == 1 or (name.split(".")[0] in ("block1", "head")) == (plan.mesh.place(rank).pp == 1)
        ]
        psi = sum(mine)
        assert psi % n == 0, "so that no padding is needed"
        assert held["params"] == 4 * psi // (n if zero == 3 else 1)
        assert held["grads"] == 4 * psi // (n if zero >= 2 else 1)
        assert held["optimizer"] == 8 * psi // (n if zero >= 1 else 1)
