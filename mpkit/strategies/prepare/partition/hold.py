"""Determines which stage holds each weight and which one returns each entry of the state dict."""

from __future__ import annotations

from collections.abc import Hashable

from torch import nn

from mpkit.strategies.partition.graph import Division, PartitionedModel
from mpkit.strategies.prepare.partition.calls import Start
from mpkit.strategies.prepare.partition.choice import PartitionChoice

__all__ = ["hold"]


def hold(
    model: nn.Module, choice: PartitionChoice, divisions: dict[Hashable, Division], starts: list[Start]
) -> PartitionedModel:
    """Return what ranks need to know about a divided model.

    Args:
        model: the user's model.
        choice: which of its modules were opened.
        divisions: the divisions by signature of a micro-batch.
        starts: the first call of each stage but stage 0.

    Raises:
        ValueError: stages share state that each would change on its own.
    """
    modules, stages = dict(model.named_modules()), len(starts) + 1
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    held: list[dict[str, None]] = [{} for _ in range(stages)]
    placed: list[dict[str, None]] = [{} for _ in range(stages)]
    for division in divisions.values():
        for node, s in zip(division.graph.nodes, division.stage_of, strict=True):
            held[s].update(dict.fromkeys(node.parameters))
            if node.block:
                placed[s][node.name] = None
                held[s].update(dict.fromkeys(names[id(p)] for p in modules[node.name].parameters()))
    _check_buffers(modules, placed)
    used = {name for stage in held for name in stage}
    held[0].update(dict.fromkeys(name for name in names.values() if name not in used))
    state = {}
    for key, value in model.state_dict(keep_vars=True).items():
        if id(value) in names:
            state[key] = next(s for s in range(stages) if names[id(value)] in held[s])
        else:
            inside = (s for s in range(stages) for block in placed[s] if key.startswith(f"{block}."))
            state[key] = max(inside, default=0)
    return PartitionedModel(
        choice.modules,
        choice.blocks,
        divisions,
        [tuple(stage) for stage in held],
        [tuple(stage) for stage in placed],
        state,
        starts,
    )


def _check_buffers(modules: dict[str, nn.Module], placed: list[dict[str, None]]) -> None:
    """Refuse a block with statistics that is called in two stages: each would keep its own statistics."""
    for name in dict.fromkeys(name for stage in placed for name in stage):
        stages = [s for s, blocks in enumerate(placed) if name in blocks]
        keeps = [key for key, _ in modules[name].named_buffers() if modules[name].training]
        if len(stages) > 1 and keeps:
            raise ValueError(
                f"{name} is called in the stages {', '.join(map(str, stages))}, and keeps {keeps[0]}, of which each "
                "stage would change a copy of its own. What works: a cut that leaves its calls in one stage, a block "
                "of its own for each call, model.eval() if it is not to change, or Plan.serial(). (Shared weights may "
                "be anywhere.)"
            )
