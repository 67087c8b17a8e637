"""Which steps of a run are compared with serial training, and why some are not: `verify=` of `Cluster.train`."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from mpkit.strategies.data.microbatch import Value, leaves
from mpkit.strategies.data.stream import Stream
from mpkit.strategies.data_parallel.sync_batchnorm import batch_norms
from mpkit.strategies.job.job import Problem, Procedure
from mpkit.strategies.job.resolved import ResolvedPlan
from mpkit.strategies.prepare.telling import telling_steps

__all__ = ["check_verify", "with_proof"]

WORKS = (
    'verify="first" (the default: the first two steps, telling ones and one drawn), "all", (1, 10) or False'
)

MOST = 2e12
"""The most FLOPs of a step that is verified on CPUs: more would take minutes on a few cores."""

MOST_ON_GPU = 2e14
"""The same on a GPU, of which even a small one does so many in half a minute."""

MOST_BYTES = 2**31
"""The most bytes of parameters: a verified step takes about ten times as much memory."""


def check_verify(verify: Any) -> Any:
    """Return a valid `verify=`, with the numbers of steps as a tuple.

    >>> check_verify([3, 1])
    (1, 3)

    Raises:
        ValueError: it is neither "first", "all", False, nor numbers of steps, which are counted from 1.
    """
    if verify is False or (isinstance(verify, str) and verify in ("first", "all")):
        return verify
    numbers = list(verify) if isinstance(verify, (tuple, list, set, range)) else [verify]
    if not numbers or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in numbers):
        raise ValueError(f"verify={verify!r}: steps are counted from 1. What works: {WORKS}")
    return tuple(sorted(set(numbers)))


def with_proof(
    how: Procedure, verify: Any, what: Problem, batch: tuple[Value, Value], resolved: ResolvedPlan,
    special: set[float], gpu: int | None,
) -> Procedure:  # fmt: skip
    """Return the procedure with the steps that are verified, and why none is, or not all that were asked for.

    Args:
        how, what, resolved: the training; `batch`: its first batch.
        verify: what `check_verify` returned.
        special: the numbers that the loss treats by themselves.
        gpu: the GPU of the last rank; None: the ranks are on CPUs.
    """
    if verify is False:
        return replace(how, unverified="verify=False")
    how = replace(how, gpu=gpu)
    why_not = _why_not(what.model, batch, resolved, MOST if gpu is None else MOST_ON_GPU)
    if why_not:
        return replace(how, unverified=why_not)
    wanted = _wanted_steps(verify, how.first_step, how.steps)
    if verify == "first":
        every = None if how.evaluation is None else how.evaluation.every
        steps = range(how.first_step, how.steps)
        wanted = tuple(sorted({*wanted, *telling_steps(what.batches, steps, special, every)}))
    if isinstance(what.batches, Stream):
        known = tuple(step for step in wanted if step < len(what.batches.first))
        late = (
            "" if known == wanted or verify == "first" else "of a stream, only the first steps are compared"
        )
        return replace(how, verified=known, unverified=late)
    return replace(how, verified=wanted)


def _wanted_steps(verify: Any, first: int, steps: int) -> tuple[int, ...]:
    """Return the steps that are asked for.

    >>> _wanted_steps((1, 10), 0, 5), _wanted_steps("all", 3, 5), len(_wanted_steps("first", 0, 50))
    ((0,), (3, 4), 3)
    """
    if verify == "all":
        return tuple(range(first, steps))
    if verify != "first":
        return tuple(n - 1 for n in verify if first <= n - 1 < steps)
    later = range(first + 2, steps)
    drawn = [random.SystemRandom().choice(later)] if later else []
    return (*range(first, min(first + 2, steps)), *drawn)


def _why_not(model: nn.Module, batch: tuple[Value, Value], resolved: ResolvedPlan, most: float) -> str:
    tensors = [*model.parameters(), *model.buffers(), *leaves(batch[0]), *leaves(batch[1])]
    fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    if fake is not None or any(tensor.is_meta for tensor in tensors):
        return "its tensors have no content"
    plan, samples = resolved.plan, len(leaves(batch[0])[0])
    if plan.batchnorm == "local" and (plan.dp > 1 or plan.microbatches > 1) and batch_norms(model):
        return "batchnorm='local' takes statistics that serial training does not have"
    flops = 3 * resolved.flops_of_a_sample() * samples
    if flops > most:
        return f"a step has {flops:.1e} FLOPs, too many to repeat them in this process"
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    if nbytes > MOST_BYTES:
        return (
            f"the model has {nbytes / 2**30:.0f} GiB of parameters, too many for another copy in this process"
        )
    return ""
