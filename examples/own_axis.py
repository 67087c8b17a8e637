"""An axis of one's own: the classes of a model's head, divided over ranks.

    row        CLASSES says what the axis divides, how it is drawn, and what it sends
    strategy   divide_classes leaves each rank the rows of the head for its classes, and gathers the logits

    logits = x W^T + b          each rank has V/n rows of W and elements of b
    forward                     an all-gather of the logits along the classes
    backward                    dL/dx is the sum of what each rank's rows give: an all-reduce

`train(Plan(axes={CLASSES: 2}))` is all: mpkit makes the groups, updates, clips and saves the parts, compares the
training with serial training, draws it, and counts what it sends.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from mpkit.plan.axes import Axis
from mpkit.strategies.comm.process_group import ProcessGroup
from mpkit.strategies.stage.shard import Shard, evenly

__all__ = ["CLASSES", "divide_classes", "volume_of_classes"]


def divide_classes(model: nn.Module, group: ProcessGroup) -> Mapping[str, Shard]:
    """Leave this rank the rows of the model's last Linear for its classes, in place.

    >>> from mpkit.strategies.comm.process_group import FakeGroup
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 5))
    >>> divide_classes(model, FakeGroup(2))["1.weight"].ranges, model[1].weight.shape
    ((range(0, 3),), torch.Size([3, 8]))
    """
    name, head = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)][
        -1
    ]
    classes = evenly(head.out_features, group.size)
    shards = {}
    for key, parameter in list(head.named_parameters()):
        shard = shards[f"{name}.{key}"] = Shard(tuple(parameter.shape), 0, (classes[group.index],))
        setattr(head, key, nn.Parameter(shard.take(parameter.detach())))
    head.forward = partial(_logits, head, group, [len(each) for each in classes])  # type: ignore[method-assign]
    return shards


def _logits(head: nn.Linear, group: ProcessGroup, sizes: list[int], x: Tensor) -> Tensor:
    return _GatherLogits.apply(F.linear(_SumGradients.apply(x, group), head.weight, head.bias), group, sizes)


class _SumGradients(torch.autograd.Function):
    """The identity, whose gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.group.all_reduce(gradient.contiguous().clone()), None


class _GatherLogits(torch.autograd.Function):
    """The logits of all classes, (samples, V), from those of each rank; its own part of the gradient."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, group: ProcessGroup, sizes: list[int]) -> Tensor:
        ctx.at, ctx.size = sum(sizes[: group.index]), sizes[group.index]
        padded = F.pad(mine.movedim(-1, 0), (0, 0) * (mine.dim() - 1) + (0, max(sizes) - ctx.size))
        parts = group.all_gather(padded.contiguous()).chunk(group.size)
        return (
            torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
            .movedim(0, -1)
            .contiguous()
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.narrow(-1, ctx.at, ctx.size).contiguous(), None, None


def volume_of_classes(model: nn.Module, inputs: Tensor, n: int) -> Mapping[str, tuple[str, float]]:
    """Return what a rank sends for these inputs: V logits and h gradients per sample, V padded to a multiple of n."""
    head = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    rows = prod(inputs.shape[: 1 if inputs.is_floating_point() else None])
    padded = -(-head.out_features // n) * n
    return {
        "all_gather": ("b V (n-1)/n", rows * padded * (n - 1) / n),
        "all_reduce": ("2 b h (n-1)/n", 2 * rows * head.in_features * (n - 1) / n),
    }


CLASSES = Axis(
    "classes", "the classes of the head", "each its rows of the head", "#a6761d",
    divide=divide_classes, volume=volume_of_classes,
)  # fmt: skip
