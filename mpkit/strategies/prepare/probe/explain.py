"""Explain why the parts of a batch do not add up to it: the loss, a loss computed within the model, or a layer."""

from __future__ import annotations

from collections.abc import Sequence
from math import isclose, isfinite
from typing import Any

import torch
from torch import Tensor, nn

from mpkit.common.exceptions import one_line
from mpkit.plan.plan import Plan
from mpkit.strategies.data.microbatch import batch_size
from mpkit.strategies.models.nested_values import flatten
from mpkit.strategies.prepare.probe.compare import ROUNDING, SINGLE, far, same_rows
from mpkit.strategies.prepare.probe.messages import for_layer, for_loss, for_model_loss
from mpkit.strategies.prepare.probe.trial import ProbeResult, ProbeTrial

__all__ = ["explain", "first_that_differs", "kind_of"]


Parts = Sequence[Sequence[int]]


def explain(
    plan: Plan, trial: ProbeTrial, whole: ProbeResult, split: ProbeResult, parts: Parts, size: int
) -> str:
    """Return the message that explains the difference.

    Args:
        trial: the trial of model, loss and data.
        whole, split: the results for the samples at once, and in these parts.
        size: the number of samples in the batch.
    """
    tolerance, tried, imprecise = _precisely(trial)
    return _explain(plan, trial, tried, tolerance, whole, split, parts, size) + imprecise


def _explain(
    plan: Plan,
    trial: ProbeTrial,
    tried: ProbeTrial,
    tolerance: float,
    whole: ProbeResult,
    split: ProbeResult,
    parts: Parts,
    size: int,
) -> str:
    everybody = [[i for part in parts for i in part]]
    all_outputs = tried.run([sorted(everybody[0])]).outputs[0]
    by_part = tried.run(parts).outputs
    one, others = flatten(all_outputs)[0], [flatten(outputs)[0] for outputs in by_part]
    alike = all(len(other) == len(one) for other in others)
    rows = alike and all(
        same_rows(leaf, [other[i] for other in others], parts, tolerance)
        for i, leaf in enumerate(one)
        if isinstance(leaf, Tensor) and leaf.dim()
    )
    if not rows:
        return for_layer(plan, trial.model, first_that_differs(tried, parts, tolerance) or "", [])
    scalars = [
        i for i, leaf in enumerate(one)
        if isinstance(leaf, Tensor) and not leaf.dim()
        and any(not isclose(float(leaf), float(other[i]), rel_tol=tolerance) for other in others)
    ]  # fmt: skip
    value = abs(whole.loss - split.loss) <= tolerance * max(abs(whole.loss), abs(split.loss))
    if value and not scalars and isfinite(split.loss):
        return for_layer(plan, trial.model, None, far(whole.gradients, split.gradients))
    if any(abs(float(one[i]) - whole.loss) <= SINGLE * abs(whole.loss) for i in scalars):
        return for_model_loss(plan, None, "its parts do not add up to it")
    kind, note = kind_of(tried, whole, split)
    return for_loss(plan, kind, whole.loss, split.loss, size) + note


def kind_of(trial: ProbeTrial, whole: ProbeResult, split: ProbeResult) -> tuple[str, str]:
    """Return the kind of loss, and a note where fewer samples have none.

    The kinds are "sum", "mean" (over something other than samples) and "whole".
    """
    if isclose(sum(split.losses), whole.loss, rel_tol=1e-4):
        return "sum", ""
    if batch_size(trial.data[0]) < 3:
        return ("mean" if all(map(isfinite, split.losses)) else "whole"), ""
    few = [(0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2)]
    try:
        losses = [trial.run([which]).loss for which in few]
    except Exception as error:  # the loss may be undefined for so few samples
        return "whole", f" Of one, two or three samples it raises {one_line(error)}."
    return ("mean" if _is_weighted_mean(*losses) else "whole"), ""


def _is_weighted_mean(a: float, b: float, c: float, ab: float, bc: float, abc: float) -> bool:
    """Return whether the losses of samples a, b, c and of some together are those of a weighted mean."""
    if not all(map(isfinite, (a, b, c))):  # undefined for one sample: all masked, or a spread
        return any(map(isfinite, (a, b, c)))
    if abs(b - ab) < 1e-9 or abs(bc - b) < 1e-9 * abs(b):
        return True
    # Pairs determine the weights, and the weights determine the loss of three.
    weight_b = (ab - a) / (b - ab)
    weight_c = weight_b * (bc - b) / (c - bc) if c != bc else 0.0
    expected = (a + weight_b * b + weight_c * c) / (1 + weight_b + weight_c)
    return weight_b > 0 and weight_c > 0 and isclose(expected, abc, rel_tol=1e-6)


def _precisely(trial: ProbeTrial) -> tuple[float, ProbeTrial, str]:
    """Return the tolerance and the trial in float64; where that fails, the given trial, and a note that says so."""
    try:
        wide = trial.wide()
        wide.run([[0, 1]])
    except Exception as error:
        return (
            SINGLE,
            trial,
            f" (Compared in the model's own precision: in float64 it raises {one_line(error)}.)",
        )
    return ROUNDING, wide, ""


Calls = list[tuple[str, list[Any]]]


def first_that_differs(trial: ProbeTrial, parts: Sequence[Sequence[int]], tolerance: float) -> str | None:
    """Return the name of the innermost module whose output differs first; None if all are the same."""
    everybody = sorted(i for part in parts for i in part)
    whole = _calls(trial, [everybody])[0]
    split = _calls(trial, parts)
    for i, (name, leaves) in enumerate(whole):
        others = [calls[i] if i < len(calls) else ("", []) for calls in split]
        if any(other[0] != name or len(other[1]) != len(leaves) for other in others):
            return name
        for j, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and not same_rows(
                leaf, [other[1][j] for other in others], parts, tolerance
            ):
                return name
    return None


def _calls(trial: ProbeTrial, parts: Sequence[Sequence[int]]) -> list[Calls]:
    """Return, by part, the outputs of each module in the order of the calls."""
    all_calls: list[Calls] = []

    def watch(model: nn.Module) -> None:
        calls: Calls = []
        all_calls.append(calls)

        def hook(name: str) -> Any:
            def record_output(_: nn.Module, __: Any, output: Any) -> None:
                leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in flatten(output)[0]]
                calls.append((name, leaves))

            return record_output

        for name, module in model.named_modules():
            module.register_forward_hook(hook(name))

    with torch.no_grad():
        trial.run(parts, watch=watch)
    return all_calls
