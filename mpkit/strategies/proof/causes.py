"""Why a step is not that of serial training: one kind after another, by comparisons, until one explains it.

draws        ranks share random numbers, or do not share those that are common
replicas     a rank computes with weights that are not the ones that were updated
parameters   the loss uses the model's parameters by itself, and not only its outputs
memory       the result of a forward depends on how many there were before, and ranks do another number of them
broadcast    the loss compares each output with all targets, since their shapes differ
parts        the parts of the batch do not add up to it: a layer or the loss looks at other samples
mode         the ranks computed in another mode, training or evaluation
shares       the parts of the batch count another number of times: all of them (a sum in place of a mean), or one alone
update       the gradients are right, and the optimizer makes something else of them
suspects     none of these, but something in the training is known not to survive the plan
world        none of these
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from mpkit.common.exceptions import one_line
from mpkit.strategies.data.microbatch import leaves
from mpkit.strategies.job.job import TrainJob
from mpkit.strategies.loss.counted import ELEMENTWISE, SummedMeans, as_pair
from mpkit.strategies.models.hooks import backward_hooks, describe_wrappers
from mpkit.strategies.models.nested_values import flatten, rebuild
from mpkit.strategies.proof.attempt import Attempt
from mpkit.strategies.proof.compare import say
from mpkit.strategies.proof.parts import explain_parts
from mpkit.strategies.proof.rounding import coarsest, distance, largest
from mpkit.strategies.proof.step_gradients import Shares
from mpkit.strategies.tensor.known_plans import find_tensor_plan


def close(attempt: Attempt) -> float:
    """Return the relative difference up to which a repeated computation explains the ranks' results: half the digits.

    A cause that changes less is not told from rounding.
    """
    data = [leaf for value in attempt.batch for leaf in leaves(value)]
    return float(torch.finfo(coarsest(attempt.serial.model, data)).eps ** 0.5)


def cause_of(job: TrainJob, attempt: Attempt, gradients: dict[str, Tensor | None], says: str) -> str:
    """Return the likely cause of a loss or gradients that are not serial, with what would work.

    `gradients` are the ranks', by name; all None where they overflowed.
    """
    untold = []
    kinds = [_parameters, _memory, _broadcast, _parts]
    if any(gradient is not None for gradient in gradients.values()):
        kinds += [_mode, _shares]
    for kind in kinds:
        try:
            found = kind(job, attempt, gradients)
        except Exception as error:
            untold.append(f"whether it is {kind.__name__[1:]}, raises {one_line(error)}")
            continue
        if found:
            return found
    likely = next(_suspects(job, says), "") or say("world")
    return (
        f"{likely} (The comparison that tells {'; the one that tells '.join(untold)}.)" if untold else likely
    )


def cause_of_update(job: TrainJob, name: str) -> str:
    """Return the likely cause of a weight that is not serial although its gradient is."""
    divided = "part of each parameter" if job.plan.zero or job.plan.tp > 1 else "some of the parameters"
    return say("update", divided=divided, name=name, ranks=job.plan.ranks)


def _parameters(job: TrainJob, attempt: Attempt, gradients: dict[str, Tensor | None]) -> str:
    serial = attempt.begin_again()
    inputs, targets = attempt.batch
    kept_apart = job.plan.pp > 1 or job.plan.recompute != "none" or job.plan.zero == 3
    with torch.set_grad_enabled(kept_apart), attempt.use_draws():  # what a layer keeps belongs to a graph
        tensors, shape = flatten(serial.outputs(inputs))
    outputs = rebuild(shape, [each.detach() if isinstance(each, Tensor) else each for each in tensors])
    with attempt.use_draws():
        value = serial.loss(outputs, targets)
    pair = as_pair(value)
    used = pair[0] if pair is not None else value
    uses = isinstance(used, Tensor) and used.requires_grad
    return say("parameters", ranks=job.plan.ranks) if uses else ""


def _memory(job: TrainJob, attempt: Attempt, gradients: dict[str, Tensor | None]) -> str:
    count, serial = job.plan.microbatches, attempt.begin_again()
    if count == 1 and job.plan.recompute == "none":
        return ""
    (loss, first), (later, second) = attempt.run(serial), attempt.run(serial)
    # The very same operators: one rounding apart at most.
    if distance(loss, later) <= close(attempt) ** 2 * largest(loss) and _equal(attempt, first, second):
        return ""
    why = f"a step has {count} of them" if count > 1 else "recomputation does some twice"
    return say("memory", why=why)


def _broadcast(job: TrainJob, attempt: Attempt, gradients: dict[str, Tensor | None]) -> str:
    serial = attempt.begin_again()
    inputs, targets = attempt.batch
    with torch.no_grad(), attempt.use_draws(), SummedMeans() as heard:
        serial.loss(serial.outputs(inputs), targets)
    for *_, function, given in heard.calls:
        one, other = given["input"].shape, getattr(given.get("target"), "shape", None)
        if function in ELEMENTWISE and other not in (None, one):
            count = torch.broadcast_shapes(one, other).numel()
            shapes = {"outputs": list(one), "targets": list(other)}
            return say("broadcast", function=function.__name__, count=count, **shapes)
    return ""


def _parts(job: TrainJob, attempt: Attempt, gradients: dict[str, Tensor | None]) -> str:
    return explain_parts(job.plan, attempt, close(attempt))


def _mode(job: TrainJob, attempt: Attempt, gradients: dict[str, Tensor | None]) -> str:
    if _equal(attempt, attempt.whole[1], gradients):
        return ""
    for name, change in (("evaluation", nn.Module.eval), ("training", nn.Module.train)):
        serial = attempt.begin_again()
        change(serial.model)
        if _equal(attempt, attempt.run(serial)[1], gradients):
            return say("mode", mode=name)
    return ""


def _shares(job: TrainJob, attempt: Attempt, gradients: dict[str, Tensor | None]) -> str:
    parts, near = list(attempt.parts()), close(attempt)
    shares = Shares(len(parts))
    for name, got in gradients.items():
        if got is not None:
            of_parts = [(part.found[1][name], part.weight) for part in parts]
            made = [torch.zeros_like(got) if one is None else one * weight for one, weight in of_parts]
            shares.add(got.reshape(-1), torch.stack(made).flatten(1))
    counts = shares.solve(near)
    there = [number for number, count in enumerate(counts) if abs(count) > near]
    if not counts or all(abs(count - 1.0) <= near for count in counts):
        return ""
    if max(counts) - min(counts) <= near * max(1.0, max(counts)):
        return say("times", count=counts[0])
    if len(there) == 1:
        return say("one_part", part=there[0])
    return say("parts", times=", ".join(f"{count:.4g}" for count in counts))


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


# ---- suspects: nothing explains it, and something is known not to survive the plan


def _suspects(job: TrainJob, says: str) -> Iterator[str]:
    """Yield what may be why a step differs, the likeliest first; nothing if nothing in the training is suspicious."""
    plan, model = job.plan, job.what.model
    hooks = (*job.what.parameter_hooks, *backward_hooks(model)) if plan.ranks * plan.microbatches > 1 else ()
    for hook in map(str, hooks):
        yield say("hook", hook=f"{hook[0].upper()}{hook[1:]}")
    part = "a part of each sequence" if plan.cp > 1 or plan.sequence_parallel else "a part of the features"
    for name, module in model.named_modules() if plan.tp * plan.cp > 1 else ():
        if (described := describe_wrappers(module, name)) is not None:
            wrapper = f"{described[0].upper()}{described[1:]}"
            yield say("wrapper", wrapper=wrapper, part=part, ranks=plan.ranks)
    if plan.cp > 1:
        yield say("tokens", cp=plan.cp, ranks=plan.ranks)
    if plan.tp > 1:
        tensor = plan.tensor or find_tensor_plan(model)
        region = next((r.entry for r in tensor.regions if f"{r.entry}." in says), None)
        where = f" (here perhaps in Region(entry={region!r}))" if region is not None else ""
        yield say("region", model=type(model).__name__, where=where)
