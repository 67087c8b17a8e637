"""Checks buffers that a forward changes, depending on how often it is called or on its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpkit.common.exceptions import report
from mpkit.plan.plan import Plan
from mpkit.strategies.prepare.arguments.task import Rejection
from mpkit.strategies.prepare.probe.compare import SINGLE, differ, far
from mpkit.strategies.prepare.probe.messages import for_layer
from mpkit.strategies.prepare.probe.trial import ProbeResult, ProbeTrial

if TYPE_CHECKING:
    from mpkit.strategies.prepare.probe.probe import Probe

__all__ = ["check_buffers"]

Parts = Sequence[Sequence[int]]


def check_buffers(probe: Probe, whole: ProbeResult, split: ProbeResult) -> None:
    """Warn of buffers that a forward changes, except for BatchNorm's statistics.

    Args:
        probe: the samples and their parts.
        whole, split: the results for all samples at once and for the parts, with the buffers after the first part.

    Raises:
        Rejection: a buffer depends on which samples are computed together, and the next forward depends on the buffer.
    """
    trial, everything, parts, plan = probe.trial, probe.all, probe.parts, probe.plan
    before = {name: buffer.detach().clone() for name, buffer in trial.model.named_buffers()}
    changed = far(before, whole.buffers, SINGLE)
    if not changed:
        return
    by_samples = far(whole.buffers, split.buffers, SINGLE)

    def twice(tried: ProbeTrial) -> tuple[ProbeResult, ProbeResult]:
        return tried.run(everything, calls=2), tried.run(parts, calls=2)

    if by_samples and differ(trial, twice)[2]:
        raise Rejection(for_layer(plan, trial.model, by_samples[0].rpartition(".")[0], []))
    if by_samples:
        report(
            f"The buffer {by_samples[0]!r} depends on which samples are computed together: {_which(plan)}, and not "
            "what it would be of whole batches. Nothing that is trained depends on it."
        )
    counted = [name for name in changed if name not in by_samples]
    if counted and plan.microbatches > 1 and _matters(trial, everything):
        report(
            f"The buffer {counted[0]!r} changes with every forward: {plan.microbatches} times per step, once for each "
            "micro-batch, and what the model makes depends on it: training is that of plain PyTorch with gradients "
            f"accumulated over {plan.microbatches} micro-batches."
        )


def _matters(trial: ProbeTrial, everything: Parts) -> bool:
    """Return whether a second forward has a different result."""
    return differ(trial, lambda tried: (tried.run(everything), tried.run(everything, calls=2)))[2]


def _which(plan: Plan) -> str:
    """Describe which part's buffers the trained model has."""
    of = "each micro-batch" if plan.microbatches > 1 else "the whole batch"
    return f"in the trained model it is that of {of}" + ("'s first replica" if plan.dp > 1 else "")
