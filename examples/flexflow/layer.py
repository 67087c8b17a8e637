"""A layer by its sizes, and the ways to split it over devices.

A split has a degree for each of SOAP's dimensions, whose product divides the number of devices:

    sample       each device computes some samples                  all parameters on each, whose gradients are summed
    operator     each device computes some of the layer's operators that do not need each other (branches)
    attribute    each device computes some positions of a sample    all parameters on each, whose gradients are summed
    parameter    each device has some of the parameters, and computes some channels of the output

Devices that are left over compute the same as others. Layers of a chain need each other's outputs, so that placing
them on different devices lets them work at the same time only with micro-batches: that is a pipeline (`mk.advise`).

Source: Jia, Zaharia, Aiken, "Beyond Data and Model Parallelism for Deep Neural Networks", MLSys 2019, section 4.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import NamedTuple

from mpkit.plan.kinds import real, whole

CHANNELS = {
    "gathered": "each device needs all channels of the input and makes some of the output (linear, convolution)",
    "kept": "input and output are divided alike (activations, pooling)",
    "summed": "each device needs all channels of the input, and the output is summed (a transformer's block)",
}
"""How a split by parameters divides the channels of input and output."""


class TensorLayout(NamedTuple):
    """How a tensor is divided: into how many parts by samples, by attribute (positions), and by channels."""

    sample: int = 1
    attribute: int = 1
    channel: int = 1

    @property
    def parts(self) -> int:
        """The number of parts."""
        return self.sample * self.attribute * self.channel


class Split(NamedTuple):
    """How a layer is divided: the degrees of SOAP's four dimensions.

    >>> str(Split(sample=4, parameter=2)), str(Split()), Split(2, 1, 3).degree
    ('S4 P2', 'whole', 6)
    """

    sample: int = 1
    operator: int = 1
    attribute: int = 1
    parameter: int = 1

    @property
    def degree(self) -> int:
        """The number of devices that compute different parts."""
        return self.sample * self.operator * self.attribute * self.parameter

    def __str__(self) -> str:
        words = [f"{letter}{degree}" for letter, degree in zip("SOAP", self, strict=True) if degree > 1]
        return " ".join(words) or "whole"


@dataclass(frozen=True)
class Layer:
    """A layer by its sizes, per sample.

    >>> linear = Layer("fc1", 1024, 4096, flops=2 * 1024 * 4096, parameters=1024 * 4096 + 4096, parameter=4096)
    >>> linear.layout_in(Split(2, 1, 1, 4)), linear.layout_out(Split(2, 1, 1, 4))
    (TensorLayout(sample=2, attribute=1, channel=1), TensorLayout(sample=2, attribute=1, channel=4))

    Attributes:
        name: what it is called.
        inputs, outputs: the numbers in its input and output.
        flops: floating-point operations of its forward; the backward takes twice as many.
        parameters: the numbers that are trained.
        sample: whether samples may be on different devices (not for BatchNorm, whose statistics are over all).
        operator: how many operators there are in it that do not need each other.
        attribute: the size of the attribute dimension, such as positions or rows of an image; 1: it has none.
        parameter: the size of the parameter dimension, such as output channels or heads; 1: it has none.
        channels: what a split by parameters divides, one of `CHANNELS`.
        sums: all-reduces of the output in a forward that is "summed", and as many in its backward.
        exchanged: the numbers of a sample that all devices of an attribute split need, such as keys and values: an
            all-gather in the forward and a reduce-scatter in the backward.
        saved: the numbers that its backward needs besides its input; each device has those of its share.
    """

    name: str
    inputs: int
    outputs: int
    flops: float
    parameters: int = 0
    sample: bool = True
    operator: int = 1
    attribute: int = 1
    parameter: int = 1
    channels: str = "gathered"
    sums: int = 1
    exchanged: int = 0
    saved: int = 0

    def __post_init__(self) -> None:
        least = {"inputs": 1, "outputs": 1, "operator": 1, "attribute": 1, "parameter": 1}
        for name in (
            "inputs",
            "outputs",
            "parameters",
            "operator",
            "attribute",
            "parameter",
            "sums",
            "exchanged",
        ):
            value = getattr(self, name)
            if (whole(value) if whole(value) is not None else -1) < least.get(name, 0):  # type: ignore[operator]
                raise ValueError(
                    f"Layer({self.name!r}, {name}={value!r}): a whole number, {least.get(name, 0)} or more"
                )
        if (real(self.flops) or 0.0) < 0 or real(self.flops) is None:
            raise ValueError(f"Layer({self.name!r}, flops={self.flops!r}): a number, 0 or more")
        if self.channels not in CHANNELS:
            told = "; ".join(f"{name!r}: {meaning}" for name, meaning in CHANNELS.items())
            raise ValueError(f"Layer({self.name!r}, channels={self.channels!r}): there are {told}")

    @property
    def sizes(self) -> tuple[object, ...]:
        """All but the name: layers that agree in these are identical."""
        return tuple(getattr(self, field.name) for field in fields(self) if field.name != "name")

    def layout_in(self, split: Split) -> TensorLayout:
        """Return how the input is divided under a split."""
        return TensorLayout(split.sample, split.attribute, split.parameter if self.channels == "kept" else 1)

    def layout_out(self, split: Split) -> TensorLayout:
        """Return how the output is divided under a split."""
        channel = split.operator * (1 if self.channels == "summed" else split.parameter)
        return TensorLayout(split.sample, split.attribute, channel)

    def partial_sums(self, split: Split) -> int:
        """Return how many devices have each a part of the sum that is the gradient of the input.

        Of a "summed" layer these sums belong to its inside, where they are counted.
        """
        return split.operator * (split.parameter if self.channels == "gathered" else 1)


def splits_of(layer: Layer, devices: int, batch: int) -> Iterator[Split]:
    """Yield the splits of a layer over devices: each degree divides its dimension, their product the devices.

    >>> [str(split) for split in splits_of(Layer("fc", 8, 6, flops=96, parameters=54, parameter=6), 4, batch=8)]
    ['whole', 'P2', 'S2', 'S2 P2', 'S4']
    """
    for sample in _degrees(batch if layer.sample else 1, devices):
        for operator in _degrees(layer.operator, devices // sample):
            for attribute in _degrees(layer.attribute, devices // sample // operator):
                for parameter in _degrees(layer.parameter, devices // sample // operator // attribute):
                    yield Split(sample, operator, attribute, parameter)


def _degrees(size: int, devices: int) -> list[int]:
    """Return the degrees that divide a dimension of this size, and the devices."""
    return [
        degree for degree in range(1, min(size, devices) + 1) if not size % degree and not devices % degree
    ]
