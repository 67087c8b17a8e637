"""What happens between the steps of a training: `on_step`, `evaluate`, `every` and `ema`, checked beforehand."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mpkit.common.exceptions import one_line
from mpkit.strategies.compute.scores import measure_scores
from mpkit.strategies.data.batches import Batches
from mpkit.strategies.data.microbatch import batch_size, part
from mpkit.strategies.job.job import EvaluationData
from mpkit.strategies.loss.quotient import as_pair
from mpkit.strategies.prepare.arguments.arguments import a_kind_of
from mpkit.strategies.prepare.arguments.batches import is_stream, take_batches
from mpkit.strategies.stage.stage import call

__all__ = ["check_ema", "check_on_step", "take_evaluation"]

ON_STEP = "on_step=lambda ctx, step: ctx.log('loss', ctx.loss)"
EVALUATE = (
    "evaluate=[(inputs, targets), ...] measures the loss, and evaluate=(batches, metric) also "
    "metric(outputs, targets)"
)


def check_on_step(on_step: Any) -> Callable[[Any, int], Any] | None:
    """Return a function that is called after each step.

    Raises:
        ValueError: it cannot be called with a context and a step.
    """
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
    """Return the decay of the average of the weights.

    Raises:
        ValueError: it is no number from 0 up to 1.
    """
    if ema is None:
        return None
    if isinstance(ema, bool) or not isinstance(ema, (int, float)) or not 0.0 <= ema < 1.0:
        raise ValueError(
            f"ema={ema!r:.80}: it is the share of the average that stays in each step, from 0 up to 1; ema=0.999"
        )
    return float(ema)


def take_evaluation(evaluate: Any, every: Any, model: nn.Module) -> EvaluationData | None:
    """Return what is evaluated and when; the metric is tried on two samples.

    Args:
        evaluate: data as for training, or (data, metric).
        every: steps from one evaluation to the next; None: 1.
        model: the model, which is left unchanged.

    Raises:
        ValueError: these arguments cannot work.
    """
    if evaluate is None:
        if every is not None:
            raise ValueError(
                f"every={every!r} says how often evaluate= is done, and there is none: {EVALUATE}. on_step is called "
                f"after each step: `if step % {every} == 0` in it does something more seldom."
            )
        return None
    every = 1 if every is None else every
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(
            f"every={every!r:.80}: it is the number of steps from one evaluation to the next: every=10"
        )
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
            model.eval()
            output = call(model, part(inputs, few), first=True)
        with torch.no_grad():
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
