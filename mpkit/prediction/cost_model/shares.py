"""Shares: how many parameters a rank computes with, and how many of them it updates."""

from __future__ import annotations

from math import ceil

from mpkit.prediction.cost_model.architecture import Architecture
from mpkit.prediction.cost_model.layout import Layout
from mpkit.prediction.cost_model.stack import Stack

__all__ = ["ParameterShares"]


class ParameterShares:
    """The parameters of the ranks of a layout.

    Attributes:
        stack: the software stack.
        stages: parameters of each stage as one of its ranks computes with them, divided by tp, and by ep.
        experts: of these, those of experts, which fewer replicas hold.
        parameters: those of the rank that holds most.
        updated: those that this rank updates: under ZeRO a part.
        layer: those of the largest layer, divided by tp, and by ep.
        edge: those outside the layers, of the first or the last stage.

    >>> gpt2 = Architecture(12, 768, 12, vocabulary=50257, positions=1024, tied=True, bias=True)
    >>> ParameterShares(gpt2, Layout(dp=4, zero=1), Stack("pytorch")).updated
    31109952.0
    """

    def __init__(self, model: Architecture, layout: Layout, stack: Stack) -> None:
        self.stack = stack
        t, divided = layout.tp, layout.expert_tp * layout.ep
        kinds = [
            (first, first + count, model.layer_parameters(first), model.expert_parameters(first))
            for first, count in model.kinds()
        ]
        self.layer = max((whole - own) / t + own / divided for _, _, whole, own in kinds)
        held = layout.stage_layers(model.layers)
        self._layers = max(held)
        begin = 0
        self.stages: list[float] = []
        self.experts: list[float] = []
        for count in held:
            end = begin + count
            rest = own_here = 0.0
            for first, last, whole, own in kinds:
                within = max(0, min(end, last) - max(begin, first))
                rest += within * (whole - own) / t
                own_here += within * own / divided
            self.stages.append(rest + own_here)
            self.experts.append(own_here)
            begin = end
        self.edge = max(model.embedding_parameters, model.head_parameters) / t
        self.stages[0] += model.embedding_parameters / t
        self.stages[layout.last] += model.head_parameters / t
        if model.tied and layout.last:  # the last stage holds a copy of the embedding
            self.stages[layout.last] += model.vocabulary * model.hidden / t
        most = max(range(len(held)), key=self.stages.__getitem__)
        self.parameters = self.stages[most]
        self.updated = self.updated_on(most, layout)

    def calls(self, nbytes: float, layout: Layout) -> int:
        """Return how many collectives send gradients or weights of so many bytes.

        PyTorch's FSDP makes one per layer, DeepSpeed one per `partition` of elements, Megatron and DDP one per bucket.

        >>> from mpkit.prediction.cost_model.stack import stack_of
        >>> gpt2 = Architecture(12, 768, 12, vocabulary=50257, positions=1024, tied=True, bias=True)
        >>> layout = Layout(dp=8, zero=1)
        >>> [ParameterShares(gpt2, layout, stack_of(name)).calls(500e6, layout) for name in ("pytorch", "megatron")]
        [20, 4]
        """
        if self.stack.bucket_by_replicas:
            bucket = max(40e6, 1e6 * layout.replicas) if self.stack.overlap else self.parameters
            return max(1, ceil(self.parameters / bucket))
        if self.stack.partition:
            return max(1, ceil(self.parameters / self.stack.partition))
        return self._layers if layout.zero == 2 else max(1, ceil(nbytes / self.stack.bucket))

    def updated_on(self, stage: int, layout: Layout) -> float:
        """Return the parameters that a rank of a stage updates: under ZeRO, of experts too, its part."""
        whole, own = self.stages[stage] * layout.trainable, self.experts[stage] * layout.trainable
        if not layout.zero:
            return whole
        return (whole - own) / layout.shards + own / layout.expert_shards
