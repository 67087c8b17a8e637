"""Memory played on tensors without content, beside torch.profiler's allocator and Megatron's table.

Megatron's table 2 (Korthikanti et al. 2022): activations of a transformer layer in 16 bits, in bytes; N = s b h.

    no parallelism                            N (34 + 5 a s/h)
    t ranks                                   N (10 + 24/t + 5 a s/(h t))
    t ranks, sequence parallelism             N (34/t + 5 a s/(h t))
    t ranks, selective recomputation          N (10 + 24/t)
    both                                      N 34/t
    full recomputation                        N 2
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mpkit as mk
from benchmarks.memory import CASES, LIMIT, PLANS, compare
from mpkit.models import next_token_loss
from mpkit.plan.tensor_plan import Region, TensorPlan
from mpkit.prediction.dry_run.memory import played_memory

Clusters = Callable[[int], mk.Cluster]


# ---- beside torch.profiler ---------------------------------------------------------------------------------------

FAST = {("ResNet", "recomputed"), ("HF Mixtral", "plain"), ("LSTM", "plain")}
ALL = [(model, plan) for model in CASES for plan in PLANS]


@pytest.mark.parametrize(
    ("model", "plan"),
    [pytest.param(*row, marks=() if row in FAST else pytest.mark.soak) for row in ALL],
)
def test_the_peak_is_the_allocators(clusters: Clusters, model: str, plan: str) -> None:
    for row in compare(CASES[model], PLANS[plan], clusters(PLANS[plan].ranks)):
        assert abs(row.off) <= LIMIT


def constructed(rate: float) -> nn.Module:
    """Reads tensors while it is made, as models do that draw weights again and rates of dropout by depth."""
    layer = nn.Linear(8, 8)
    nn.init.trunc_normal_(layer.weight)
    return nn.Sequential(layer, nn.Dropout(torch.linspace(0, rate, 3)[0].item()))


def test_a_constructor_may_read_tensors(clusters: Clusters) -> None:
    shape = torch.empty(4, 8, device="meta")
    held = played_memory(
        lambda: constructed(0.0), mk.Plan.serial(), (shape, shape), F.mse_loss, torch.optim.AdamW,
        cluster=clusters(1),
    )  # fmt: skip
    assert held[0]["params"] == 4 * (8 * 8 + 8)


def test_the_loss_holds_two_more_copies_of_the_logits(clusters: Clusters) -> None:
    """The gradients of nll_loss and of log_softmax, beside the log_softmax that was saved; weights are few."""
    n, vocab = 64, 4096
    x, y = torch.empty(n, 1, device="meta"), torch.empty(n, dtype=torch.long, device="meta")
    held = played_memory(
        lambda: nn.Sequential(nn.Linear(1, vocab, bias=False)), mk.Plan.serial(), (x, y), F.cross_entropy,
        torch.optim.SGD, cluster=clusters(1),
    )  # fmt: skip
    logits = 4 * n * vocab
    assert held[0]["buffers"] == pytest.approx(2 * logits, rel=0.01)
    assert held[0]["activations"] == pytest.approx(logits, rel=0.01)


# ---- Megatron's table --------------------------------------------------------------------------------------------

S, B, H, A, T, VOCAB = 2048, 4, 6144, 64, 8, 64
"""The sizes of the paper's 22B model, but for its vocabulary, on 8 ranks."""


def dropped(x: Tensor) -> Tensor:
    """With a mask of a byte, as on a GPU."""
    return torch.native_dropout(x, 0.1, True)[0]


class Attention(nn.Module):
    """With scores in memory, and dropout of them; or as the function that selective recomputation does again."""

    def __init__(self, scores: bool) -> None:
        super().__init__()
        self.scores = scores
        self.qkv, self.out = nn.Linear(H, 3 * H), nn.Linear(H, H)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, -1, H // A).permute(2, 0, 3, 1, 4)
        if self.scores:
            mixed = dropped(torch.softmax(q @ k.transpose(-1, -2) * (H // A) ** -0.5, -1)) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(b, s, -1))
        return out


class Block(nn.Module):
    """Figure 2 of the paper: layer norm, attention, dropout; layer norm, MLP, dropout."""

    def __init__(self, scores: bool) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(H), Attention(scores), nn.LayerNorm(H)
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


def megatron(layers: int, scores: bool) -> nn.Module:
    blocks = [(f"block{i}", Block(scores)) for i in range(layers)]
    return nn.Sequential(OrderedDict([("tokens", Tokens()), *blocks, ("head", nn.Linear(H, VOCAB))]))


@cache
def divided(layers: int) -> TensorPlan:
    return TensorPlan(
        (
            Region("block*.attention", ("block*.attention.qkv",), "block*.attention.out", A, (1, 1, 1)),
            Region("block*.up", ("block*.up",), "block*.down"),
        ),
        sequence=("block0", f"block{layers - 1}"),
    )


SCORES = 5 * A * S / H


@pytest.mark.filterwarnings("ignore::mpkit.errors.UnwisePlan")
@pytest.mark.parametrize(
    ("how", "wanted"),
    [
        pytest.param({}, 34 + SCORES, marks=pytest.mark.soak),
        pytest.param({"tp": T}, 10 + 24 / T + SCORES / T, marks=pytest.mark.soak),
        pytest.param({"tp": T, "sequence_parallel": True}, (34 + SCORES) / T, marks=pytest.mark.soak),
        pytest.param({"tp": T, "recompute": "selective"}, 10 + 24 / T, marks=pytest.mark.soak),
        ({"tp": T, "sequence_parallel": True, "recompute": "selective"}, 34 / T),
        pytest.param({"recompute": "full"}, 2, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_a_layers_activations_are_those_of_megatrons_table(
    clusters: Clusters, how: dict[str, Any], wanted: float
) -> None:
    few, many = (activations(clusters, layers, how) for layers in (2, 3))
    assert (many - few) / (S * B * H) == pytest.approx(wanted, rel=0.01)


def activations(clusters: Clusters, layers: int, how: dict[str, Any]) -> int:
    """The most activations of a rank."""
    plan = mk.Plan(precision="bf16", tensor=divided(layers) if "tp" in how else None, **how)
    tokens = torch.empty(B, S, dtype=torch.long, device="meta")
    trace = mk.trace_fake(
        lambda: megatron(layers, scores=plan.recompute != "selective"), plan, batch=(tokens, tokens),
        loss=next_token_loss, optimizer=torch.optim.AdamW, cluster=clusters(1),
    )  # fmt: skip
    return mk.Timeline.of(trace).peak_memory[0]["activations"]
