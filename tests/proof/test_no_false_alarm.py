"""No false alarm: random trainings, each under six plans, prove themselves equal in every step."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk

pytestmark = pytest.mark.filterwarnings("ignore::mpkit.errors.UnwisePlan")

WIDTH, CLASSES, STEPS, EACH = 12, 5, 3, 6

PLANS: dict[str, Callable[..., mk.Plan]] = {
    "serial": lambda **how: mk.Plan(microbatches=3, **how),
    "ddp": lambda **how: mk.Plan.ddp(2, microbatches=2, **how),
    "zero1": lambda **how: mk.Plan.zero(1, 3, **how),
    "zero3": lambda **how: mk.Plan.zero(3, 2, microbatches=2, **how),
    "1f1b": lambda **how: mk.Plan.pipeline("1f1b", 2, 4, **how),
    "2d": lambda **how: mk.Plan(pp=2, dp=2, schedule="gpipe", microbatches=2, recompute="full", **how),
}
PRECISIONS = {"fp64": "full", "fp32": "full", "bf16": "bf16", "fp16": "fp16"}

ACTIVATIONS = (nn.ReLU, nn.Tanh, nn.GELU, nn.SiLU, nn.Softplus, nn.Hardtanh, nn.Mish, nn.ELU, nn.Sigmoid)
OPTIMIZERS: tuple[Callable[[Any], torch.optim.Optimizer], ...] = (
    lambda p: torch.optim.SGD(p, lr=0.05),
    lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.01),
    lambda p: torch.optim.AdamW(p, lr=1e-2),
    lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True),
    lambda p: torch.optim.Adagrad(p, lr=0.05),
    lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5),
    lambda p: torch.optim.NAdam(p, lr=1e-3),
    lambda p: torch.optim.Adamax(p, lr=1e-2),
)
LOSSES: tuple[Callable[[Tensor, Tensor], Any], ...] = (
    F.cross_entropy,
    lambda out, y: F.cross_entropy(out, y, label_smoothing=0.1),
    lambda out, y: F.mse_loss(out, F.one_hot(y, CLASSES).to(out)),
    lambda out, y: F.l1_loss(out, F.one_hot(y, CLASSES).to(out)),
    lambda out, y: F.huber_loss(out, F.one_hot(y, CLASSES).to(out)),
    lambda out, y: F.binary_cross_entropy_with_logits(out, F.one_hot(y, CLASSES).to(out)),
    lambda out, y: (F.cross_entropy(out, y, reduction="sum"), torch.tensor(len(y))),
    lambda out, y: (out.logsumexp(1) - out.gather(1, y[:, None])[:, 0]).square().mean(),
)


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.inner(x)
        return made


class Mixed(nn.Module):
    """Attention over the features, as tokens of three."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(3, 1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.unflatten(1, (-1, 3))
        made: Tensor = self.attention(tokens, tokens, tokens, need_weights=False)[0].flatten(1)
        return made


def layer(draw: random.Random) -> nn.Module:
    kinds: list[Callable[[], nn.Module]] = [
        lambda: nn.Linear(WIDTH, WIDTH, bias=draw.random() < 0.7),
        lambda: nn.LayerNorm(WIDTH),
        lambda: draw.choice(ACTIVATIONS)(),
        lambda: nn.Dropout(draw.choice((0.1, 0.5))),
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), draw.choice(ACTIVATIONS)()),
        lambda: nn.GroupNorm(3, WIDTH),
        lambda: nn.Sequential(nn.Unflatten(1, (3, 4)), nn.Conv1d(3, 3, 3, padding=1), nn.Flatten()),
        Mixed,
    ]
    made = draw.choice(kinds)()
    return Residual(made) if draw.random() < 0.3 else made


def training(seed: int) -> dict[str, Any]:
    """A model, data, a loss, an optimizer, and what else `train` takes."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    layers = [nn.Linear(WIDTH, WIDTH), *(layer(draw) for _ in range(draw.randint(1, 8)))]
    if draw.random() < 0.2:
        layers[0].requires_grad_(False)
    model = nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))
    if draw.random() < 0.2:
        model.append(nn.Linear(CLASSES, CLASSES)).append(nn.Tanh())
    size = draw.randint(6, 17)
    scale = 10 ** draw.uniform(-1, 1)
    data = [(scale * torch.randn(size, WIDTH), torch.randint(0, CLASSES, (size,))) for _ in range(STEPS)]
    return {
        "model": model, "data": data, "loss": draw.choice(LOSSES), "optimizer": draw.choice(OPTIMIZERS),
        "max_grad_norm": draw.choice((None, 0.1, 10.0)), "steps": STEPS, "verify": "all",
        "lr_schedule": draw.choice((None, lambda step: 1 / (1 + step))),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("first", "precision"),
    [
        pytest.param(n, precision, marks=() if (n, precision) == (0, "bf16") else pytest.mark.soak)
        for n in range(0, 300, EACH)
        for precision in PRECISIONS
    ],
)
def test_none(clusters: Callable[[int], mk.Cluster], first: int, precision: str) -> None:
    """Of the first few trainings, each has one of the plans; of the others (soak) all six."""
    for seed in range(first, first + EACH):
        for number, (name, plan) in enumerate(PLANS.items()):
            if first or number == seed % len(PLANS):
                how = training(seed)
                model = copy.deepcopy(how.pop("model")).to(torch.float64 if precision == "fp64" else None)
                if precision == "fp64":
                    how["data"] = [(x.double(), y) for x, y in how["data"]]
                made = plan(precision=PRECISIONS[precision])
                last = random.Random(seed).randint(made.microbatches, 6)  # too few for all ranks, perhaps
                how["data"][-1] = tuple(each[:last] for each in how["data"][-1])
                run = clusters(made.ranks).train(model, plan=made, **how).wait()
                assert run.proof.steps == (1, 2, 3), (seed, name, str(run.proof))
