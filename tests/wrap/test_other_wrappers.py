"""mk.tensor_parallel and mk.pipeline in a loop of one's own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.models import GPT, MLP

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from loops import apart, models  # noqa: E402

Clusters = Callable[[int], mk.Cluster]


# ---------------------------------------------------------------- mk.tensor_parallel


def language_loss(out: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), ids.flatten())


def cannot_be_divided(_: Any) -> None:
    mk.tensor_parallel(nn.Bilinear(3, 3, 3))


def test_what_tensor_parallelism_cannot_divide_is_a_value_error(clusters: Clusters) -> None:
    with pytest.raises(mk.RankFailed, match="ValueError"):
        clusters(2).run(cannot_be_divided)


# ---------------------------------------------------------------- mk.pipeline


def staged(ctx: Any, schedule: str, options: dict[str, Any]) -> list[float]:
    module, plain = models(ctx, lambda: GPT(layers=4, width=12, heads=3))
    ids = torch.arange(64).view(8, 8)
    example = [(ids, ids), (ids[:5], ids[:5])]
    model = mk.pipeline(module, schedule, example=example, loss=language_loss, **options)
    optimizer, its = (torch.optim.SGD(each.parameters(), lr=0.3) for each in (model, plain))
    assert apart(model, plain) == 0
    found = []
    for step in range(3):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        its.zero_grad()
        batch = ids[:5] if step == 2 else ids
        for part in (batch, batch.flip(0)):  # gradients add up
            expected = language_loss(plain(part), part)
            expected.backward()
            found.append(abs(model.step(part, part) - expected.item()))
        norms = (torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5), model.clip_grad_norm_(0.5))
        found.append(abs(norms[0].item() - norms[1].item()))
        its.step()
        optimizer.step()
        found.append(apart(model, plain))
    state = {name: torch.full_like(value, 0.5) for name, value in plain.state_dict().items()}
    model.load_state_dict(state)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    return found


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        pytest.param("1f1b", {"microbatches": 4}, marks=pytest.mark.soak),
        ("zbv", {"microbatches": 4}),
    ],
)
def test_a_pipeline_equals_serial(clusters: Clusters, schedule: str, options: dict[str, Any]) -> None:
    cluster = clusters(2)
    assert max(max(found) for found in cluster.run(staged, schedule, options)) < 2e-6
    assert 0 < cluster.timeline().bubble < 1


def pipeline_mistakes(_: Any) -> list[str]:
    x, y = torch.ones(4, 2), torch.ones(4, 3)
    how: dict[str, Any] = {"example": (x, y), "loss": F.mse_loss}
    model = mk.pipeline(MLP(2, 3, width=3), **how)
    found = []
    for mistake in (
        lambda: model(x),
        lambda: model.step(torch.ones(3, 2), torch.ones(3, 3)),
        lambda: mk.pipeline(MLP(2, 3, width=3), "1f2b", **how),
        lambda: mk.pipeline(MLP(2, 3, width=3), **{**how, "loss": None}),
        lambda: mk.pipeline(MLP(2, 3, width=3), dp=2, **how),
        lambda: mk.pipeline(nn.ReLU(), **how),
    ):
        with pytest.raises(ValueError) as caught:
            mistake()
        found.append(str(caught.value))
    return found


def test_mistakes_with_pipelines_are_explained(clusters: Clusters) -> None:
    for found in clusters(2).run(pipeline_mistakes):
        says = (
            r"loss = model.step\(inputs, targets\)", "shapes that the example had not", "1f2b",
            "the last stage computes the loss", r"mk.pipeline\(dp=...\)", "it has no parameters",
        )  # fmt: skip
        for message, pattern in zip(found, says, strict=True):
            with pytest.raises(ValueError, match=pattern):
                raise ValueError(message)
