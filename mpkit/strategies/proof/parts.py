"""Do the parts of a batch add up to it? Model and loss on the whole batch, and on each part with its own draws.

layer    a layer that makes something else of a sample when other samples are computed with it
model    a loss that the model computes itself
loss     a sum over samples, a mean over something else than samples, or one that needs the whole batch
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isclose, isfinite
from typing import Any

import torch
from torch import Tensor, nn

from mpkit.plan.plan import Plan
from mpkit.strategies.data.microbatch import batch_size
from mpkit.strategies.loss.counted import as_pair
from mpkit.strategies.models.heard_draws import GivenDraws
from mpkit.strategies.models.nested_values import flatten
from mpkit.strategies.proof.attempt import ALL, Attempt
from mpkit.strategies.proof.compare import say
from mpkit.strategies.proof.draws import StepDraws
from mpkit.strategies.proof.rounding import distance, largest

Samples = Sequence[int]


@dataclass
class Computed:
    """What model and loss make of some samples."""

    samples: Samples  # their numbers
    loss: float
    count: float | None  # the count that the loss returned; None for a mean
    calls: list[tuple[str, list[Any]]]  # modules' names and the leaves of their results; the model is last

    @property
    def output(self) -> list[Any]:
        """The model's outputs."""
        return self.calls[-1][1]


def explain_parts(plan: Plan, attempt: Attempt, tolerance: float) -> str:
    """Return why the parts of a batch do not add up to it, and what would work; "" if they do.

    `tolerance` is the relative difference up to which results are the same.
    """
    parts = [(which, draws) for which, weight, draws in attempt.draws.parts() if weight]
    if len(parts) < 2:
        return ""
    size = batch_size(attempt.batch[0])
    whole = _compute(attempt, ALL, attempt.draws)
    split = [_compute(attempt, which, draws) for which, draws in parts]
    weights = _weights(split, size)
    put_together = sum(each.loss * weight for each, weight in zip(split, weights, strict=True))
    loss_differs = isfinite(whole.loss) and not abs(whole.loss - put_together) <= tolerance * max(
        abs(whole.loss), *(abs(each.loss) for each in split if isfinite(each.loss)), 0.0
    )
    apart = _gradients_apart(attempt, weights, tolerance)
    if not loss_differs and not apart:
        return ""
    model, last = attempt.serial.model, len(whole.calls) - 1
    if _differs(last, whole, split, tolerance, scalars=False):
        differ = (i for i in range(last + 1) if _differs(i, whole, split, tolerance))
        return _for_layer(plan, model, whole.calls[next(differ)][0], [])
    scalars = [
        leaf for i, leaf in enumerate(whole.output)
        if isinstance(leaf, Tensor) and not leaf.dim()
        and any(not isclose(float(leaf), float(each.output[i]), rel_tol=tolerance) for each in split)
    ]  # fmt: skip
    if not loss_differs and not scalars:
        return _for_layer(plan, model, None, apart)
    if any(abs(float(leaf) - whole.loss) <= tolerance * abs(whole.loss) for leaf in scalars):
        return say("model_loss", plan=plan, parts=_parts(plan))
    is_sum = isclose(sum(each.loss for each in split), whole.loss, rel_tol=1e-4)
    return _for_loss(plan, is_sum, whole.loss, put_together, size)


def _compute(attempt: Attempt, which: slice, draws: StepDraws) -> Computed:
    """Compute some samples from the beginning of the step, without gradients."""
    serial, calls = attempt.begin_again(), list[tuple[str, list[Any]]]()

    def note(name: str) -> Any:
        return lambda _module, _inputs, output: calls.append((name, flatten(output)[0]))

    for name, module in serial.model.named_modules():
        module.register_forward_hook(note(name))
    inputs, targets = attempt.samples(which)
    draws.begin()
    with torch.no_grad(), GivenDraws(draws.give):
        output = serial.outputs(inputs)
        value = serial.loss(output, targets)
    pair = as_pair(value)
    loss, count = (value, None) if pair is None else (pair[0] / pair[1], float(pair[1]))
    samples = range(batch_size(attempt.batch[0]))[which]
    return Computed(samples, float(loss), count, calls)


def _weights(split: Sequence[Computed], size: int) -> list[float]:
    """Return each part's share: of the counts where the loss returns them, otherwise of the samples."""
    if any(each.count is None for each in split):
        return [len(each.samples) / size for each in split]
    total = sum(each.count or 0.0 for each in split)
    return [(each.count or 0.0) / total if total else 0.0 for each in split]


def _gradients_apart(attempt: Attempt, weights: Sequence[float], tolerance: float) -> list[str]:
    """Return the names of parameters whose gradient is not that of the parts together."""
    whole, total = attempt.whole[1], dict[str, Tensor]()
    for part, weight in zip(attempt.parts(), weights, strict=True):
        for name, gradient in part.found[1].items():
            if gradient is not None:
                total[name] = total.get(name, torch.zeros_like(gradient)) + gradient * weight
    most = max((largest(g) for g in whole.values() if g is not None), default=0.0)
    names = []
    for name, gradient in whole.items():
        other = total.get(name)
        if gradient is None or other is None:
            there = gradient if other is None else other
            if there is not None and largest(there) > tolerance * most:
                names.append(name)
        elif distance(gradient, other) > tolerance * (largest(gradient) + 1e-3 * most):
            names.append(name)
    return names


def _differs(
    i: int, whole: Computed, split: Sequence[Computed], tolerance: float, *, scalars: bool = True
) -> bool:
    """Return whether a call of a module treated a sample in a part differently than in the whole batch."""
    name, leaves = whole.calls[i]
    i = i if i + 1 < len(whole.calls) else -1  # the model's own, however many there were before
    others = [each.calls[i] if i < len(each.calls) else ("", []) for each in split]
    if any(other[0] != name or len(other[1]) != len(leaves) for other in others):
        return True
    samples = [each.samples for each in split]
    return any(
        isinstance(leaf, Tensor)
        and (scalars or leaf.dim() > 0)
        and not _same_rows(leaf, [other[1][j] for other in others], samples, tolerance)
        for j, leaf in enumerate(leaves)
    )


def _same_rows(whole: Tensor, parts: Sequence[Any], samples: Sequence[Samples], tolerance: float) -> bool:
    """Return whether the parts' tensors hold the same values as the whole batch's tensor, for the same samples.

    The dimension that is shorter in a part is the batch; each sample may have several consecutive rows in it.
    """
    total = sum(map(len, samples))
    for one, which in zip(parts, samples, strict=True):
        if not isinstance(one, Tensor) or one.dim() != whole.dim() or one.dtype != whole.dtype:
            return False
        shorter = [d for d in range(whole.dim()) if whole.shape[d] != one.shape[d]]
        expected = whole
        if shorter:
            rows, rest = divmod(whole.shape[shorter[0]], total)
            if len(shorter) > 1 or rest or len(which) == total or one.shape[shorter[0]] != rows * len(which):
                return False
            index = torch.tensor([i * rows + j for i in which for j in range(rows)], device=whole.device)
            expected = whole.index_select(shorter[0], index)
        if distance(expected, one) > tolerance * largest(expected):
            return False
    return True


# ---- words ---------------------------------------------------------------------------------------------------


def _parts(plan: Plan) -> str:
    parts = []
    if plan.microbatches > 1:
        parts.append(f"{plan.microbatches} micro-batches")
    if plan.dp > 1:
        parts.append(f"{plan.dp} {'ranks' if plan.data_parallel == 'dp' else 'replicas'}")
    if plan.cp > 1:
        parts.append(f"{plan.cp} parts of each sequence")
    return " and ".join(parts)


def _for_loss(plan: Plan, is_sum: bool, whole: float, together: float, samples: int) -> str:
    figures = say("figures", plan=plan, parts=_parts(plan), whole=whole, together=together)
    if is_sum:
        return say("sum", figures=figures, samples=samples)
    one = ", with one micro-batch" if plan.microbatches > 1 else ""
    works = f", which gathers all samples on every rank{one}" if plan.cp == 1 else ", and cp=1"
    return say("loss", figures=figures, works=works)


def _for_layer(plan: Plan, model: nn.Module, name: str | None, parameters: list[str]) -> str:
    if name is None:
        which = f"The gradient of {parameters[0]}" if parameters else "The model"
        what = f"{which} depends on which samples are computed together (a hook or a backward of its own?)"
    else:
        kind = type(model.get_submodule(name)).__name__
        where = f"The layer {name!r} ({kind})" if name else f"The model ({kind}), outside of its layers,"
        what = f"{where} makes something else of a sample when other samples are computed with it"
    m, n = plan.microbatches, plan.dp
    instead = "Plan.serial()" if n > 1 or m > 1 else "cp=1"
    if plan.pp > 1 and n == 1:
        instead = f"Plan.naive_mp({plan.pp}), one micro-batch on {plan.pp} ranks, or Plan.serial()"
    if plan.tp > 1 and m == 1:
        instead = f"Plan.tp({plan.tp}), or Plan.serial()"
    instead += "" if name else say("compares")
    return say("layer", what=what, plan=plan, parts=_parts(plan), instead=instead)
