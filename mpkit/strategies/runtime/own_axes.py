"""A model divided along axes of one's own (`mpkit.plan.axes`): each axis' strategy leaves a rank its part.

divide    call the strategy with this rank's group along the axis
compare   what it says that it divided is what it divided, and no other axis divides it too
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from mpkit.plan.plan import Plan
from mpkit.strategies.comm.process_group import FakeGroup, ProcessGroup
from mpkit.strategies.stage.shard import Shard

__all__ = ["check_parts_of_axes", "divide_along_own_axes"]

Found = dict[str, tuple[str, Shard]]


def divide_along_own_axes(model: nn.Module, plan: Plan, group_of: Callable[[str], ProcessGroup]) -> Found:
    """Divide a model in place along each of a plan's own axes.

    Returns:
        The axis and the shard of each divided parameter, by every name that it has.

    Raises:
        ValueError: an axis has no strategy, or its strategy divides something else than it says.
    """
    found: Found = {}
    for axis, degree in plan.mesh.own:
        asked = f"Plan(axes={{{axis}: {degree}}})"
        if axis.divide is None:
            raise ValueError(
                f"{asked}: the axis has no strategy. A plan that was read from a file has none, since a file keeps no "
                f"functions: give it the row that has one, Axis({axis.name!r}, ..., divide=...)"
            )
        before = _shapes(model)
        # ---- divide
        shards = dict(axis.divide(model, group_of(axis.name)))
        # ---- compare
        told = {name: shard.shape for name, shard in shards.items()}
        after = _shapes(model)
        changed = {name: shape for name, shape in after.items() if shape != before.get(name)}
        if before.keys() != after.keys() or any(told.get(name) != shape for name, shape in changed.items()):
            raise ValueError(
                f"{asked}: its strategy returns a Shard for each parameter that it divides, under the name that the "
                f"whole model has for it. It returned {told}, and changed {changed or 'names'}"
            )
        if twice := [name for name in shards if name in found]:
            raise ValueError(
                f"{asked}: {twice[0]} is divided along {found[twice[0]][0]}, too: one axis can divide it"
            )
        found |= {name: (axis.name, shard) for name, shard in shards.items()}
    return found


def check_parts_of_axes(model: nn.Module, plan: Plan, copy: Callable[[nn.Module], nn.Module]) -> None:
    """Check that the ranks along each of a plan's own axes hold each element of what it divides once.

    Args:
        model: the whole model, which stays as it is.
        plan: read for its axes.
        copy: returns a copy of the model that shares its tensors.

    Raises:
        ValueError: they do not, or `divide_along_own_axes` refuses.
    """
    for axis, degree in plan.mesh.own:
        alone, groups = Plan(axes={axis: degree}), [FakeGroup(degree, i) for i in range(degree)]
        parts = [
            divide_along_own_axes(copy(model), alone, {axis.name: group}.__getitem__) for group in groups
        ]
        for name, (_, first) in parts[0].items():
            held = sorted(j for part in parts for of in part[name][1].ranges for j in of)
            if held != list(range(first.whole[first.dim])):
                raise ValueError(
                    f"Plan(axes={{{axis}: {degree}}}): the ranks along {axis} hold {held} of the "
                    f"{first.whole[first.dim]} {first.axis_name} of {name}, and each is to be on one rank: "
                    f"mpkit.strategies.stage.shard.evenly({first.whole[first.dim]}, n)[i] divides them"
                )


def _shapes(model: nn.Module) -> Mapping[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
