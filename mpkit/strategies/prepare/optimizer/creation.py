"""Calls an optimizer function on stand-ins for the whole model's parameters, which take no memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mpkit.common.exceptions import one_line
from mpkit.common.torch_private import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from mpkit.strategies.models.hooks import hook_name, hooks_on
from mpkit.strategies.prepare.arguments.arguments import ADAM, a_kind_of
from mpkit.strategies.prepare.arguments.task import Rejection
from mpkit.strategies.prepare.optimizer.groups import as_sent, check_grouped
from mpkit.strategies.update.average import Average
from mpkit.strategies.update.optimizer import SeveralOptimizers, describe_optimizer, kind_of, parts_of
from mpkit.strategies.update.whole_model import stand_in, trained_parameters

__all__ = ["create_optimizer", "is_elementwise"]

ELEMENTWISE = tuple(
    getattr(torch.optim, name)
    for name in (
        "SGD",
        "Adam",
        "AdamW",
        "Adamax",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Adagrad",
        "Adadelta",
        "ASGD",
        "Rprop",
    )
)
"""PyTorch's optimizers that are elementwise according to the formulas in its documentation."""


def is_elementwise(made: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is known to be elementwise: one of PyTorch's own, unmodified.

    >>> is_elementwise(torch.optim.Adam([nn.Parameter(torch.ones(2))]))
    True
    """
    hooks = [*made._optimizer_step_pre_hooks.values(), *made._optimizer_step_post_hooks.values()]
    if any(not isinstance(hook, Average) for hook in hooks):
        return False
    if isinstance(made, SeveralOptimizers):
        return all(map(is_elementwise, made.optimizers))
    return type(made) in ELEMENTWISE and "step" not in vars(made)


def create_optimizer(
    optimizer: Any, model: nn.Module, given: nn.Module, *, scheduled: bool, once: bool
) -> torch.optim.Optimizer | None:
    """Return the optimizer that a function creates for stand-ins of the parameters; None if none are trained.

    Args:
        optimizer: as in `Cluster.train`.
        model: the whole model, as it is sent to the ranks.
        given: the same, as the user has it.
        scheduled: whether there is an lr_schedule.
        once: whether a step is a single backward on one rank, so that a hook on a parameter sees its gradient.

    Raises:
        Rejection: the function does not return a usable optimizer.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer).__name__
        raise Rejection(
            f"optimizer is an optimizer already, {kind}, and holds the parameters of your copy of the model. Each rank "
            f"makes its own, for its part: optimizer=lambda params: torch.optim.{kind}(params, lr="
            f"{optimizer.param_groups[0].get('lr', 1e-3)})"
        )
    if not callable(optimizer):
        raise Rejection(f"optimizer is {a_kind_of(optimizer)}; it is a function of parameters: {ADAM}")
    _check_global_hooks()
    whole, _ = trained_parameters(model)
    if not whole:
        return None
    params = {each.name: stand_in(each) for each in whole}
    made = _make(as_sent(optimizer, model, params), params)
    _check_made(made, params, scheduled=scheduled, once=once)
    check_grouped(optimizer, given, made, params)
    return made


def _make(optimizer: Any, params: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    function = describe_optimizer(optimizer)
    given = "named_parameters" if function.by_name else "params"
    try:
        made = function.make_optimizer(params)
    except Exception as error:
        hint = "" if function.by_name else "; mk.optimizer.by_name(function) gives it (name, parameter) pairs"
        raise Rejection(
            f"optimizer({given}) failed for the model's {len(params)} parameters: {one_line(error)}. It is called on "
            f"every rank with a list of all parameters that are trained, in the model's order: {ADAM}{hint}"
        ) from None
    if not isinstance(made, torch.optim.Optimizer):
        raise Rejection(
            f"optimizer({given}) gave {a_kind_of(made)}; it gives a torch.optim.Optimizer of the parameters, or a "
            f"list of several: {ADAM}"
        )
    lacking = [name for name in ("param_groups", "state") if not hasattr(made, name)]
    if lacking:
        raise Rejection(
            f"optimizer({given}) gave {type(made).__name__} without {' and '.join(lacking)}, of which ranks make its "
            f"part and checkpoints: its __init__ calls super().__init__(params, defaults), as {ADAM[10:]} does."
        )
    return made


def _check_made(
    made: torch.optim.Optimizer, params: dict[str, nn.Parameter], *, scheduled: bool, once: bool
) -> None:
    kind = kind_of(made)
    if any(isinstance(each, torch.optim.LBFGS) for each in parts_of(made)):
        raise Rejection(
            "optimizer: LBFGS computes the loss anew within its step, which a step split over ranks cannot; "
            f"one that takes a step from the gradients works: {ADAM}"
        )
    given = {id(p) for p in params.values()}
    taken = {id(p) for group in made.param_groups for p in group["params"]}
    if not taken <= given:
        raise Rejection(
            "optimizer(params) made an optimizer of other parameters than those it was called with (of your copy "
            f"of the model, perhaps); it has to use its argument: {ADAM}"
        )
    if scheduled and any("lr" not in group for group in made.param_groups):
        raise Rejection(
            f"lr_schedule with {kind}: a group of it has no 'lr' for the schedule to multiply. Either without "
            f"lr_schedule, or an optimizer with a learning rate: {ADAM}"
        )
    hooks = [] if once else hooks_on(params)
    if hooks:
        raise Rejection(
            f"optimizer(params) registers {hooks[0]}, which would see the "
            "gradients of a rank's micro-batches and not that of the whole batch. What works: Plan.serial(); or an "
            "optimizer whose step does it, to gradients that are complete; max_grad_norm=1.0 clips by norm."
        )


def _check_global_hooks() -> None:
    for hooks in (_global_optimizer_pre_hooks, _global_optimizer_post_hooks):
        for hook in hooks.values():
            if str(getattr(hook, "__module__", "")).startswith("mpkit."):
                continue  # a wrapper's, in a rank
            raise Rejection(
                f"A hook on all optimizers ({hook_name(hook)}, by register_optimizer_step_pre_hook or _post_hook) is "
                "set in this process, and ranks are processes of their own, without it. Register it on the optimizer, "
                "within the optimizer function: made.register_step_pre_hook(hook); and take this one away: "
                "handle.remove()."
            )
