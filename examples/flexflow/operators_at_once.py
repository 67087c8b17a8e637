"""Operator parallelism by the Hugging Face guide's example: a layer norm whose two statistics are computed at once.

A layer norm needs the mean and the standard deviation of each row before it can normalize. One device computes one
after the other; operator parallelism gives each to a device of its own:

    statistics   rank 0 computes σ, rank 1 computes μ: neither needs the other's result
    exchange     an all-gather of both, one number per row each
    normalize    y = γ (x - μ) / √(σ² + ε) + β

Other than the pipeline of `soap("layer_norm")["O"]`, where the layer norm is one operator and the next
layer another, both devices work on the same samples here, within one layer.

Sources: huggingface/transformers, docs "Efficient training on multiple GPUs" (perf_train_gpu_many), FlexFlow; Jia,
Zaharia, Aiken, "Beyond Data and Model Parallelism for Deep Neural Networks", MLSys 2019, section 4.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpkit.common.tracebacks import public
from mpkit.launch.session.cluster import Cluster, borrow_cluster
from mpkit.timeline.timeline import Timeline
from mpkit.trace import Trace

if TYPE_CHECKING:
    from mpkit.strategies.rank_context import Context


RANKS = 2
OPERATORS = ("std", "mean")
"""What rank 0 and rank 1 compute first."""


@dataclass(frozen=True)
class OperatorsAtOnce:
    """A layer norm whose mean and standard deviation two ranks computed at the same time.

    A notebook shows its timeline.

    Attributes:
        outputs: by rank, the normalized samples; the same shape as the input.
        difference: the largest difference between a rank's output and that of `F.layer_norm`.
        trace: what the ranks did.
    """

    outputs: list[Tensor] = field(repr=False)
    difference: float
    trace: Trace = field(repr=False)

    @cached_property
    def timeline(self) -> Timeline:
        """The trace on a clock on which each rank has a device of its own."""
        return Timeline.of(self.trace)

    def __str__(self) -> str:
        return f"{self.timeline}\nlargest difference from F.layer_norm: {self.difference:.1e}"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        shown: dict[str, Any] = self.timeline._repr_mimebundle_(include, exclude)
        return {**shown, "text/plain": str(self)}


@public
def mean_and_std_at_once(
    x: Tensor | None = None, layer: nn.LayerNorm | None = None, *, cluster: Cluster | None = None
) -> OperatorsAtOnce:
    """Normalize x with its standard deviation computed on one rank and its mean on another, at the same time.

    >>> from examples.flexflow import mean_and_std_at_once
    >>> found = mean_and_std_at_once()
    >>> found.difference < 1e-12, found.outputs[0].shape
    (True, torch.Size([64, 128, 256]))

    Args:
        x: samples (..., n), n at least 1; None: random ones, (64, 128, 256) in float64.
        layer: a layer norm over the last dimension; None: one with random γ and β.
        cluster: a cluster of two ranks; None: start one, which takes a few seconds.

    Raises:
        ValueError: the layer does not normalize the last dimension of x, or the cluster does not have two ranks.
    """
    # ---- what is asked
    generator = torch.Generator().manual_seed(0)
    if x is None:
        shape = (64, 128, 256 if layer is None else layer.normalized_shape[-1])
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
    if layer is None:
        layer = nn.LayerNorm(x.shape[-1], dtype=x.dtype)
        for parameter in layer.parameters():
            nn.init.normal_(parameter, generator=generator)
    _check(x, layer, cluster)
    layer = copy.deepcopy(layer).to(x.dtype)
    # ---- on one device
    with torch.no_grad():
        alone = F.layer_norm(x, layer.normalized_shape, layer.weight, layer.bias, layer.eps)
    # ---- on two
    with borrow_cluster(cluster, RANKS) as used:
        outputs = used.run(on_a_rank, x, layer)
        trace = used.trace
    return OperatorsAtOnce(outputs, max(float((y - alone).abs().max()) for y in outputs), trace)


def on_a_rank(context: Context, x: Tensor, layer: nn.LayerNorm) -> Tensor:
    """Compute one of the statistics, get the other one, and normalize."""
    comm, x, layer = context.comm, x.to(context.device), layer.to(context.device)
    with torch.no_grad(), context.record.step(0):
        # ---- statistics
        with context.record.span(OPERATORS[comm.index]):
            mine = x.std(-1, correction=0) if comm.index == 0 else x.mean(-1)
        # ---- exchange
        std, mean = comm.all_gather(mine[None])
        # ---- normalize
        with context.record.span("normalize"):
            y: Tensor = (x - mean[..., None]) * torch.rsqrt(std.square() + layer.eps)[..., None]
            if layer.weight is not None:
                y = y * layer.weight
            if layer.bias is not None:
                y = y + layer.bias
    return y.cpu()


def _check(x: Tensor, layer: nn.LayerNorm, cluster: Cluster | None) -> None:
    """Check that the layer normalizes the last dimension, and that there are two ranks."""
    if tuple(layer.normalized_shape) != tuple(x.shape[-1:]):
        raise ValueError(
            f"layer normalizes {tuple(layer.normalized_shape)}, and x has the shape {tuple(x.shape)}: "
            f"nn.LayerNorm({x.shape[-1] if x.dim() else 1}) normalizes its last dimension"
        )
    if cluster is not None and cluster.ranks != RANKS:
        raise ValueError(
            f"mean_and_std_at_once(cluster=...) has {cluster.ranks} ranks, and there are two operators: "
            f"mk.Cluster(ranks={RANKS})"
        )
