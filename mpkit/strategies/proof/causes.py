"""Why a step is not that of serial training: a kind after another, by comparisons, until one explains it.

draws        ranks share random numbers, or do not share those that are common
replicas     a rank computes with weights that are not the ones that were updated
parameters   the loss uses the model's parameters by itself, and not only its outputs
norms        BatchNorm takes its statistics over a part of the batch
memory       the result of a forward depends on how many there were before, and ranks do another number of them
broadcast    the loss compares each output with all targets, since their shapes differ
parts        the parts of the batch do not add up to it: a layer or the loss looks at other samples
mode         the ranks computed in another mode, training or evaluation
factor       all gradients are the same number of times as large
share        the gradients are those of one part of the batch: a reduction is missing
update       the gradients are right, and the optimizer makes something else of them
suspects     nothing of these, and something is known not to survive the plan (`suspects`)
world        nothing of these
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from mpkit.common.exceptions import one_line
from mpkit.strategies.data.microbatch import leaves, part
from mpkit.strategies.job.job import TrainJob
from mpkit.strategies.loss.mean import ELEMENTWISE, SummedMeans
from mpkit.strategies.loss.quotient import as_pair
from mpkit.strategies.proof.attempt import Attempt
from mpkit.strategies.proof.parts import explain_parts
from mpkit.strategies.proof.rounding import coarsest, distance, largest
from mpkit.strategies.proof.suspects import find_suspects
from mpkit.strategies.replicas.batchnorm import batch_norms

__all__ = ["cause_of", "cause_of_update"]


def close(attempt: Attempt) -> float:
    """Return the relative difference up to which a repeated computation explains what the ranks have: half the digits.

    A cause that changes less than that is not told from rounding.
    """
    data = [leaf for value in attempt.batch for leaf in leaves(value)]
    return float(torch.finfo(coarsest(attempt.serial.model, data)).eps ** 0.5)


def cause_of(job: TrainJob, attempt: Attempt, gradients: dict[str, Tensor | None], says: str) -> str:
    """Return the likely cause of a loss or gradients that are not serial, with what would work.

    Args:
        job: the training.
        attempt: the step, from its beginning.
        gradients: those of the ranks, by name; all None where they overflowed.
        says: what differs, in words.
    """
    untold = []
    kinds = [_parameters, _norms, _memory, _broadcast, _parts]
    if any(gradient is not None for gradient in gradients.values()):
        kinds += [_mode, _factor, _share]
    for kind in kinds:
        try:
            found = kind(job, attempt, gradients)
        except Exception as error:
            untold.append(f"whether it is {kind.__name__[1:]}, raises {one_line(error)}")
            continue
        if found:
            return found
    likely = next(find_suspects(job, says), "") or WORLD
    return likely + (
        f" (The comparison that tells {'; the one that tells '.join(untold)}.)" if untold else ""
    )


WORLD = (
    "The likely cause is something that is different on the ranks: this process has changed a library, a default or a "
    "global that model or loss use, or they read something that each process has its own of. Put it into the model's "
    "or the loss's own code, which travels to the ranks."
)


def cause_of_update(job: TrainJob, name: str) -> str:
    """Return the likely cause of a weight that is not serial although its gradient is."""
    divided = "part of each parameter" if job.plan.zero or job.plan.tp > 1 else "some of the parameters"
    return (
        f"Its gradient is right, so the optimizer makes something else of it. A rank's optimizer has {divided}, and "
        "stand-ins for the rest: groups by a mark on a parameter, by its values or its identity, and updates that look "
        "at more than an element's own gradient, are other ones there. What works: groups by name, "
        f"optimizer=mk.optimizer.by_name(lambda named: ...), where this one is {name!r}; or "
        f"mk.Plan.ddp({job.plan.ranks})"
    )


def _parameters(job: TrainJob, attempt: Attempt, gradients: dict[str, Tensor | None]) -> str:
    serial = attempt.begin_again()
    inputs, targets = attempt.batch
    with torch.no_grad(), attempt.use_draws():
        outputs = serial.outputs(inputs)
    with attempt.use_draws():
        value = serial.loss(outputs, targets)
    pair = as_pair(value)
    used = pair[0] if pair is not None else value
    if not (isinstance(used, Tensor) and used.requires_grad):
        return ""
    return (
        "The loss uses the model's parameters, or what a layer kept, by itself, besides the outputs. A rank has only a "
        "part of the model, or computes it elsewhere. What works: weight decay in the optimizer, "
        "torch.optim.AdamW(params, weight_decay=0.1), in place of a penalty; and what the loss needs of a layer among "
        f"the model's outputs. Or a plan whose ranks hold the whole model: mk.Plan.ddp({job.plan.ranks})"
    )


def _norms(job: TrainJob, attempt: Attempt, gradients: dict[str, Tensor | None]) -> str:
    norms, plan = batch_norms(attempt.serial.model), job.plan
    if not norms or (plan.microbatches == 1 and plan.dp == 1):
        return ""
    first = next(iter(norms))
    return (
        f"{first} is a BatchNorm, and takes its statistics over {_norm_parts(job)}, not over the whole batch. What "
        "works: one micro-batch; a norm that looks at single samples, such as torch.nn.GroupNorm; or, if it is meant, "
        "batchnorm='local' in the Plan"
    )


def _norm_parts(job: TrainJob) -> str:
    plan = job.plan
    if plan.dp > 1 and (plan.batchnorm == "local" or plan.data_parallel == "dp"):
        return "each rank's samples"
    return f"each of {plan.microbatches} micro-batches"


def _memory(job: TrainJob, attempt: Attempt, gradients: dict[str, Tensor | None]) -> str:
    count, serial = job.plan.microbatches, attempt.begin_again()
    if count == 1 and job.plan.recompute == "none":
        return ""
    (loss, first), (later, second) = attempt.run(serial), attempt.run(serial)
    # The very same operators: one rounding apart at most.
    if distance(loss, later) <= close(attempt) ** 2 * largest(loss) and _equal(attempt, first, second):
        return ""
    why = f"a step has {count} of them" if count > 1 else "recomputation does some twice"
    return (
        f"The model or the loss remembers something from one forward to the next (a counter, a list), and {why}. What "
        "works: one micro-batch and recompute='none'; or what depends on the step is computed from the step, not from "
        "how often a forward was called"
    )


def _broadcast(job: TrainJob, attempt: Attempt, gradients: dict[str, Tensor | None]) -> str:
    serial = attempt.begin_again()
    inputs, targets = attempt.batch
    with torch.no_grad(), attempt.use_draws(), SummedMeans() as heard:
        serial.loss(serial.outputs(inputs), targets)
    for *_, function, given in heard.calls:
        one, other = given["input"].shape, getattr(given.get("target"), "shape", None)
        if function in ELEMENTWISE and other not in (None, one):
            count = torch.broadcast_shapes(one, other).numel()
            return (
                f"{function.__name__} is given outputs of shape {list(one)} and targets of shape {list(other)}, and "
                f"makes {count} differences of them, between different samples too, which the parts of the batch do "
                "not have. What works: targets of the outputs' shape, such as y.view_as(out)"
            )
    return ""


def _parts(job: TrainJob, attempt: Attempt, gradients: dict[str, Tensor | None]) -> str:
    return explain_parts(job.plan, attempt, close(attempt))


def _mode(job: TrainJob, attempt: Attempt, gradients: dict[str, Tensor | None]) -> str:
    if _equal(attempt, attempt.run(attempt.begin_again())[1], gradients):
        return ""
    for name, change in (("evaluation", nn.Module.eval), ("training", nn.Module.train)):
        serial = attempt.begin_again()
        change(serial.model)
        _, found = attempt.run(serial)
        if _equal(attempt, found, gradients):
            return f"The ranks computed in {name} mode, in which serial training is not."
    return ""


def _factor(job: TrainJob, attempt: Attempt, gradients: dict[str, Tensor | None]) -> str:
    _, found = attempt.run(attempt.begin_again())
    product = square = 0.0
    for name, wanted in found.items():
        got = gradients[name]
        if wanted is not None and got is not None:
            wide = torch.promote_types(wanted.dtype, torch.float64)
            product += float((got.to(wide) * wanted.to(wide).conj()).sum().real)
            square += float(wanted.to(wide).abs().square().sum())
    factor = product / square if square else 1.0
    if abs(factor - 1.0) < close(attempt):
        return ""
    scaled = {name: None if g is None else g * factor for name, g in found.items()}
    if not _equal(attempt, scaled, gradients):
        return ""
    return f"All gradients are {factor:.4g} times the serial ones: a sum in place of a mean, or the reverse."


def _share(job: TrainJob, attempt: Attempt, gradients: dict[str, Tensor | None]) -> str:
    for number, (which, share, draws) in enumerate(attempt.draws.parts()):
        inputs, targets = (part(value, which) for value in attempt.batch)
        _, found = attempt.run(attempt.begin_again(), (inputs, targets), draws)
        for weight in (1.0, share):
            scaled = {name: None if g is None else g * weight for name, g in found.items()}
            if _equal(attempt, scaled, gradients):
                return f"The gradients are those of part {number} of the batch alone: the sum over parts is missing."
    return ""


def _equal(attempt: Attempt, ones: dict[str, Tensor | None], others: dict[str, Tensor | None]) -> bool:
    tolerance = close(attempt)

    def pairs() -> Iterator[bool]:
        for name, one in ones.items():
            other = others[name]
            if one is None or other is None:
                there = one if other is None else other
                yield there is None or largest(there) == 0.0
            else:
                yield distance(one, other) <= tolerance * largest(one)

    return all(pairs())
