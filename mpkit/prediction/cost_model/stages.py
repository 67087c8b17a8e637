"""Stages: what the ranks of a pipeline take for a micro-batch, composed of the times of their layers.

layer      each kind is priced once; a stage is a number of layers
ZeRO-3     each layer waits for its parameters, which are gathered beside the layer before
edges      the first stage has the embedding, the last the head and the loss
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from mpkit.prediction.cost_model.architecture import Architecture
from mpkit.prediction.cost_model.communication import Network, overlapped_time
from mpkit.prediction.cost_model.kernels import Kernels
from mpkit.prediction.cost_model.layer import CAUSES, LayerTime, head_time, layer_time
from mpkit.prediction.cost_model.layout import Layout
from mpkit.prediction.cost_model.shares import ParameterShares
from mpkit.trace import Kind

__all__ = ["StageTimes", "stages_of"]


@dataclass(frozen=True)
class StageTimes:
    """Seconds per micro-batch of the ranks of a pipeline, and what they consist of.

    Attributes:
        layers: the number of layers of each rank.
        layer: of a layer's forward and of its backward, with what is computed again and what ZeRO-3 waits for.
        first: beside its layers, of the first stage's forward and backward.
        last: likewise of the last stage.
        last_rank: which rank has the last stage.
        balanced: the layers of each stage; (): a rank divides its layers evenly among its stages.
        causes_of: seconds by cause: of a layer, of a micro-batch, and of one on the rank with the head.
    """

    layers: list[int]
    layer: tuple[float, float]
    first: tuple[float, float]
    last: tuple[float, float]
    last_rank: int
    balanced: Sequence[int]
    causes_of: tuple[dict[str, float], dict[str, float], dict[str, float]]

    def of_rank(self, rank: int) -> tuple[float, float]:
        """Return the seconds of a rank's forwards and backwards."""
        n, (f, b) = self.layers[rank], self.layer
        f, b = n * f, n * b
        if rank == 0:
            f, b = f + self.first[0], b + self.first[1]
        if rank == self.last_rank:
            f, b = f + self.last[0], b + self.last[1]
        return f, b

    def of_stages(self, rank: Sequence[int]) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the seconds of each stage's forward and backward.

        Args:
            rank: of each stage.
        """
        stages_of = Counter(rank)
        even = [self.layers[each] / stages_of[each] for each in rank]
        layers: Sequence[float] = self.balanced or even
        f, b = ([n * each for n in layers] for each in self.layer)
        for times, first, last in zip((f, b), self.first, self.last, strict=True):
            times[0] += first
            times[-1] += last
        return tuple(f), tuple(b)

    @cached_property
    def times(self) -> list[float]:
        """Seconds of each rank, forward and backward."""
        return [sum(self.of_rank(rank)) for rank in range(len(self.layers))]

    @cached_property
    def slowest(self) -> int:
        """The rank that paces the pipeline."""
        return max(range(len(self.times)), key=self.times.__getitem__)

    def causes(self, microbatches: int) -> dict[str, float]:
        """Return the seconds by cause of the work of the rank with most."""
        layer, each, head = self.causes_of
        found = {
            cause: microbatches * self.layers[self.slowest] * seconds for cause, seconds in layer.items()
        }
        for cause, seconds in (each | (head if self.slowest == self.last_rank else {})).items():
            found[cause] = found.get(cause, 0.0) + microbatches * seconds
        return found | {"embedding": microbatches * self.times[self.slowest] - sum(found.values())}


@dataclass(frozen=True, slots=True)
class _Layer:
    """Seconds per micro-batch of a layer, the mean of all kinds, and of what the first and the last stage have besides.

    Attributes:
        forward: of a layer.
        backward: with what is computed again.
        causes: both, by cause.
        head: of the head and the loss, forward and backward.
        embed: of the embedding.
    """

    forward: float
    backward: float
    causes: dict[str, float]
    head: float
    embed: float


@lru_cache(4096)
def _layer(
    model: Architecture, sequence: int, kernels: Kernels, network: Network, microbatch: int, cp: int, tp: int, ep: int,
    etp: int, sequence_parallel: bool, recompute: str, trainable: float, cp_method: str | tuple[int, int],
    cp_order: str,
) -> _Layer:  # fmt: skip
    """Price each kind of layer once, for all plans that divide a layer equally."""
    layout = Layout(
        cp=cp, tp=tp, ep=ep, etp=etp, microbatch=microbatch, recompute=recompute, sequence_parallel=sequence_parallel,
        trainable=trainable, cp_method=cp_method, cp_order=cp_order,
    )  # fmt: skip
    kinds = [
        (count, layer_time(model, first, layout, sequence, kernels, network))
        for first, count in model.kinds()
    ]
    mean = [sum(count * each for count, each in parts) / model.layers for parts in _by_cause(kinds)]
    again = sum(count * layer.again for count, layer in kinds) / model.layers
    causes = {cause: mean[i] + mean[len(CAUSES) + i] for i, cause in enumerate(CAUSES)}
    return _Layer(
        sum(mean[: len(CAUSES)]),
        sum(mean[len(CAUSES) :]) + again,
        causes | {"recomputation": again},
        head_time(model, layout, sequence, kernels),
        kernels.move(12 * microbatch * sequence / cp * model.hidden),
    )


def stages_of(
    model: Architecture,
    layout: Layout,
    sequence: int,
    kernels: Kernels,
    network: Network,
    shares: ParameterShares,
) -> StageTimes:
    """Return the times of the stages."""
    layer = _layer(
        model, sequence, kernels, network, layout.microbatch, layout.cp, layout.tp, layout.ep, layout.etp,
        layout.sequence_parallel, layout.recompute, layout.trainable, layout.cp_method, layout.cp_order,
    )  # fmt: skip
    forward, backward, head = layer.forward, layer.backward, layer.head
    waited = _gathers(forward, backward, layout, shares, network) if layout.zero == 3 else (0.0, 0.0, 0.0)
    return StageTimes(
        layout.stage_layers(model.layers),
        (forward + waited[0], backward + waited[1]),
        (layer.embed + waited[2], 0.0),
        (head / 3, head * 2 / 3 + (waited[2] if layout.pp > 1 else 0.0)),
        layout.last,
        layout.balanced_stages(model.layers),
        (
            layer.causes | {"ZeRO-3 gathers": waited[0] + waited[1]},
            {"ZeRO-3 gathers": waited[2]},
            {"head and loss": head},
        ),
    )


def _by_cause(kinds: list[tuple[int, LayerTime]]) -> list[list[tuple[int, float]]]:
    """Return for each cause, of forwards and then of backwards, the count and the seconds of each kind of layer."""
    columns = range(2 * len(CAUSES))
    rows = [(count, layer.forward + layer.backward) for count, layer in kinds]
    return [[(count, row[i]) for count, row in rows] for i in columns]


def time_over_groups(nbytes: float, layout: Layout, network: Network, calls: int = 1) -> float:
    """Return the seconds in which the groups of hybrid sharding sum their shards of these gradients, as FSDP does."""
    if layout.groups < 2:
        return 0.0
    inside = layout.per_node("groups", network.per_node)
    return network.time(Kind.ALL_REDUCE, nbytes / layout.shards, layout.groups, inside, calls)


def _gathers(
    forward: float, backward: float, layout: Layout, shares: ParameterShares, network: Network
) -> tuple[float, float, float]:
    """Return what ZeRO-3 adds to a layer's forward and backward, and per micro-batch for what nothing hides.

    Each layer is gathered in the forward and again in the backward, where its gradients are reduced too (FSDP; Zhao et
    al. 2023, section 4). The first gather of a micro-batch has nothing to hide behind.
    """
    stack = shares.stack
    n, inside = layout.shards, layout.per_node("shards", network.per_node)
    across = time_over_groups(stack.reduced * shares.layer, layout, network)
    gather = network.time(Kind.ALL_GATHER, stack.element * shares.layer, n, inside)
    reduce = network.time(Kind.REDUCE_SCATTER, stack.reduced * shares.layer, n, inside) + across
    edge = network.time(Kind.ALL_GATHER, stack.element * shares.edge, n, inside)
    again = gather
    if layout.secondary:  # all but the first gather of a step are within the groups
        near = layout.per_node("secondary", network.per_node)
        again = network.time(Kind.ALL_GATHER, stack.element * shares.layer, layout.secondary, near)
        gather = (gather + (layout.microbatches - 1) * again) / layout.microbatches
    if not stack.overlap:
        return gather, again + reduce, edge
    if not layout.prefetch:  # a layer is gathered when it is wanted
        return gather, again + overlapped_time(backward, reduce) - backward, gather + edge
    waits = overlapped_time(forward, gather) - forward, overlapped_time(backward, again + reduce) - backward
    return *waits, gather + edge
