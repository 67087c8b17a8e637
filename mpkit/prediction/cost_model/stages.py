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
from typing import Any, NamedTuple

from mpkit.prediction.cost_model.architecture import Architecture
from mpkit.prediction.cost_model.communication import Network, T, overlapped_time
from mpkit.prediction.cost_model.kernels import Kernels
from mpkit.prediction.cost_model.layer import CAUSES, LayerTime, head_time, layer_time
from mpkit.prediction.cost_model.layout import Layout, ParameterShares
from mpkit.trace import Kind

__all__ = ["MeanLayer", "ShardGathers", "StageTimes", "gathers_of", "layer_of", "stages_of"]


@dataclass(frozen=True)
class StageTimes:
    """Seconds per micro-batch of the ranks of a pipeline, and what they consist of.

    Attributes:
        layers: the number of layers of each rank.
        layer: of a layer's forward and of its backward, with what is computed again and what ZeRO-3 waits for.
        first: beside its layers, of the first stage's forward and backward.
        last: likewise of the last stage.
        last_rank: which rank has the last stage.
        causes_of: seconds by cause: of a layer, of a micro-batch, and of one on the rank with the head.
    """

    layers: list[int]
    layer: tuple[float, float]
    first: tuple[float, float]
    last: tuple[float, float]
    last_rank: int
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
        layers = self.layers_by_stage(rank)
        f, b = ([n * each for n in layers] for each in self.layer)
        for times, first, last in zip((f, b), self.first, self.last, strict=True):
            times[0] += first
            times[-1] += last
        return tuple(f), tuple(b)

    def layers_by_stage(self, rank: Sequence[int]) -> Sequence[float]:
        """Return the layers of each stage, of which a rank may have several."""
        stages_of = Counter(rank)
        return [self.layers[each] / stages_of[each] for each in rank]

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
class MeanLayer:
    """Seconds per micro-batch of a layer, the mean of all kinds, and of what the first and the last stage have besides.

    Attributes:
        forward: of a layer.
        backward: without what is computed again.
        causes: both, by cause.
        kinds: the number of layers of each kind, and their time.
        head: of the head and the loss, forward and backward.
        embed: of the embedding.
    """

    forward: float
    backward: float
    causes: dict[str, float]
    kinds: Sequence[tuple[int, LayerTime]]
    head: float
    embed: float

    def seconds_again(self, recompute: str) -> float:
        """Return the seconds that a backward computes again."""
        layers = sum(count for count, _ in self.kinds)
        return sum(count * kind.seconds_again(recompute) for count, kind in self.kinds) / layers


@lru_cache(4096)
def _layer(
    model: Architecture, sequence: int, kernels: Kernels, network: Network, microbatch: int, cp: int, tp: int, ep: int,
    etp: int, alike: bool, sequence_parallel: bool, trainable: float, cp_method: str,
    cp_order: str, load: float,
) -> MeanLayer:  # fmt: skip
    """Price each kind of layer once, for all plans that divide a layer equally."""
    layout = Layout(
        cp=cp, tp=tp, ep=ep, etp=etp, alike=alike, microbatch=microbatch, sequence_parallel=sequence_parallel,
        trainable=trainable, cp_method=cp_method, cp_order=cp_order, load=load,
    )  # fmt: skip
    kinds = [
        (count, layer_time(model, first, layout, sequence, kernels, network))
        for first, count in model.kinds()
    ]
    mean = [sum(count * each for count, each in parts) / model.layers for parts in _by_cause(kinds)]
    causes = {cause: mean[i] + mean[len(CAUSES) + i] for i, cause in enumerate(CAUSES)}
    return MeanLayer(
        sum(mean[: len(CAUSES)]),
        sum(mean[len(CAUSES) :]),
        causes,
        kinds,
        head_time(model, layout, sequence, kernels),
        kernels.move(12 * microbatch * sequence / cp * model.hidden),
    )


def layer_of(
    model: Architecture, layout: Layout, sequence: int, kernels: Kernels, network: Network
) -> MeanLayer:
    """Return the times of a layer of a layout, whatever its recomputation is."""
    return _layer(
        model, sequence, kernels, network, layout.microbatch, layout.cp, layout.tp, layout.ep, layout.etp,
        layout.alike, layout.sequence_parallel, layout.trainable, layout.cp_method, layout.cp_order, layout.load,
    )  # fmt: skip


def stages_of(
    model: Architecture, layout: Layout, sequence: int, kernels: Kernels, network: Network, shares: ParameterShares
) -> StageTimes:  # fmt: skip
    """Return the times of the stages."""
    layer = layer_of(model, layout, sequence, kernels, network)
    again = layer.seconds_again(layout.recompute)
    forward, backward, head = layer.forward, layer.backward + again, layer.head
    waited = (0.0, 0.0, 0.0)
    if layout.zero == 3:
        gathers = gathers_of(layout, shares, network)
        waited = gathers.waits(forward, backward, shares.stack.overlap)
    return StageTimes(
        layout.stage_layers(model.layers),
        (forward + waited[0], backward + waited[1]),
        (layer.embed + waited[2], 0.0),
        (head / 3, head * 2 / 3 + (waited[2] if layout.pp > 1 else 0.0)),
        layout.last,
        (
            layer.causes | {"recomputation": again, "ZeRO-3 gathers": waited[0] + waited[1]},
            {"ZeRO-3 gathers": waited[2]},
            {"head and loss": head},
        ),
    )


def _by_cause(kinds: list[tuple[int, LayerTime]]) -> list[list[tuple[int, float]]]:
    """Return for each cause, of forwards and then of backwards, the count and the seconds of each kind of layer."""
    columns = range(2 * len(CAUSES))
    rows = [(count, layer.forward + layer.backward) for count, layer in kinds]
    return [[(count, row[i]) for count, row in rows] for i in columns]


def time_of_replicas(
    kind: Kind, parameters: tuple[float, float], element: float, layout: Layout, network: Network,
    shares: ParameterShares | None = None,
) -> float:  # fmt: skip
    """Return the seconds in which ranks that hold the same weights reduce their gradients, or gather their shards.

    Experts have replicas of their own, ep apart: where ep fills a node, each of these is on another one.

    Args:
        kind: of collective; an all-reduce is among all replicas, others are among those that ZeRO shards among.
        parameters: of a rank, without its experts, and of these.
        element: bytes of each.
        layout, network: how the step is divided, on what.
        shares: says how many calls these take; None: one.
    """
    whole = kind == Kind.ALL_REDUCE
    dense = ("replicas", layout.replicas) if whole else ("shards", layout.shards)
    groups = [(dense, parameters[0])]
    if layout.own_experts:
        n = layout.expert_shards * (layout.groups if whole else 1)
        groups.append((("edp", n), parameters[1]))
    else:
        groups = [(dense, sum(parameters))]
    took = 0.0
    for (axis, n), held in groups:
        calls = shares.calls(held, element, layout) if shares else 1
        took += network.time(kind, element * held, n, layout.per_node(axis, network.per_node), max(1, calls))
    return took


def time_over_groups(
    parameters: tuple[float, float], element: float, layout: Layout, network: Network, calls: int = 1
) -> float:
    """Return the seconds in which the groups of hybrid sharding sum their shards of these gradients, as FSDP does."""
    if layout.groups < 2:
        return 0.0
    inside = layout.per_node("groups", network.per_node)
    shard = parameters[0] / layout.shards + parameters[1] / (
        layout.expert_shards if layout.own_experts else layout.shards
    )
    return network.time(Kind.ALL_REDUCE, element * shard, layout.groups, inside, calls)


class ShardGathers(NamedTuple):
    """Seconds of ZeRO-3's collectives, of a layout or of an array of them.

    Each layer is gathered in the forward and again in the backward, where its gradients are reduced too (FSDP; Zhao et
    al. 2023, section 4).

    Attributes:
        gather: a layer, in the forward and again in the backward.
        reduce: a layer's gradients.
        edge: to gather what lies outside the layers.
        prefetch: the layers that are gathered ahead.
    """

    gather: Any
    reduce: Any
    edge: Any
    prefetch: int

    def waits(self, forward: T, backward: T, overlap: bool) -> tuple[T, T, T]:
        """Return what a layer's forward and backward wait for, and a micro-batch for what nothing hides.

        The first gather of a micro-batch has nothing to hide behind.
        """
        gather = self.gather
        if not overlap:
            return gather, gather + self.reduce, self.edge
        if not self.prefetch:  # a layer is gathered when it is wanted
            return gather, gather + overlapped_time(backward, self.reduce) - backward, gather + self.edge
        beside = gather + self.reduce
        return (
            overlapped_time(forward, gather) - forward,
            overlapped_time(backward, beside) - backward,
            gather + self.edge,
        )


def gathers_of(layout: Layout, shares: ParameterShares, network: Network) -> ShardGathers:
    """Return the collectives of ZeRO-3."""
    stack, n, inside = shares.stack, layout.shards, layout.per_node("shards", network.per_node)
    layer = shares.layer - shares.layer_experts, shares.layer_experts
    gather = time_of_replicas(Kind.ALL_GATHER, layer, stack.element, layout, network)
    reduce = time_of_replicas(Kind.REDUCE_SCATTER, layer, stack.reduced, layout, network)
    reduce += time_over_groups(layer, stack.reduced, layout, network)
    edge = network.time(Kind.ALL_GATHER, stack.element * shares.edge, n, inside)
    return ShardGathers(gather, reduce, edge, layout.prefetch)
