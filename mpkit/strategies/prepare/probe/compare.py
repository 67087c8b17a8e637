"""Compare two results up to rounding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from mpkit.common.exceptions import one_line, report
from mpkit.common.torch_private import TorchDispatchMode, tree_leaves
from mpkit.strategies.prepare.probe.trial import ProbeResult, ProbeTrial

__all__ = ["ROUNDING", "SINGLE", "are_apart", "differ", "far", "same_rows"]

ROUNDING = 64 * torch.finfo(torch.float32).eps
"""Tolerance for a model in float64 that computes parts in float32: the sum of a few dozen float32 roundings."""

SINGLE = torch.finfo(torch.float32).eps ** 0.5
"""Tolerance for a model that can only be tried in its own precision."""


def differ(
    trial: ProbeTrial,
    compared: Callable[[ProbeTrial], tuple[ProbeResult, ProbeResult]],
    known: tuple[ProbeResult, ProbeResult] | None = None,
) -> tuple[ProbeResult, ProbeResult, bool]:
    """Try both ways; if they differ by what may be rounding, repeat in float64 to decide.

    If the model cannot run in float64, less precision has to do, which is reported where it decides. A model that
    computes parts in 16 bits even then gets their tolerance: what remains is found by the proof of the run.

    Args:
        trial: the trial of model, loss and data.
        compared: runs a trial in both ways.
        known: the results of both ways in the model's own precision, if they are known already.

    Returns:
        The two results, and whether they differ.
    """
    whole, parts = known or compared(trial)
    if not are_apart(whole, parts, ROUNDING):
        return whole, parts, False
    try:
        wide = compared(trial.wide())
    except Exception as error:
        with _Coarsest() as seen:
            compared(trial)
        tolerance = max(SINGLE, 64 * seen.eps)
        apart = are_apart(whole, parts, tolerance)
        if not apart:
            report(
                "Loss or gradients of a few samples differ from those of the same samples in parts, by at most "
                f"{tolerance:.0e} of their size. That may be rounding, or a loss or layer that looks at other samples "
                f"of its batch; in float64, which would tell, it raises {one_line(error)}."
            )
        return whole, parts, apart
    if not are_apart(*wide, ROUNDING):
        return whole, parts, False
    with _Coarsest() as seen:
        wide = compared(trial.wide())
    return whole, parts, are_apart(*wide, 64 * seen.eps)


class _Coarsest(TorchDispatchMode):
    """A mode that notes the largest rounding of what operators make; `eps` is that of float32 at least."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.eps = torch.finfo(torch.float32).eps

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                self.eps = max(self.eps, torch.finfo(leaf.dtype).eps)
        return made


def are_apart(whole: ProbeResult, parts: ProbeResult, tolerance: float) -> bool:
    """Return whether losses or gradients differ by more than rounding."""
    if not isfinite(whole.loss):
        return False  # infinities and NaN cannot be compared
    size = max(map(abs, (*filter(isfinite, parts.losses), whole.loss)))
    if not abs(whole.loss - parts.loss) <= tolerance * size:
        return True
    return bool(far(whole.gradients, parts.gradients, tolerance))


def far(ones: Mapping[str, Tensor], others: Mapping[str, Tensor], tolerance: float = ROUNDING) -> list[str]:
    """Return the names of tensors that differ."""
    ones, others = (
        {
            name: each.detach().to(torch.promote_types(each.dtype, torch.float64))
            for name, each in those.items()
        }
        for those in (ones, others)
    )
    most = max((float(one.abs().max()) for one in ones.values() if one.numel()), default=0.0)
    names = []
    for name in ones.keys() | others.keys():
        one, other = ones.get(name), others.get(name)
        if one is not None and other is not None and one.shape != other.shape:
            names.append(name)
            continue
        if one is None or other is None:
            there = one if one is not None else other
            if there is not None and float(there.abs().max()) > tolerance * most:
                names.append(name)
            continue
        if not one.numel():
            continue
        allowed = tolerance * (float(one.abs().max()) + 1e-3 * most)
        if not float((one - other).abs().max()) <= allowed and bool(one.isfinite().all()):
            names.append(name)
    order = {name: i for i, name in enumerate((*ones, *others))}
    return sorted(names, key=order.__getitem__)


def same_rows(
    whole: Tensor, parts: Sequence[Tensor], samples: Sequence[Sequence[int]], tolerance: float
) -> bool:
    """Return whether the parts' tensors hold the same values as the whole batch's tensor, for the same samples.

    The dimension that is shorter in a part is the batch; each sample may have several consecutive rows in it.
    """
    total = sum(map(len, samples))
    for part, which in zip(parts, samples, strict=True):
        if part.dim() != whole.dim() or part.dtype != whole.dtype:
            return False
        shorter = [d for d in range(whole.dim()) if whole.shape[d] != part.shape[d]]
        expected = whole
        if shorter and len(which) < total:
            rows, rest = divmod(whole.shape[shorter[0]], total)
            if len(shorter) > 1 or rest or part.shape[shorter[0]] != rows * len(which):
                return False
            index = torch.tensor([i * rows + j for i in which for j in range(rows)])
            expected = whole.index_select(shorter[0], index)
        elif shorter:
            return False
        if far({"": expected}, {"": part}, tolerance):
            return False
    return True
