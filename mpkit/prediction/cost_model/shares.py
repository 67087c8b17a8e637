"""Shares: how many parameters a rank computes with, and how many of them it updates."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from mpkit.prediction.cost_model.architecture import Architecture
from mpkit.prediction.cost_model.layout import Layout
from mpkit.prediction.cost_model.stack import Stack

__all__ = ["ParameterShares", "model_under"]


def model_under(stack: Stack, model: Architecture) -> Architecture:
    """Return the sizes of a model as a stack runs it: some divide experts along tp that others leave whole."""
    return replace(model, whole_experts=False) if model.whole_experts and stack.divides_experts else model


class ParameterShares:
    """The parameters of the ranks of a layout.

    Attributes:
        stack: the software stack.
        stages: parameters of each stage as one of its ranks computes with them, divided by tp, and by ep.
        experts: of these, those of experts, which fewer replicas hold.
        parameters: those of the rank that holds most.
        own: of these, those of experts.
        updated: those that this rank updates: under ZeRO a part.
        layer: those of the largest layer, divided by tp, and by ep.
        layer_experts: of these, those of experts.
        edge: those outside the layers, of the first or the last stage.

    >>> gpt2 = Architecture(12, 768, 12, vocabulary=50257, positions=1024, tied=True, bias=True)
    >>> ParameterShares(gpt2, Layout(dp=4, zero=1), Stack("pytorch")).updated
    31109952.0
    """

    def __init__(self, model: Architecture, layout: Layout, stack: Stack) -> None:
        self.stack = stack
        t, divided = layout.tp, layout.expert_tp * layout.ep
        kinds: list[
            tuple[int, int, float, float]
        ] = []  # first, end; what a rank holds of it, and of its experts
        for first, count in model.kinds():
            experts, parted = model.expert_parameters(first), model.divided_parameters(first)
            whole = model.layer_parameters(first) - experts - parted
            kinds.append((first, first + count, whole + parted / t, experts / divided))
        self.layer, self.layer_experts = max(((rest + own, own) for _, _, rest, own in kinds))
        held = layout.stage_layers(model.layers)
        self._layers = max(held)
        begin = 0
        self.stages: list[float] = []
        self.experts: list[float] = []
        for count in held:
            end = begin + count
            rest_here = own_here = 0.0
            for first, last, rest, own in kinds:
                within = max(0, min(end, last) - max(begin, first))
                rest_here += within * rest
                own_here += within * own
            self.stages.append(rest_here + own_here)
            self.experts.append(own_here)
            begin = end
        edges = [
            (all_of_it - whole) / t + whole
            for all_of_it, whole in zip(
                (model.embedding_parameters, model.head_parameters), model.whole_at_edges, strict=True
            )
        ]
        self.edge = max(edges)
        self.stages[0] += edges[0]
        self.stages[layout.last] += edges[1]
        if model.tied and layout.last:  # the last stage holds a copy of the embedding
            self.stages[layout.last] += model.vocabulary * model.hidden / t
        most = max(range(len(held)), key=self.stages.__getitem__)
        self.parameters, self.own = self.stages[most], self.experts[most]
        self.updated = self.updated_on(most, layout)

    def calls(self, parameters: float, element: float, layout: Layout) -> int:
        """Return how many collectives send so many gradients or weights, of so many bytes each.

        PyTorch's FSDP makes one per layer, DeepSpeed one per `partition` of elements, Megatron and DDP one per bucket.

        >>> from mpkit.prediction.cost_model.stack import stack_of
        >>> gpt2 = Architecture(12, 768, 12, vocabulary=50257, positions=1024, tied=True, bias=True)
        >>> layout = Layout(dp=8, zero=1)
        >>> [ParameterShares(gpt2, layout, stack_of(name)).calls(125e6, 4, layout) for name in ("pytorch", "megatron")]
        [20, 4]
        """
        if self.stack.bucket_by_replicas:
            bucket = max(40e6, 1e6 * layout.replicas) if self.stack.overlap else parameters
            return max(1, ceil(parameters / bucket)) if parameters else 0
        if self.stack.partition:
            return max(1, ceil(parameters / self.stack.partition))
        return self._layers if layout.zero == 2 else max(1, ceil(parameters * element / self.stack.bucket))

    def updated_on(self, stage: int, layout: Layout) -> float:
        """Return the parameters that a rank of a stage updates: under ZeRO, of experts too, its part."""
        held = self.sharded_on(stage, layout) if layout.zero else self.stages[stage]
        return held * layout.trainable

    def sharded_on(self, stage: int, layout: Layout) -> float:
        """Return the parameters in the shard of a rank of a stage; fewer ranks share experts."""
        whole, own = self.stages[stage], self.experts[stage]
        return (whole - own) / layout.shards + own / layout.expert_shards
