"""Decides where the model is cut, and checks that it can be cut there."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import nn

from mpkit.strategies.models.cut import cut
from mpkit.strategies.partition.boundary import LayerNumbers, Shared

__all__ = ["cut_stages", "shared_weights"]


def cut_stages(
    names: list[str], numbers: list[LayerNumbers], stages: int, points: Sequence[int | str] | None
) -> list[range]:
    """Return the layers of each stage: cut where the plan says, or balanced by forward FLOPs.

    A layer without a matrix product counts as one operation per output element.

    Args:
        names: the names of the layers.
        numbers: the numbers of the layers, without the loss.
        stages: the number of stages.
        points: `Plan.cut`; None: balance.

    Raises:
        ValueError: there are more stages than layers, or what crosses a cut cannot be sent.
    """
    costs = [layer.flops.forward + _numel(layer) for layer in numbers]
    if points is None:
        # A layer whose output cannot be sent stays with the next one.
        ends = [i + 1 for i, layer in enumerate(numbers) if layer.output is not None or i == len(numbers) - 1]
        units = [range(a, b) for a, b in zip([0, *ends], ends, strict=False)]
        unit_names = [f"{names[u[0]]} to {names[u[-1]]}" if len(u) > 1 else names[u[0]] for u in units]
        parts = cut(unit_names, [sum(costs[i] for i in unit) for unit in units], stages, None)
        return [range(units[part[0]].start, units[part[-1]].stop) for part in parts]
    parts = cut(names, costs, stages, points)
    for stage in parts[:-1]:
        if numbers[stage[-1]].output is None:
            raise ValueError(
                f"cut={list(points)}: {names[stage[-1]]} passes on something that is neither a tensor nor a tuple of "
                f"tensors, which cannot be sent to the next stage. Cut elsewhere, or leave cut out: then the "
                "stages are cut where they can be."
            )
    return parts


def _numel(layer: LayerNumbers) -> float:
    specs = layer.output.specs if layer.output is not None else ()
    return float(sum(prod(spec.shape) for spec in specs))


def shared_weights(layers: list[tuple[str, nn.Module]], stages: list[range]) -> list[Shared]:
    """Return the tied weights of a chain that more than one stage computes with.

    Raises:
        ValueError: stages share a buffer; each would update its own copy.
    """
    names: dict[int, dict[int, str]] = {}  # by weight and stage
    buffers: dict[int, tuple[int, str]] = {}
    for number, stage in enumerate(stages):
        for prefix, layer in (layers[i] for i in stage):
            for name, parameter in layer.named_parameters(prefix):
                names.setdefault(id(parameter), {}).setdefault(number, name)
            for name, buffer in layer.named_buffers(prefix):
                first, known = buffers.setdefault(id(buffer), (number, name))
                if first != number:
                    raise ValueError(
                        f"{known!r} and {name!r} are one buffer, and would be in stages {first} and {number}: each "
                        "stage would change a copy of its own. What works: a cut that leaves both in one stage, "
                        "buffers that are not shared, or Plan.serial(). (Shared weights may be anywhere.)"
                    )
    return [Shared(held) for held in names.values() if len(held) > 1]
