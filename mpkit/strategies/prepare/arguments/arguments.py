"""Checks that the arguments have the right types and values and suit the number of ranks."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from mpkit.common.exceptions import one_line
from mpkit.plan.axes import AXES
from mpkit.plan.kinds import real, whole
from mpkit.plan.plan import Plan
from mpkit.plan.rules import change_plan
from mpkit.plan.schedule import Action, Schedule
from mpkit.plan.schedule.catalogue import GPIPE, SCHEDULES

__all__ = [
    "a_kind_of", "check_integers", "check_loss", "check_model", "check_plan", "check_surroundings", "check_update",
]  # fmt: skip


MOST_STEPS = 2**31 - 1
MOST_SEED = 2**62
SEED_WHY = " (torch's generators hold 64 bits, and each rank and step has a seed of its own that is counted on from it)"
ADAM = "optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3)"
CROSS_ENTROPY = "loss=torch.nn.functional.cross_entropy"


def check_model(model: Any) -> None:
    """Check that the model is an nn.Module whose parameters are initialized.

    Raises:
        ValueError: the model is something else, or has no numbers yet.
    """
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise ValueError(
            f"model={model.__name__} is a class; the model is an object of it: {model.__name__}(...)"
        )
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model is {a_kind_of(model)}; what is trained is a torch.nn.Module, such as mpkit.models.GPT() or "
            "torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))"
        )
    lazy = [name for name, value in model.named_parameters() if isinstance(value, UninitializedParameter)]
    if lazy:
        raise ValueError(
            f"The model's {lazy[0]} has no shape yet (a lazy module): call the model once first, "
            "as in model(inputs), then train it."
        )
    elsewhere = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if elsewhere:
        raise ValueError(
            f"The model's {elsewhere[0]} is on the meta device and holds no numbers: "
            "build the model on the CPU, or fill it: model.to_empty(device='cpu'), then its initialization."
        )


def check_plan(plan: Any, ranks: int) -> None:
    """Check that the plan is a `Plan` for the given number of ranks that this version can execute.

    Raises:
        ValueError: it is not a plan, needs a different number of ranks, or splits its backward.
    """
    if not isinstance(plan, Plan):
        named = (
            f"mk.Plan(pp={ranks}, schedule={plan!r})"
            if isinstance(plan, str) and plan in SCHEDULES
            else f"mk.Plan.gpipe({ranks}, 8)"
        )
        raise ValueError(f"plan is {a_kind_of(plan)}; it is an mk.Plan, such as {named}")
    if plan.ranks != ranks:
        degrees = " x ".join(
            f"{name}={plan.mesh.degree(name)}" for name in AXES if plan.mesh.degree(name) > 1
        )
        takes = f"{degrees or 'a serial plan'}, {plan.ranks} rank{'s' * (plan.ranks > 1)}"
        instead = (
            f", or on this one: mk.{_for_ranks(plan, ranks)}"
            if not isinstance(plan.schedule, Schedule)
            else ""
        )
        raise ValueError(
            f"{plan} is for {takes}, and the cluster has {ranks}: mk.Cluster(ranks={plan.ranks}) fits it{instead}"
        )
    if plan.data_parallel != "dp":
        return
    split = next((a for row in plan.build().rows for a in row if a.kind in ("I", "W")), None)
    if split is not None:
        raise ValueError(
            f"{plan}: the schedule splits its backward ({split}), and DP lends parameters for a whole one: write B for "
            f"I and W, as in {Action('B', split.stage, split.microbatch)}"
        )


def _for_ranks(plan: Plan, ranks: int) -> Plan:
    """Return the plan for this many ranks that is nearest to the given one.

    Axes are kept; if their degrees cannot all stay, the degree of dp changes first, then that of pp.
    """
    if ranks == 1:
        return Plan.serial(plan.microbatches)
    order = ("dp", "pp", "cp", "tp") if plan.ranks > 1 else ("pp", "dp", "cp", "tp")
    before = {axis: getattr(plan, axis) for axis in order}
    meshes = [
        dict(zip(order, degrees, strict=True))
        for degrees in product(range(1, ranks + 1), repeat=len(order))
        if prod(degrees) == ranks
    ]

    def loss(mesh: dict[str, int]) -> tuple[int, int, int, list[int]]:
        changed = [axis for axis in order if mesh[axis] != before[axis]]
        ended = sum(mesh[axis] == 1 for axis in changed)
        begun = sum(before[axis] == 1 for axis in changed)
        of_the_model = sum(
            axis in ("cp", "tp") for axis in changed
        )  # heads and sequences have to be divisible
        return ended, of_the_model, begun, [order.index(axis) for axis in changed]

    for mesh in sorted(meshes, key=loss):
        changes: dict[str, Any] = dict(mesh)
        if mesh["pp"] != plan.pp:
            changes["cut"] = None
            if 1 in (mesh["pp"], plan.pp):
                changes |= {"schedule": GPIPE, "virtual_stages": 1}
        with suppress(ValueError):  # a schedule may need another number of micro-batches
            fitting = change_plan(
                plan, **changes, sequence_parallel=plan.sequence_parallel and mesh["tp"] > 1
            )
            _with_few(fitting).build()
            return fitting
    return Plan.ddp(ranks)


def _with_few(plan: Plan) -> Plan:
    """Return the plan with fewer micro-batches, for which a schedule exists if one does for the given plan.

    The number of micro-batches stays the same modulo p.
    """
    few = 4 * plan.pp
    return replace(plan, microbatches=min(plan.microbatches, few + plan.microbatches % few))


def check_integers(steps: Any, seed: Any) -> tuple[int, int]:
    """Return steps, at least 1, and seed as Python integers.

    Raises:
        ValueError: they are not integers, or are out of range.
    """
    checked = []
    for name, value, least, most, good in (
        ("steps", steps, 1, MOST_STEPS, 3),
        ("seed", seed, 0, MOST_SEED, 0),
    ):
        number = whole(value)
        if number is None or number < least:
            raise ValueError(
                f"{name}={value!r}: {name} is a whole number, {least} or more, such as {name}={good}"
            )
        if number > most:
            raise ValueError(
                f"{name}={value!r}: {name} is at most {most:,}{SEED_WHY * (name == 'seed')}, such as {name}={good}"
            )
        checked.append(number)
    return checked[0], checked[1]


def check_update(max_grad_norm: Any, lr_schedule: Any, steps: int) -> None:
    """Check that the norm is None or above 0, and the schedule None or a function of the step's number.

    Raises:
        ValueError: one of them is something else.
    """
    if max_grad_norm is not None and not (real(max_grad_norm) or 0.0) > 0:
        raise ValueError(
            f"max_grad_norm={max_grad_norm!r}: the norm that gradients are clipped to is a number above 0, such as "
            "max_grad_norm=1.0; None clips nothing"
        )
    if lr_schedule is None:
        return
    wanted = "lr_schedule(step) gives what the learning rate is multiplied by, such as lambda step: 0.9**step"
    if not callable(lr_schedule):
        raise ValueError(f"lr_schedule is {a_kind_of(lr_schedule)}; {wanted}")
    for step in sorted({0, steps - 1}):
        try:
            factor = lr_schedule(step)
        except Exception as error:
            raise ValueError(f"lr_schedule({step}) failed: {one_line(error)}; {wanted}") from None
        number = real(factor)
        if number is None or not number >= 0:
            raise ValueError(f"lr_schedule({step}) gave {a_kind_of(factor)}; {wanted}")


def check_loss(loss: Any) -> None:
    """Check that the loss is a function of outputs and targets with a mean reduction, without calling it.

    Raises:
        ValueError: it is something else.
    """
    if isinstance(loss, type) and issubclass(loss, nn.Module):
        raise ValueError(
            f"loss={loss.__name__} is a class; the loss is an object of it: loss=torch.nn.{loss.__name__}()"
        )
    if not callable(loss):
        raise ValueError(
            f"loss is {a_kind_of(loss)}; it is a function loss(outputs, targets) -> scalar, such as {CROSS_ENTROPY}"
        )
    reduction = getattr(loss, "reduction", "mean")
    if reduction not in ("mean", "batchmean"):
        raise ValueError(
            f"loss={type(loss).__name__}(reduction={reduction!r}): the loss is the mean over the batch, from which "
            f"that over micro-batches is put together: loss=torch.nn.{type(loss).__name__}(), or (total, count)"
        )


def a_kind_of(value: Any) -> str:
    """Describe a value by its class and its repr, for a message."""
    shown = repr(value)
    return f"{type(value).__name__} {shown if len(shown) < 60 else ''}".strip()


def check_surroundings() -> None:
    """Check that no mode is on in which plain PyTorch would train in another way, or not at all.

    Raises:
        ValueError: gradients are off, or autocast is on.
    """
    if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
        mode = "torch.inference_mode()" if torch.is_inference_mode_enabled() else "torch.no_grad()"
        raise ValueError(
            f"cluster.train inside {mode}: gradients are off there (or since torch.set_grad_enabled(False)), and "
            "nothing can be trained. Call it outside, or in `with torch.inference_mode(False), torch.enable_grad():`"
        )
    for name in ("cpu", "cuda", "xpu"):
        if torch.is_autocast_enabled(name):
            dtype = torch.get_autocast_dtype(name)
            raise ValueError(
                f'cluster.train inside torch.autocast("{name}", {dtype}): ranks are processes of their own, which it '
                'does not reach. Call it outside, with mk.Plan(..., precision="bf16"), or let the model do it: '
                f'model.forward = torch.autocast("{name}", {dtype})(model.forward)'
            )
