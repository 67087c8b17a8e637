"""Memory played on tensors without content, beside torch.profiler's allocator."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpkit as mk
from benchmarks.memory import CASES, LIMIT, PLANS, compare
from mpkit.prediction.dry_run.trace import played_memory

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
