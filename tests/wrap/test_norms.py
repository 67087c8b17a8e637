"""A norm of a part of a gradient is refused, since each rank would clip by another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mpkit as mk


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def sharded(_: Any) -> nn.Module:
    return mk.fully_shard(model(), stage=3)


def divided(_: Any) -> nn.Module:
    from mpkit.strategies.models.gpt import GPT

    torch.manual_seed(0)
    return mk.tensor_parallel(GPT(vocab=16, length=8, layers=1, heads=2, width=16))


def refused(ctx: Any, wrap: Callable[[Any], nn.Module]) -> tuple[str, bool]:
    module = wrap(ctx)
    if wrap is sharded:
        module(torch.ones(2, 8)).square().mean().backward()
    else:
        logits = module(torch.zeros(2, 8, dtype=torch.long))
        F.cross_entropy(logits.flatten(0, 1), torch.zeros(16, dtype=torch.long)).backward()
    try:
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    except ValueError as error:
        message = str(error)
    else:
        message = "clipped"
    norm: torch.Tensor = module.clip_grad_norm_(1.0)  # type: ignore[operator]
    optimizer = torch.optim.AdamW(module.parameters())  # the marks are no hindrance
    optimizer.step()
    states = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    return message, norm.item() > 0 and all(type(value) is torch.Tensor for value in states)


@pytest.mark.parametrize("wrap", [sharded, divided], ids=lambda wrap: wrap.__name__)
def test_clipping_by_the_norm_of_a_part_is_refused(
    wrap: Callable[[Any], nn.Module], clusters: Callable[[int], mk.Cluster]
) -> None:
    for message, is_right in clusters(2).run(refused, wrap):
        assert "model.clip_grad_norm_(1.0), a method of the wrapped module" in message
        assert is_right
