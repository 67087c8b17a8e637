"""Checks buffers that a forward changes, depending on how often it is called or on its inputs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mpkit.plan.plan import Plan
from mpkit.strategies.prepare.probe.compare import SINGLE, differ, far
from mpkit.strategies.prepare.probe.messages import for_layer
from mpkit.strategies.prepare.probe.trial import ProbeResult, ProbeTrial

__all__ = ["check_buffers"]

Parts = Sequence[Sequence[int]]


def check_buffers(
    trial: ProbeTrial,
    everything: Parts,
    parts: Parts,
    plan: Plan,
    after: tuple[dict[str, Tensor], dict[str, Tensor]],
) -> list[str]:
    """Return warnings about buffers that a forward changes, except for BatchNorm's statistics.

    Args:
        trial: the trial of model and loss.
        everything: all samples as one part.
        parts: the samples in the parts of the plan.
        plan: the plan of the training.
        after: the buffers after a forward of all samples, and after one of the first part.

    Raises:
        ValueError: a buffer depends on which samples are computed together, and the next forward depends on the buffer.
    """
    before = {name: buffer.detach().clone() for name, buffer in trial.model.named_buffers()}
    whole, split = after
    changed = far(before, whole, SINGLE)
    if not changed:
        return []
    by_samples = far(whole, split, SINGLE)

    def twice(tried: ProbeTrial) -> tuple[ProbeResult, ProbeResult]:
        return tried.run(everything, calls=2), tried.run(parts, calls=2)

    if by_samples and differ(trial, twice)[2]:
        raise ValueError(for_layer(plan, trial.model, by_samples[0].rpartition(".")[0], []))
    warnings = []
    if by_samples:
        warnings.append(
            f"The buffer {by_samples[0]!r} depends on which samples are computed together: {_which(plan)}, and not "
            "what it would be of whole batches. Nothing that is trained depends on it."
        )
    counted = [name for name in changed if name not in by_samples]
    if counted and plan.microbatches > 1 and _matters(trial, everything):
        warnings.append(
            f"The buffer {counted[0]!r} changes with every forward: {plan.microbatches} times per step, once for each "
            "micro-batch, and what the model makes depends on it: training is that of plain PyTorch with gradients "
            f"accumulated over {plan.microbatches} micro-batches."
        )
    return warnings


def _matters(trial: ProbeTrial, everything: Parts) -> bool:
    """Return whether a second forward has a different result."""
    return differ(trial, lambda tried: (tried.run(everything), tried.run(everything, calls=2)))[2]


def _which(plan: Plan) -> str:
    """Describe which part's buffers the trained model has."""
    of = "each micro-batch" if plan.microbatches > 1 else "the whole batch"
    return f"in the trained model it is that of {of}" + ("'s first replica" if plan.dp > 1 else "")
