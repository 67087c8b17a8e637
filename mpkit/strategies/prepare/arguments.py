"""Checks that the arguments have the right types and values and suit the number of ranks."""

import inspect
import os
from collections.abc import Callable
from typing import Any, Required, TypedDict

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from mpkit.common.exceptions import one_line
from mpkit.plan.kinds import real
from mpkit.plan.mesh import AXES
from mpkit.plan.plan import Plan
from mpkit.plan.schedule import Action
from mpkit.plan.schedule.catalogue import SCHEDULES
from mpkit.strategies.compute.stage_forward import measure_scores
from mpkit.strategies.data.batches import Batches, check_integer
from mpkit.strategies.data.microbatch import batch_size, part
from mpkit.strategies.job.job import EvaluationData
from mpkit.strategies.loss.counted import as_pair
from mpkit.strategies.prepare.batches import is_stream, take_batches
from mpkit.strategies.stage.stage import call


class TrainOptions(TypedDict, total=False):
    """Keyword arguments of `Cluster.train`, which documents them."""

    loss: Required[Callable[[Any, Any], torch.Tensor]]
    optimizer: Required[Callable[[Any], torch.optim.Optimizer]]
    steps: Required[int]
    seed: int
    max_grad_norm: float | None
    lr_schedule: Callable[[int], float] | None
    checkpoint_every: int | None
    checkpoint_dir: str | os.PathLike[str] | None
    checkpoint_keep: int
    resume_from: str | os.PathLike[str] | None
    on_step: Callable[[Any, int], Any] | None
    evaluate: Any
    every: int | None
    ema: float | None
    verify: Any


ADAM = "optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3)"
CROSS_ENTROPY = "loss=torch.nn.functional.cross_entropy"


def check_model(model: Any) -> None:
    """Check that the model is an nn.Module whose parameters are initialized."""
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
    """Check that the plan is a `Plan` for the given number of ranks that this version can execute."""
    if not isinstance(plan, Plan):
        known = isinstance(plan, str) and plan in SCHEDULES
        named = f"mk.Plan(pp={ranks}, schedule={plan!r})" if known else f"mk.Plan.gpipe({ranks}, 8)"
        raise ValueError(f"plan is {a_kind_of(plan)}; it is an mk.Plan, such as {named}")
    if plan.ranks != ranks:
        axes = [name for name in AXES if plan.mesh.degree(name) > 1]
        degrees = " x ".join(f"{name}={plan.mesh.degree(name)}" for name in axes)
        takes = f"{degrees or 'a serial plan'}, {plan.ranks} rank{'s' * (plan.ranks > 1)}"
        raise ValueError(
            f"{plan} is for {takes}, and the cluster has {ranks}: mk.Cluster(ranks={plan.ranks}) fits it"
        )
    if plan.data_parallel != "dp":
        return
    split = next((a for row in plan.build().rows for a in row if a.kind in ("I", "W")), None)
    if split is not None:
        raise ValueError(
            f"{plan}: the schedule splits its backward ({split}), and DP lends parameters for a whole one: write B for "
            f"I and W, as in {Action('B', split.stage, split.microbatch)}"
        )


def check_update(max_grad_norm: Any, lr_schedule: Any, steps: int) -> None:
    """Check that the norm is None or above 0, and the schedule None or a function of the step's number."""
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
    """Check that the loss is a function of outputs and targets with a mean reduction, without calling it."""
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
    """Check that no mode is on in which plain PyTorch would train in another way, or not at all."""
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


# ---- between the steps ---------------------------------------------------------------------------------------

ON_STEP = "on_step=lambda ctx, step: ctx.log('loss', ctx.loss)"
EVALUATE = (
    "evaluate=[(inputs, targets), ...] measures the loss, and evaluate=(batches, metric) also "
    "metric(outputs, targets)"
)


def check_on_step(on_step: Any) -> Callable[[Any, int], Any] | None:
    """Return a function that is called after each step; it takes a context and the step."""
    if on_step is None:
        return None
    if not callable(on_step):
        raise ValueError(
            f"on_step is {a_kind_of(on_step)}; it is a function of a context and a step: {ON_STEP}"
        )
    try:
        inspect.signature(on_step).bind(None, 0)
    except TypeError as error:
        raise ValueError(
            f"on_step cannot be called with a context and the number of the step ({error}); such as {ON_STEP}"
        ) from None
    except ValueError:  # a callable without a signature
        pass
    if inspect.iscoroutinefunction(on_step) or inspect.isgeneratorfunction(on_step):
        raise ValueError(f"on_step is a generator or coroutine, which ranks would never run: {ON_STEP}")
    checked: Callable[[Any, int], Any] = on_step
    return checked


def check_ema(ema: Any) -> float | None:
    """Return the decay of the average of the weights, from 0 up to 1; None: there is none."""
    if ema is None:
        return None
    if isinstance(ema, bool) or not isinstance(ema, (int, float)) or not 0.0 <= ema < 1.0:
        raise ValueError(
            f"ema={ema!r:.80}: it is the share of the average that stays in each step, from 0 up to 1; ema=0.999"
        )
    return float(ema)


def take_evaluation(evaluate: Any, every: Any, model: nn.Module) -> EvaluationData | None:
    """Return what is evaluated and when; the metric is tried on two samples, and the model is left unchanged.

    `evaluate` is data as for training, or (data, metric); `every`, the steps between evaluations, is 1 if it is None.
    """
    if evaluate is None:
        if every is not None:
            raise ValueError(
                f"every={every!r} says how often evaluate= is done, and there is none: {EVALUATE}. on_step is called "
                f"after each step: `if step % {every} == 0` in it does something more seldom."
            )
        return None
    every = 1 if every is None else check_integer("every", every, 1, 10)
    data, metric = evaluate, None
    if isinstance(evaluate, tuple) and len(evaluate) == 2 and callable(evaluate[1]):
        data, metric = evaluate
    elif callable(evaluate) and not hasattr(evaluate, "__getitem__") and not isinstance(evaluate, Batches):
        raise ValueError(f"evaluate is a function; it needs data: {EVALUATE}")
    if is_stream(data):
        raise ValueError(
            f"evaluate is {a_kind_of(data)}, which ends nowhere or can be read once only, and each evaluation reads "
            "all of it. The first batches can be kept: evaluate=list(itertools.islice(data, 8))"
        )
    try:
        batches = take_batches(data, 2**31)
    except ValueError as error:
        raise ValueError(f"evaluate: {error}") from None
    names = ("eval loss", *(_names(model, batches, metric) if metric is not None else ()))
    return EvaluationData(batches, metric, names, every)


def _names(model: nn.Module, batches: Any, metric: Callable[[Any, Any], Any]) -> list[str]:
    """Return what the metric measures on two samples, which it is tried on."""
    inputs, targets = batches[0]
    few = slice(0, min(2, batch_size(inputs)))
    modes = [(module, module.training) for module in model.modules()]
    try:
        with torch.no_grad():
            model.eval()  # its own train() may return nothing
            output = call(model, part(inputs, few), first=True)
            values = measure_scores(metric, output, part(targets, few))
            for value in values.values():
                if as_pair(value) is None:
                    float(value)
    except Exception as error:
        raise ValueError(
            f"evaluate: model and metric were tried on {few.stop} samples before the ranks start, and failed: "
            f"{one_line(error)}. A metric is a function of outputs and targets that returns a number, the mean over "
            "samples; (total, count); or a dict of these: evaluate=(batches, lambda out, y: (out.argmax(1) == y)"
            ".float().mean())"
        ) from error
    finally:
        for module, training in modes:
            module.training = training
    name = getattr(metric, "__name__", type(metric).__name__)
    alone = "eval metric" if name == "<lambda>" else f"eval {name}"
    return [f"eval {each}" if each else alone for each in values]
