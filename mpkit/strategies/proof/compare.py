"""Comparing what ranks have of a step with what plain PyTorch makes of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from mpkit.common.exceptions import one_line
from mpkit.strategies.job.job import TrainJob
from mpkit.strategies.models.heard_draws import CannotReplay
from mpkit.strategies.proof.attempt import Attempt
from mpkit.strategies.proof.causes import cause_of_update
from mpkit.strategies.proof.draws import SharedDraws
from mpkit.strategies.proof.noise import Noise
from mpkit.strategies.proof.rounding import distance, few_of, largest
from mpkit.strategies.proof.whole_step import WholeStep
from mpkit.strategies.reference.serial import Serial

__all__ = ["Difference", "compare_buffers", "compare_gradients", "compare_weights", "same"]


@dataclass
class Difference(Exception):
    """Something differs: what, with both values, and why."""

    says: str
    cause: str = ""

    def __str__(self) -> str:
        return f"{self.says}. {self.cause}"


def same(
    what: str, got: Tensor, wanted: Tensor, few: float, noise: Noise | None = None, name: str = ""
) -> None:
    """Compare two tensors.

    Args:
        what: what they are.
        got, wanted: the ranks' and the serial one.
        few: a difference without further questions.
        noise: says what may be added to it; None: nothing.
        name: what the noise calls them.

    Raises:
        Difference: they are not the same.
        CannotReplay: nobody knows, since the step cannot be repeated, or its repetitions differ as well.
    """
    got = got.to(wanted.device)
    by = distance(got, wanted)
    if by <= few:
        return
    cause = ""
    if noise is not None:
        try:
            if noise.explains(by - few, name):
                return
        except (CannotReplay, SharedDraws, MemoryError, torch.OutOfMemoryError) as error:
            if noise.repeats_differ or by <= noise.ceiling * largest(wanted):
                raise
            cause = (
                f"The cause is unknown, since the step cannot be repeated to look for it: {one_line(error)}."
            )
    wide = torch.promote_types(wanted.dtype, torch.float64)  # complex stays complex
    a, b = (each.detach().reshape(-1).to(wide) for each in (got, wanted))
    at = int(torch.nan_to_num((a - b).abs(), nan=float("inf")).argmax())
    raise Difference(f"{what} is {a[at].item():.6g} and not {b[at].item():.6g}", cause)


def compare_gradients(
    found: WholeStep, gradients: dict[str, Tensor | None], noise: Noise, few: float
) -> None:
    """Compare each rank's gradients with those of the whole batch; `few`: as by `few_of`."""
    doubt: CannotReplay | None = None
    for where, got, _ in found.held:
        wanted = gradients[where.name]
        count = found.before[where.name].numel() if got is None else got.numel()
        if wanted is None or got is None:
            one = got if wanted is None else wanted
            if one is not None and largest(one) > 0.0:
                which = "the ranks have" if wanted is None else "serial training has"
                raise Difference(f"only {which} a gradient of {where.name}, of up to {largest(one):.3g}")
            continue
        what = f"the gradient of {where.name} on rank {where.rank}"
        allowed = few * largest(wanted)
        try:
            same(what, got, where.take(wanted, count), allowed, noise, where.name)
        except CannotReplay as error:  # another gradient may differ by more than repetitions do
            if not noise.repeats_differ:
                raise
            doubt = doubt or error
    if doubt is not None:
        raise doubt


def compare_weights(job: TrainJob, serial: Serial, found: WholeStep) -> float:
    """Compare what ranks have updated; return the largest difference, relative to the largest weight of its tensor."""
    most = 0.0
    for where, _, after in found.held:
        weight = serial.weights[where.name]
        wanted = where.take(weight.detach(), after.numel())
        if not wanted.numel():
            continue
        scale = largest(weight)
        by = distance(after.to(wanted.device), wanted)
        few = few_of(weight.dtype, 0) * scale
        try:
            same(f"{where.name} on rank {where.rank} after the update", after, wanted, few)
        except Difference as difference:
            difference.cause = cause_of_update(job, where.name)
            raise
        most = max(most, by / scale if scale else 0.0)
    for rank, name in found.other_replicas(after=True):
        raise Difference(f"rank {rank} goes on with another {name} than the one that was updated")
    return most


def compare_buffers(
    job: TrainJob, serial: Serial, found: WholeStep, attempt: Attempt, noise: Noise, few: float
) -> str:
    """Compare buffers; return words about one that is not that of the whole batch, but of the parts of the plan."""
    wanted = dict(serial.model.named_buffers())
    plan, words, after = job.plan, "", dict[str, Tensor]()
    in_parts = cache(attempt.buffers_in_parts)
    for rank, held in enumerate(found.buffers):
        for name, got in held.items():
            if name not in wanted or got.shape != wanted[name].shape:
                continue
            what = f"the buffer {name} on rank {rank}"
            allowed = few * largest(wanted[name]) if got.is_floating_point() or got.is_complex() else 0.0
            try:
                same(what, got, wanted[name], allowed, noise, f"buffer {name}")
            except Difference:
                if plan.dp * plan.microbatches == 1:
                    raise
                part = in_parts(plan.mesh.place(rank).dp)[name]
                same(what, got, part, allowed, noise, f"buffer {name}")
                if plan.mesh.place(rank).dp == 0:  # all replicas go on with the first one's
                    after[name] = got
                words = f"the buffer {name} is that of the parts of the batch, one after another"
    for name, value in after.items():
        wanted[name].copy_(value)
    return words
