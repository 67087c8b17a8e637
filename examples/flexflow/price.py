"""Price: the time and memory of each layer under each split, and the time between two layers.

    compute      roofline of forward and backward: FLOPs and bytes over the degree of the split
    inside       all-reduces of a "summed" layer's output, forward and backward; what an attribute split exchanges
    gradients    an all-reduce of parameters among the sample x attribute devices that have the same ones
    memory       parameters, gradients and optimizer states of a device's share; its input, and what else is saved
    between      resharding forward and backward (`examples.flexflow.resharding`)

Nothing overlaps, as in a step of a single stream, so the time of a chain is a sum over layers and pairs of neighbours:
that is what makes dynamic programming exact.

Source: Jia, Zaharia, Aiken 2019, section 5; Jia, Lin, Qi, Aiken, "Exploring Hidden Dimensions in Parallelizing
Convolutional Neural Networks", ICML 2018, section 4, which has this cost model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from examples.flexflow.layer import Layer, Split, TensorLayout, splits_of
from examples.flexflow.resharding import ReshardingCollective, backward, forward
from mpkit.devices.hardware import Hardware, collective_time
from mpkit.trace import Kind

Array = NDArray[np.float64]

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per number of activations."""

STATES = 16
"""Bytes per parameter: weights, gradients and Adam's states, in 32 bits or in 16 with a copy in 32 (Rajbhandari et al.
2020, section 3.1)."""


@dataclass(frozen=True)
class ChainCosts:
    """A chain in numbers: n_i splits of layer i.

    Attributes:
        time: seconds of layer i under each split: compute, what it sends inside, its gradients. (n_i,)
        memory: bytes per device of layer i under each split. (n_i,)
        between: seconds between layer i and the next one, by their splits. (n_i, n_i+1)
    """

    time: Sequence[Array]
    memory: Sequence[Array]
    between: Sequence[Array]

    def costs_of(self, chosen: Sequence[int]) -> tuple[float, float]:
        """Return the time and the memory of a choice for each layer."""
        seconds = sum(float(self.time[i][split]) for i, split in enumerate(chosen))
        seconds += sum(float(m[chosen[i], chosen[i + 1]]) for i, m in enumerate(self.between))
        return seconds, sum(float(self.memory[i][split]) for i, split in enumerate(chosen))


class ChainPrices:
    """The prices of a chain on a machine.

    Identical layers are priced once: they share arrays, and so do the pairs of neighbours.

    Args:
        layers: the chain.
        hardware: the machine; all of its devices are used.
        batch: samples per step.
        dtype: of parameters and activations, one of `ITEMSIZE`.
    """

    def __init__(
        self, layers: Sequence[Layer], hardware: Hardware, batch: int, dtype: str = "float32"
    ) -> None:
        self.layers, self.hardware, self.batch, self.dtype = tuple(layers), hardware, batch, dtype
        self._seconds: dict[ReshardingCollective, float] = {}
        self._resharding: dict[tuple[int, TensorLayout, TensorLayout, int], float] = {}

    @cached_property
    def splits(self) -> list[list[Split]]:
        """The splits of each layer."""
        known: dict[tuple[object, ...], list[Split]] = {}
        for layer in self.layers:
            if layer.sizes not in known:
                known[layer.sizes] = list(splits_of(layer, self.hardware.devices, self.batch))
        return [known[layer.sizes] for layer in self.layers]

    @cached_property
    def costs(self) -> ChainCosts:
        """The chain in numbers."""
        alone: dict[tuple[object, ...], tuple[Array, Array]] = {}
        pairs: dict[tuple[object, ...], Array] = {}
        for layer, splits in zip(self.layers, self.splits, strict=True):
            if layer.sizes not in alone:
                time = np.array([self.time(layer, split) for split in splits])
                alone[layer.sizes] = time, np.array([self.memory(layer, split) for split in splits])
        for i, (layer, following) in enumerate(pairwise(self.layers)):
            if (layer.sizes, following.sizes) not in pairs:
                rows = [
                    [self.resharding_seconds(layer, a, following, b) for b in self.splits[i + 1]]
                    for a in self.splits[i]
                ]
                pairs[layer.sizes, following.sizes] = np.array(rows)
        return ChainCosts(
            [alone[layer.sizes][0] for layer in self.layers],
            [alone[layer.sizes][1] for layer in self.layers],
            [pairs[a.sizes, b.sizes] for a, b in pairwise(self.layers)],
        )

    def time(self, layer: Layer, split: Split) -> float:
        """Return the seconds of a layer under a split, forward and backward."""
        return sum(self.parts(layer, split).values())

    def parts(self, layer: Layer, split: Split) -> dict[str, float]:
        """Return the seconds of a layer by what they are spent on: compute, inside, gradients."""
        size, batch = ITEMSIZE[self.dtype], self.batch
        # ---- compute
        weights = layer.parameters / (split.operator * split.parameter)
        inputs = batch * layer.inputs / layer.layout_in(split).parts
        outputs = batch * layer.outputs / layer.layout_out(split).parts
        moved = size * (inputs + outputs + weights)
        flops = batch * layer.flops / split.degree
        device = self.hardware.device
        compute = device.time(flops, moved, self.dtype) + device.time(2 * flops, 2 * moved, self.dtype)
        # ---- inside
        inside = 0.0
        if layer.channels == "summed":
            inside += (
                2
                * layer.sums
                * self.seconds(ReshardingCollective(Kind.ALL_REDUCE, size * outputs, split.parameter))
            )
        if layer.exchanged:
            nbytes = size * batch * layer.exchanged / (split.sample * split.operator * split.parameter)
            inside += self.seconds(ReshardingCollective(Kind.ALL_GATHER, nbytes, split.attribute))
            inside += self.seconds(ReshardingCollective(Kind.REDUCE_SCATTER, nbytes, split.attribute))
        # ---- gradients
        gradients = 0.0
        if layer.parameters:
            message = ReshardingCollective(Kind.ALL_REDUCE, size * weights, split.sample * split.attribute)
            gradients = self.seconds(message, stride=split.operator * split.parameter)
        return {"compute": compute, "inside": inside, "gradients": gradients}

    def memory(self, layer: Layer, split: Split) -> float:
        """Return the bytes that a device holds of a layer: model states, and what the backward needs."""
        states = STATES * layer.parameters / (split.operator * split.parameter)
        kept = layer.inputs / layer.layout_in(split).parts + layer.saved / split.degree
        return states + ITEMSIZE[self.dtype] * self.batch * kept

    def resharding_seconds(self, layer: Layer, split: Split, following: Layer, its_split: Split) -> float:
        """Return the seconds of resharding between two layers, forward and backward."""
        there, wanted = layer.layout_out(split), following.layout_in(its_split)
        sums = following.partial_sums(its_split)
        key = layer.outputs, there, wanted, sums
        if key not in self._resharding:
            nbytes = float(ITEMSIZE[self.dtype] * self.batch * layer.outputs)
            messages = [*forward(nbytes, there, wanted), *backward(nbytes, there, wanted, sums)]
            self._resharding[key] = sum(map(self.seconds, messages))
        return self._resharding[key]

    def seconds(self, message: ReshardingCollective, stride: int = 1) -> float:
        """Return the seconds of a collective, among devices that are `stride` apart."""
        if stride == 1 and message in self._seconds:
            return self._seconds[message]
        machine = self.hardware
        nodes = min(message.n, machine.nodes, -(-message.n * stride // machine.per_node))
        taken: float = collective_time(*message, nodes, machine.link, machine.between)
        if stride == 1:
            self._seconds[message] = taken
        return taken
