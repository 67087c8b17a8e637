"""Which steps of a run are compared with serial training, and why some are not: `verify=` of `Cluster.train`.

    first       the first two
    drawn       one of the later ones
    telling     later ones in which something happens for the first time:
                    a batch of other shapes than all before
                    targets with a value that the loss treats by itself (ignored, padded, a limit), or none with it; NaN
                    the first step after an evaluation, which leaves the model in another mode for a while

Data in memory is inspected before the start. Of a dataset the sizes of batches are known, and the first samples are
read if the loss treats some targets by itself. The run's line says what happens for the first time in another step.
"""

import math
import random
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from mpkit.common.torch_private import TorchDispatchMode
from mpkit.common.units import memory_text
from mpkit.strategies.data.batches import Batches
from mpkit.strategies.data.microbatch import Value, leaves
from mpkit.strategies.job.feed import WholeBatches
from mpkit.strategies.job.job import Problem, Procedure, ResolvedPlan
from mpkit.strategies.prepare.copies import has_content
from mpkit.strategies.prepare.loss_form import OneMean, copy_loss, find_mean
from mpkit.strategies.replicas.batchnorm import batch_norms

WORKS = (
    'verify="first" (the default: the first two steps, telling ones and one drawn), "all", (1, 10) or False'
)

MOST = 2e12  # the most FLOPs of a step that is verified on CPUs: more would take minutes on a few cores
MOST_ON_GPU = 2e14  # the same on a GPU: even a small one does these in half a minute
MOST_BYTES = 2**31  # the most bytes of parameters: a verified step takes about ten times as much memory


def check_verify(verify: Any) -> Any:
    """Return a valid `verify=`, with the numbers of steps, which are counted from 1, as a tuple.

    >>> check_verify([3, 1])
    (1, 3)
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
    """Return the procedure with the steps that are verified, and why none is, or not all that were requested.

    Args:
        batch: the first one.
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
    return replace(how, verified=wanted, unverified=_missing_steps(verify, how.first_step, how.steps))


def _missing_steps(verify: Any, first: int, steps: int) -> str:
    """Return in words which requested steps this run does not do; "" if there are none.

    >>> _missing_steps((1, 11), 0, 2), _missing_steps("all", 0, 2)
    ('there is no step 11 to compare: this run does steps 1 to 2', '')
    """
    missing = [n for n in verify if not first < n <= steps] if isinstance(verify, tuple) else []
    if not missing:
        return ""
    which = f"step {missing[0]}" if len(missing) == 1 else f"steps {', '.join(map(str, missing))}"
    return f"there is no {which} to compare: this run does steps {first + 1} to {steps}"


def _wanted_steps(verify: Any, first: int, steps: int) -> tuple[int, ...]:
    """Return the requested steps, counted from 0.

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
    if not has_content(model, batch):
        return "its tensors have no content"
    plan, samples = resolved.plan, len(leaves(batch[0])[0])
    if plan.batchnorm == "local" and (plan.dp > 1 or plan.microbatches > 1) and batch_norms(model):
        return "batchnorm='local' takes statistics that serial training does not have"
    flops = 3 * resolved.flops_of_a_sample() * samples
    if flops > most:
        return f"a step has {flops:.1e} FLOPs, too many to repeat them in this process"
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    if nbytes > MOST_BYTES:
        return f"the model has {memory_text(nbytes)} of parameters, too many for another copy in this process"
    return ""


MOST_TELLING = 3  # the most telling steps that are verified by default
MOST_READ = 2**13  # the most samples of a dataset that are read before the start

COMPARES = ("eq", "ne", "lt", "le", "gt", "ge")
INDEXED = ("nll_loss_forward", "nll_loss2d_forward")
OF_NAN = ("isnan", "nansum", "nan_to_num")


class SpecialValues:
    """A loss that notes the numbers with which it compares targets, or which it ignores.

    >>> import torch
    >>> heard = SpecialValues(lambda out, y: torch.nn.functional.cross_entropy(out, y, ignore_index=3))
    >>> _ = heard(torch.zeros(2, 5), torch.tensor([1, 3]))
    >>> heard.found
    {3}
    """

    def __init__(self, loss: Callable[[Any, Any], Any]) -> None:
        self.loss, self._copy = loss, copy_loss(loss)
        self.found: set[float] = set()
        self.mean: OneMean | None = None  # it is one call of a mean of torch's

    def __call__(self, outputs: Any, targets: Any) -> Any:
        """Return the loss."""
        with _ComparisonListener(self.found):
            value = self.loss(outputs, targets)
        self.mean = self.mean or find_mean(self._copy, outputs, targets)
        return value


class _ComparisonListener(TorchDispatchMode):
    def __init__(self, into: set[float]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._into = into

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in INDEXED:
            self._into.add(args[4])
        elif name in COMPARES and isinstance(args[1], (int, float)) and not isinstance(args[1], bool):
            self._into.add(args[1])
        elif name in OF_NAN or (name == "ne" and args[0] is args[1]):
            self._into.add(math.nan)
        return func(*args, **(kwargs or {}))


def telling_steps(
    batches: WholeBatches | Batches, steps: range, special: set[float], every: int | None
) -> tuple[int, ...]:
    """Return the telling steps, counted from 0.

    Args:
        special: the numbers that the loss treats by themselves.
        every: steps from one evaluation to the next; None: there is none.

    >>> import torch
    >>> a, b = ((torch.zeros(4, 1), torch.tensor([0, 1, 1, y])) for y in (0, 3))
    >>> telling_steps(WholeBatches([a, a, a, b]), range(8), {3}, every=5)
    (3, 5)
    """
    found = []
    seen: set[Hashable] = set()
    for step in steps:
        if step - steps.start >= len(batches):
            break  # from here on the batches repeat
        facts = set(_facts(batches, step, special))
        if seen and not facts <= seen:
            found.append(step)
        seen |= facts
    if every is not None and (first := (steps.start // every + 1) * every) in steps:
        found.append(first)
    return tuple(sorted(set(found))[:MOST_TELLING])


def _facts(batches: WholeBatches | Batches, step: int, special: set[float]) -> Iterator[Hashable]:
    """Yield what holds for a batch; one that has to be loaded is read only among the first `MOST_READ` samples."""
    if isinstance(batches, WholeBatches):
        yield batches.key(step, slice(None))
        targets: Value = batches[step % len(batches)][1]
    else:
        size = batches.size(step)
        yield size
        if not special or (step + 1) * size > MOST_READ:
            return
        targets = batches.part(step, slice(0, size))[1]
    for place, leaf in enumerate(leaves(targets)):
        if leaf.is_floating_point():
            yield place, "nan", bool(leaf.isnan().any())
        for number in () if leaf.is_complex() else special:
            for how in (leaf.lt, leaf.eq, leaf.gt):
                yield place, number, how.__name__, bool(how(number).any())
