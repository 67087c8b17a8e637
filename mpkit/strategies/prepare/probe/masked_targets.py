"""Try a loss on data in which some targets do not count; where that matters, look for such data.

A list of batches is inspected here, batches that are loaded later by the ranks (`GuardedLoss`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mpkit.common.exceptions import report
from mpkit.plan.plan import Plan
from mpkit.strategies.data.microbatch import Value, leaves, map_tensors
from mpkit.strategies.loss.guard import GuardedLoss, MaskRule
from mpkit.strategies.prepare.arguments.task import Rejection
from mpkit.strategies.prepare.probe.compare import differ
from mpkit.strategies.prepare.probe.messages import for_masked, for_model_loss, for_untried
from mpkit.strategies.prepare.probe.parts import Parts
from mpkit.strategies.prepare.probe.trial import ProbeResult, ProbeTrial
from mpkit.strategies.stage.stage import cast

__all__ = ["MaskedData", "try_masked", "variants"]


Made = tuple[Parts, list[Any]]
"""Parts of the samples, and the model's outputs for each."""


def try_masked(
    plan: Plan,
    trial: ProbeTrial,
    loss: Callable[[Any, Any], Tensor],
    batches: Any,
    at_once: Made,
    apart: Made,
) -> GuardedLoss | None:
    """Try data in which some targets do not count; return a guarded loss if only the ranks can look for such data.

    Args:
        plan: the plan of the training.
        trial: the trial of model and loss.
        loss, batches: those of the training.
        at_once, apart: all samples in one part, and in the parts of the plan.

    Raises:
        Rejection: the loss of such data is wrong in parts, and the batches have such data.
    """
    # ---- try
    minding: list[MaskRule] = []
    passed: set[MaskRule] = set()
    failed: dict[MaskRule, Exception] = {}
    for variant in variants(loss, trial.data):
        if variant.masked in minding:
            continue
        try:
            differs = _differs(trial, variant, at_once, apart)
        except Exception as error:  # such data may be none, as a target of -1
            failed[variant.masked] = error
            continue
        passed.add(variant.masked)
        if differs:
            minding.append(variant.masked)
    # ---- look for such data
    say = for_model_loss if any(masked.side == 0 for masked in minding) else for_masked
    if not isinstance(batches, list):  # where the loss fails on later data, that ends the run
        message = say(plan, minding[0].number, "such came in this micro-batch") if minding else ""
        return GuardedLoss(loss, minding, message) if minding else None
    for i, (inputs, targets) in enumerate(batches):
        for masked in minding:
            if masked.counts_unevenly(inputs, targets):
                raise Rejection(say(plan, masked.number, f"data[{i}] has such"))
        for masked, caught in failed.items():
            if masked not in passed and masked.counts_unevenly(inputs, targets):
                report(for_untried(plan, masked.number, i, caught))
    return None


def _differs(trial: ProbeTrial, variant: MaskedData, at_once: Made, apart: Made) -> bool:
    """Return whether loss or gradients of the changed data at once differ from those in parts."""
    tried = trial.with_data(variant.data)
    if variant.masked.side == 0:
        return differ(tried, lambda t: (t.run(at_once[0]), t.run(apart[0])))[2]

    def of_known_outputs(t: ProbeTrial) -> tuple[ProbeResult, ProbeResult]:
        # The model does not see the targets: its outputs are known.
        one, other = (
            t.of_outputs(made if t is tried else [cast(each, torch.float64) for each in made], parts)
            for parts, made in (at_once, apart)
        )
        return one, other

    return differ(tried, of_known_outputs)[2]


IGNORED = (-100, -1, 0)
"""Customary values of padded targets."""


@dataclass(frozen=True)
class MaskedData:
    """The data with one tensor changed.

    Attributes:
        data: inputs and targets.
        masked: which tensor was changed, and how to recognize such data.
    """

    data: tuple[Value, Value]
    masked: MaskRule


def variants(loss: Any, data: tuple[Value, Value]) -> Iterator[MaskedData]:
    """Yield the changes that a loss, or a model that computes its loss itself, could treat as masks."""
    own = getattr(loss, "ignore_index", None)
    numbers = dict.fromkeys((*([own] if isinstance(own, int) else []), *IGNORED))
    for side, value in enumerate(data):
        names = list(value) if isinstance(value, dict) else [None] * len(leaves(value))
        for place, (name, leaf) in enumerate(zip(names, leaves(value), strict=True)):
            called = str(name or "").lower()
            labels = side == 1 or "label" in called or "target" in called
            if leaf.dtype == torch.bool and (labels or "mask" in called):
                yield MaskedData(_change_leaf(data, side, place, _zero_uneven), MaskRule(side, place, None))
            elif leaf.is_floating_point() and labels:
                yield MaskedData(
                    _change_leaf(data, side, place, _weight_samples), MaskRule(side, place, None)
                )
                yield MaskedData(_change_leaf(data, side, place, _zero_uneven), MaskRule(side, place, None))
            elif labels and not leaf.is_floating_point() and not leaf.is_complex():
                for number in numbers:
                    changed = _change_leaf(data, side, place, partial(_fill_uneven, number=number))
                    yield MaskedData(changed, MaskRule(side, place, number))
            elif "mask" in called and side == 0:
                yield MaskedData(_change_leaf(data, side, place, _zero_uneven), MaskRule(side, place, None))


def _change_leaf(
    data: tuple[Value, Value], side: int, place: int, change: Callable[[Tensor], Tensor]
) -> tuple[Value, Value]:
    number = iter(range(len(leaves(data[side]))))
    value = map_tensors(lambda t: change(t) if next(number) == place else t, data[side])
    return (value, data[1]) if side == 0 else (data[0], value)


def _uneven_mask(tensor: Tensor) -> Tensor:
    """Return a mask with a different share of each sample: none of the first, and more of each next, but never all."""
    samples, width = tensor.shape[0], tensor[0].numel()
    if width == 1:
        return (torch.arange(samples) % 3 == 1).view(tensor.shape)
    hidden = (torch.arange(samples) * width) // (samples + 1)
    return (torch.arange(width)[None] < hidden[:, None]).view(tensor.shape)


def _fill_uneven(tensor: Tensor, *, number: int) -> Tensor:
    return tensor.masked_fill(_uneven_mask(tensor), number)


def _zero_uneven(tensor: Tensor) -> Tensor:
    return tensor.masked_fill(_uneven_mask(tensor), 0)


def _weight_samples(tensor: Tensor) -> Tensor:
    factors = 1 + torch.arange(tensor.shape[0], dtype=tensor.dtype) / 2
    return tensor * factors.view(-1, *[1] * (tensor.dim() - 1))
