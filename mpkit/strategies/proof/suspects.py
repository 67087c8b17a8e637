"""What of a training is known not to survive a plan: said once a step differs and no comparison tells why.

Words only, the likeliest first. Each was seen to make a training another one than in plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from mpkit.common.torch_private import _Loss
from mpkit.plan.plan import Plan
from mpkit.strategies.job.job import TrainJob
from mpkit.strategies.models.hooks import backward_hooks, describe_wrappers
from mpkit.strategies.tensor.known_plans import find_tensor_plan

__all__ = ["find_suspects"]


def find_suspects(job: TrainJob, says: str) -> Iterator[str]:
    """Yield what may be why a step differs.

    Args:
        job: the training.
        says: what differs, in words.

    Of a model without anything suspicious nothing is yielded.
    """
    plan, model = job.plan, job.what.model
    yield from _loss_of_model(plan, job.what.given_loss or job.what.loss)
    yield from _hooks(plan, job)
    if plan.tp * plan.cp > 1:
        yield from _wrappers(plan, model)
    if plan.cp > 1:
        yield _sequence(plan)
    if plan.tp > 1:
        yield from _regions(plan, model, says)


def _loss_of_model(plan: Plan, loss: Any) -> Iterator[str]:
    if plan.pp > 1 or plan.recompute != "none" or plan.zero == 3:
        for name, module in _modules_of(loss, set()):
            yield (
                f"The loss refers to a module ({name}: {type(module).__name__}). A rank has only a part of the model, "
                "or "
                "computes it elsewhere, so what the module keeps of a forward, or its parameters, are not those that "
                "the "
                "loss sees in plain PyTorch. What works: what the loss needs of a layer among the model's outputs; "
                f"weight decay in the optimizer; or mk.Plan.ddp({plan.ranks})"
            )
            return


def _modules_of(value: Any, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules in the variables around a function."""
    function = value.__func__ if isinstance(value, MethodType) else value
    if not isinstance(function, FunctionType) or id(function) in seen:
        return
    seen.add(id(function))
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            held = cell.cell_contents
        except ValueError:  # it is still empty
            continue
        if isinstance(held, nn.Module) and not isinstance(held, _Loss):
            yield name, held
        elif isinstance(held, Callable):  # type: ignore[arg-type]
            yield from _modules_of(held, seen)


def _hooks(plan: Plan, job: TrainJob) -> Iterator[str]:
    if plan.ranks * plan.microbatches > 1:
        for hook in (*job.what.parameter_hooks, *backward_hooks(job.what.model)):
            yield (
                f"{str(hook)[0].upper()}{str(hook)[1:]} sees the gradients of parts of the batch, and what it makes of "
                "them does not add up to what it makes of the whole. What works: no such hook; max_grad_norm=1.0 in "
                "train() clips by the norm of all gradients, and an optimizer whose step changes gradients has "
                "complete "
                "ones"
            )


def _wrappers(plan: Plan, model: nn.Module) -> Iterator[str]:
    part = "a part of each sequence" if plan.cp > 1 or plan.sequence_parallel else "a part of the features"
    for name, module in model.named_modules():
        if (described := describe_wrappers(module, name)) is not None:
            yield (
                f"{described[0].upper()}{described[1:]} is given {part}, since ranks share layers and sequences. What "
                "works: it on a module around whole transformer blocks or on the model, with cp=1; or a plan without "
                "tp "
                f"and cp, such as mk.Plan.ddp({plan.ranks})"
            )


def _sequence(plan: Plan) -> str:
    return (
        f"With cp={plan.cp} a rank computes its part of each sequence, and only F.scaled_dot_product_attention "
        "sees the other ranks' tokens. So the likely cause is a layer, or a loss, that looks at other tokens in "
        "another "
        "way: a shift, a cumulative sum, a mean over the sequence, or its length. What works: such a look by "
        "F.scaled_dot_product_attention; targets that are shifted in the data, and not in the loss; or cp=1, "
        f"mk.Plan.ddp({plan.ranks})"
    )


def _regions(plan: Plan, model: nn.Module, says: str) -> Iterator[str]:
    tensor = plan.tensor or find_tensor_plan(model)
    region = next((r.entry for r in tensor.regions if f"{r.entry}." in says), None)
    where = f" (here perhaps in Region(entry={region!r}))" if region is not None else ""
    yield (
        f"Divided by its TensorPlan, {type(model).__name__} does not compute what it computes whole{where}. Between "
        "column and row layers a forward may treat features or heads one by one only: fused projections take "
        "sections=(1, 1, 1), attributes that count heads local=('num_heads',), arguments that are added after the row "
        "layer apart=('residual',). mk.tensor.find_tensor_plan(model) is the plan to begin with; leave this region "
        "out, "
        "or train with tp=1"
    )
