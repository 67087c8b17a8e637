"""Where the model is cut, and whether it can be cut there."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import groupby
from math import prod

from torch import nn

from mpkit.models.cut import cut
from mpkit.parallel.job import LayerNumbers
from mpkit.plan import Plan

__all__ = ["check_gathered", "check_sharing", "cut_stages"]


def cut_stages(names: list[str], numbers: list[LayerNumbers], plan: Plan) -> list[range]:
    """The layers of each stage: where the plan says, or balanced by forward FLOPs.

    A layer without a matrix product counts one operation for each number that it makes.

    Args:
        names: of the layers.
        numbers: of the layers, without the loss.
        plan: whose stages they are.

    Raises:
        ValueError: more stages than layers, or a cut where something passes that cannot be sent.
    """
    costs = [layer.flops.forward + _numel(layer) for layer in numbers]
    if plan.cut is None:
        # Layers that pass on something that cannot be sent stay with the next one.
        ends = [i + 1 for i, layer in enumerate(numbers) if layer.output is not None or i == len(numbers) - 1]
        units = [range(a, b) for a, b in zip([0, *ends], ends, strict=False)]
        unit_names = [f"{names[u[0]]} to {names[u[-1]]}" if len(u) > 1 else names[u[0]] for u in units]
        parts = cut(unit_names, [sum(costs[i] for i in unit) for unit in units], plan.stages, None)
        return [range(units[part[0]].start, units[part[-1]].stop) for part in parts]
    stages = cut(names, costs, plan.stages, plan.cut)
    for stage in stages[:-1]:
        if numbers[stage[-1]].output is None:
            raise ValueError(
                f"cut={list(plan.cut)}: {names[stage[-1]]} passes on something that is neither a tensor nor a tuple of "
                f"tensors, which cannot be sent to the next stage. Cut elsewhere, or leave cut out: then the "
                "stages are cut where they can be."
            )
    return stages


def _numel(layer: LayerNumbers) -> float:
    specs = layer.output.specs if layer.output is not None else ()
    return float(sum(prod(spec.shape) for spec in specs))


def check_sharing(layers: list[tuple[str, nn.Module]], stages: list[range]) -> None:
    """No parameter or buffer in two stages: each would train a copy of its own.

    Raises:
        ValueError: there is one, with the layers that share it.
    """
    where = {i: number for number, stage in enumerate(stages) for i in stage}
    users: dict[int, list[int]] = {}
    for i, (_, layer) in enumerate(layers):
        for tensor in {id(t) for t in (*layer.parameters(), *layer.buffers())}:
            users.setdefault(tensor, []).append(i)
    for shared in users.values():
        held = [number for number, _ in groupby(where[i] for i in shared)]
        if len(held) > 1:
            first, last = layers[shared[0]][0], layers[shared[-1]][0]
            raise ValueError(
                f"Layers {first!r} and {last!r} share a weight, and would be in stages {held[0]} and {held[-1]}: each "
                "stage would train a copy of its own. What works in this version: weights that are not shared, a "
                f"cut that leaves both in one stage, or Plan.serial()."
            )


def check_gathered(numbers: dict[Hashable, list[LayerNumbers]], plan: Plan) -> None:
    """Where rank 0 gathers the outputs (DP), they are tensors whose first dimension is the batch.

    Raises:
        ValueError: they are not.
    """
    if plan.dp == 1 or plan.data_parallel != "dp":
        return
    for key, layers in numbers.items():
        assert isinstance(key, tuple)
        samples, output = key[0][1][0], layers[-2].output
        if output is None or any(spec.shape[:1] != (samples,) for spec in output.specs):
            made = "neither a tensor nor a tuple of tensors" if output is None else f"{output}"
            raise ValueError(
                f"{plan}: DP gathers the outputs of all ranks in their first dimension, which has to be the batch, and "
                f"of {samples} sample{'s' * (samples > 1)} the model makes {made}. Either let it return a tensor "
                f"(batch, ...) or a tuple of such, or Plan.ddp({plan.dp}), which gathers none."
            )
