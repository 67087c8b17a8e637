"""Are the arguments what they should be, and do they fit the ranks?"""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from mpkit.plan import Plan
from mpkit.schedule import NAMES, Action, Schedule, build

__all__ = [
    "check_integers",
    "check_loss",
    "check_model",
    "check_optimizer",
    "check_plan",
    "check_update",
    "one_line",
]

ADAM = "optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3)"
CROSS_ENTROPY = "loss=torch.nn.functional.cross_entropy"


def check_model(model: Any) -> None:
    """An nn.Module whose parameters are there.

    Raises:
        ValueError: it is something else.
    """
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise ValueError(
            f"model={model.__name__} is a class; the model is an object of it: {model.__name__}(...)"
        )
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model is {_a(model)}; what is trained is a torch.nn.Module, such as mpkit.models.GPT() or "
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
    """A Plan for as many ranks as there are, that this version can execute.

    Raises:
        ValueError: it is none, or takes another number of ranks, or splits its backward.
    """
    if not isinstance(plan, Plan):
        named = (
            f"mk.Plan(pp={ranks}, schedule={plan!r})"
            if plan in _names(plan)
            else f"mk.Plan.gpipe({ranks}, 8)"
        )
        raise ValueError(f"plan is {_a(plan)}; it is an mk.Plan, such as {named}")
    if plan.ranks != ranks:
        degrees = " x ".join(
            f"{name}={getattr(plan, name)}" for name in ("pp", "dp", "tp", "cp") if getattr(plan, name) > 1
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
    split = next((a for row in build(plan).rows for a in row if a.kind in ("I", "W")), None)
    if split is not None and plan.data_parallel == "dp":
        raise ValueError(
            f"{plan}: the schedule splits its backward ({split}), and DP lends parameters for a whole one: write B for "
            f"I and W, as in {Action('B', split.stage, split.microbatch)}"
        )


def _for_ranks(plan: Plan, ranks: int) -> Plan:
    """The nearest plan for so many: axes stay, and if their degrees cannot all stay, dp's changes first, then pp's."""
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
                changes |= {"schedule": "gpipe", "virtual_stages": 1}
        with suppress(ValueError):  # a schedule may want other micro-batches
            found = replace(plan, **changes, sequence_parallel=plan.sequence_parallel and mesh["tp"] > 1)
            build(found)
            return found
    return Plan.ddp(ranks)


def check_integers(steps: Any, seed: Any) -> tuple[int, int]:
    """Steps, 1 or more, and a seed.

    Raises:
        ValueError: they are none.
    """
    found = []
    for name, value, least, good in (("steps", steps, 1, 3), ("seed", seed, 0, 0)):
        try:
            number = operator.index(value)
        except TypeError:
            number = -1
        if isinstance(value, bool) or number < least:
            raise ValueError(
                f"{name}={value!r}: {name} is a whole number, {least} or more, such as {name}={good}"
            )
        found.append(number)
    return found[0], found[1]


def check_update(max_grad_norm: Any, lr_schedule: Any, steps: int) -> None:
    """A norm above 0 and a function of the step's number, or None.

    Raises:
        ValueError: they are something else.
    """
    if max_grad_norm is not None and (
        isinstance(max_grad_norm, bool)
        or not isinstance(max_grad_norm, (int, float))
        or not max_grad_norm > 0
    ):
        raise ValueError(
            f"max_grad_norm={max_grad_norm!r}: the norm that gradients are clipped to is a number above 0, such as "
            "max_grad_norm=1.0; None clips nothing"
        )
    if lr_schedule is None:
        return
    wanted = "lr_schedule(step) gives what the learning rate is multiplied by, such as lambda step: 0.9**step"
    if not callable(lr_schedule):
        raise ValueError(f"lr_schedule is {_a(lr_schedule)}; {wanted}")
    for step in sorted({0, steps - 1}):
        try:
            factor = lr_schedule(step)
        except Exception as error:
            raise ValueError(f"lr_schedule({step}) failed: {one_line(error)}; {wanted}") from None
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not factor >= 0:
            raise ValueError(f"lr_schedule({step}) gave {_a(factor)}; {wanted}")


def check_loss(loss: Any) -> None:
    """A function of outputs and targets that takes their mean, as far as can be told without calling it.

    Raises:
        ValueError: it is something else.
    """
    if isinstance(loss, type) and issubclass(loss, nn.Module):
        raise ValueError(
            f"loss={loss.__name__} is a class; the loss is an object of it: loss=torch.nn.{loss.__name__}()"
        )
    if not callable(loss):
        raise ValueError(
            f"loss is {_a(loss)}; it is a function loss(outputs, targets) -> scalar, such as {CROSS_ENTROPY}"
        )
    reduction = getattr(loss, "reduction", "mean")
    if reduction not in ("mean", "batchmean"):
        raise ValueError(
            f"loss={type(loss).__name__}(reduction={reduction!r}): the loss is the mean over the batch, from which "
            f"that over micro-batches is put together: loss=torch.nn.{type(loss).__name__}()"
        )


def check_optimizer(
    optimizer: Callable[[Any], Any], layers: list[tuple[str, nn.Module]], stages: list[range]
) -> None:
    """A function that makes an optimizer of any stage's parameters; tried on stand-ins for them.

    Raises:
        ValueError: it is something else.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer).__name__
        raise ValueError(
            f"optimizer is an optimizer already, {kind}, and holds the parameters of your copy of the model. Each rank "
            f"makes its own, for its part: optimizer=lambda params: torch.optim.{kind}(params, lr="
            f"{optimizer.param_groups[0].get('lr', 1e-3)})"
        )
    if not callable(optimizer):
        raise ValueError(f"optimizer is {_a(optimizer)}; it is a function of parameters: {ADAM}")
    for number, stage in enumerate(stages):
        held = nn.ModuleList(layers[i][1] for i in stage)
        params = [nn.Parameter(torch.empty_like(p), p.requires_grad) for p in held.parameters()]
        if not params:
            continue
        try:
            made = optimizer(params)
        except Exception as error:
            raise ValueError(
                f"optimizer(params) failed for stage {number}'s {len(params)} parameters: {one_line(error)}. It is "
                f"called on every rank with the parameters of that rank: {ADAM}"
            ) from None
        if not isinstance(made, torch.optim.Optimizer):
            raise ValueError(
                f"optimizer(params) gave {_a(made)}; it gives a torch.optim.Optimizer of the parameters: {ADAM}"
            )
        if isinstance(made, torch.optim.LBFGS):
            raise ValueError(
                "optimizer: LBFGS computes the loss anew within its step, which a step split over ranks cannot; "
                f"one that takes a step from the gradients works: {ADAM}"
            )
        given, taken = (
            {id(p) for p in params},
            {id(p) for group in made.param_groups for p in group["params"]},
        )
        if not taken <= given:
            raise ValueError(
                "optimizer(params) made an optimizer of other parameters than those it was called with (of your copy "
                f"of the model, perhaps); it has to use its argument: {ADAM}"
            )


def one_line(error: BaseException) -> str:
    """What an exception says, without the traceback, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[0] if lines else "no reason given"
    return f"{type(error).__name__}: {said[:300]}"


def _a(value: Any) -> str:
    shown = repr(value)
    return f"{type(value).__name__} {shown if len(shown) < 60 else ''}".strip()


def _names(plan: Any) -> list[str]:
    return list(NAMES) if isinstance(plan, str) else []
