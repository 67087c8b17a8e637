"""The fastest strategy for each layer of a chain on a machine: `layer_strategies`.

    describe    the layers by their sizes
    price       each under each split, and each pair of neighbours
    search      the fastest choice that fits the memory

Source: Jia, Zaharia, Aiken, "Beyond Data and Model Parallelism for Deep Neural Networks", MLSys 2019.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from examples.flexflow.describe import describe_chain
from examples.flexflow.layer import Layer
from examples.flexflow.price import ITEMSIZE, ChainPrices
from examples.flexflow.result import LayerStrategies, search_chain
from mpkit.common.tracebacks import public
from mpkit.devices.catalogue import hardware as find
from mpkit.devices.hardware import Hardware
from mpkit.plan.kinds import whole

MOST_DEVICES = 2**20


@public
def layer_strategies(
    model: nn.Module | Sequence[Layer], hardware: Hardware | str, *, batch: int, memory: float | None = None,
    sample: tuple[int, ...] | None = None, dtype: str = "float32", devices: int | None = None,
    dimensions: str = "SOAP",
) -> LayerStrategies:  # fmt: skip
    """Return the fastest split by samples, operators, attribute and parameters of each layer of a chain.

    The result is exact: no other choice is faster by `examples.flexflow.price`, in which nothing overlaps.
    Like FlexFlow, it is for work that is the same in every step, on this machine; `found.again(hardware=...)` when a
    part has changed.

    >>> wide = nn.Sequential(nn.Linear(4096, 65536, device="meta"), nn.Linear(65536, 16, device="meta"))
    >>> found = layer_strategies(wide, "8x-a100-nvlink", batch=64)
    >>> [str(each.split) for each in found.choices], found.time < found.uniform["sample"].time
    (['P8', 'whole'], True)

    Args:
        model: a chain, such as an nn.Sequential or the kit's GPT, on the meta device if it is large; or its layers,
            each a `examples.flexflow.Layer`.
        hardware: a machine, or its name.
        batch: samples per step.
        memory: bytes that a device may hold; None: those of the device; `math.inf`: no limit.
        sample: the shape of one sample; None: what the first layer says, if that is an nn.Linear.
        dtype: of activations and gradients: "float32", "bfloat16" or "float16".
        devices: how many of the machine's devices to use; None: all.
        dimensions: which of SOAP's dimensions may be used, by their letters.

    Raises:
        ValueError: a layer cannot be described, a number is none, or no strategy fits the memory.
    """
    if (whole(batch) or 0) < 1:
        raise ValueError(f"layer_strategies(batch={batch!r}): samples per step, a whole number, 1 or more")
    if dtype not in ITEMSIZE:
        raise ValueError(f"layer_strategies(dtype={dtype!r}): there are {', '.join(map(repr, ITEMSIZE))}")
    machine = _machine(find(hardware), devices)
    return search_chain(ChainPrices(_layers(model, sample, dimensions), machine, batch, dtype), memory)


def _layers(model: Any, sample: tuple[int, ...] | None, dimensions: str) -> list[Layer]:
    """Return the layers of a chain, with the dimensions that may be used."""
    if not set(dimensions) <= set("SOAP"):
        raise ValueError(
            f"layer_strategies(dimensions={dimensions!r}): some of the letters of 'SOAP', such as 'SP'"
        )
    if isinstance(model, nn.Module):
        layers = describe_chain(model, sample)
    elif isinstance(model, Sequence) and model and all(isinstance(each, Layer) for each in model):
        layers = list(model)
    else:
        raise ValueError(
            f"layer_strategies({model!r}): give a chain, such as nn.Sequential(nn.Linear(8, 8)) or mk.models.GPT(), "
            "or a list of layers: [examples.flexflow.Layer('fc', inputs=64, outputs=64, flops=8192, parameters=4160, "
            "parameter=64)]"
        )
    # `sample` is whether, the others are how far a layer may be split.
    left_out: dict[str, Any] = {
        "S": {"sample": False},
        "O": {"operator": 1},
        "A": {"attribute": 1},
        "P": {"parameter": 1},
    }
    without: dict[str, Any] = {}
    for letter in set("SOAP") - set(dimensions):
        without |= left_out[letter]
    return [replace(layer, **without) for layer in layers]


def _machine(machine: Hardware, devices: int | None) -> Hardware:
    """Return the machine with so many of its devices.

    Raises:
        ValueError: it has fewer, or they do not fill nodes.
    """
    if devices is None:
        if machine.devices > MOST_DEVICES:
            raise ValueError(
                f"{machine.name!r} may be any number of devices: say how many, such as devices=4"
            )
        return machine
    if not 1 <= (whole(devices) or 0) <= machine.devices:
        raise ValueError(f"layer_strategies(devices={devices!r}): {machine.name} has {machine.devices}")
    if devices > machine.per_node and devices % machine.per_node:
        near = devices // machine.per_node * machine.per_node
        raise ValueError(
            f"layer_strategies(devices={devices!r}): {machine.name} has nodes of {machine.per_node}, which are to be "
            f"filled: devices={near} are"
        )
    per_node = min(devices, machine.per_node)
    return Hardware(
        machine.name,
        machine.device,
        machine.link,
        machine.between,
        per_node=per_node,
        nodes=devices // per_node,
    )
