"""F: the outputs of a stage for one micro-batch; at the last stage, the micro-batch's share of the loss.

A stage of a chain (`StageForward`) calls its layers one after the other; a stage of a partitioned model (`PartForward`)
runs its part of the model's own forward.

inputs      copy the model's inputs to the device, in the plan's precision
layers      run the stage's layers, with the micro-batch's own random numbers
loss        at the last stage; in an evaluation, the scores instead
check       at the others: the outputs have the shapes that the dry run found

In an evaluation a micro-batch adds the loss and the user's metrics, each as [sum, weight]. A score is the quotient of
these sums over all batches: a mean over samples, or total / count if the loss or the metric returns (total, count).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mpkit.errors import MpkitError
from mpkit.strategies.data.microbatch import Value, leaves, map_tensors
from mpkit.strategies.job.feed import MicroBatch
from mpkit.strategies.job.job import TrainJob
from mpkit.strategies.loss.counted import MeanLoss, Quotient, SummedMeans, as_pair, shares
from mpkit.strategies.loss.whole_batch import WholeBatchLoss
from mpkit.strategies.models.randomness import Draws, OtherDraws
from mpkit.strategies.models.step_facts import StepFacts
from mpkit.strategies.partition.value import Boundary
from mpkit.strategies.stage.partitioned_stage import PartitionedStage
from mpkit.strategies.stage.stage import PRECISIONS, Stage, arguments_of, cast, onto_device
from mpkit.trace.record.flops import Flops

if TYPE_CHECKING:
    from mpkit.strategies.rank_context import Context


def measure_scores(metric: Any, output: Any, targets: Value) -> dict[str, Any]:
    """Return a metric function's values by name; the name is "" if it returns a single value."""
    value = metric(output, targets)
    return {str(name): each for name, each in value.items()} if isinstance(value, Mapping) else {"": value}


def scores(job: TrainJob, output: Any, targets: Value, weight: float, size: int) -> tuple[Tensor, ...]:
    """Return the sums and weights of the loss and of each metric, one after the other, as float64 scalars.

    `weight` is the micro-batch's share of its batch of `size` samples; 0 for a stand-in, which does not count.
    """
    evaluation = job.how.evaluation
    assert evaluation is not None
    if job.plan.precision != "full":
        output = cast(output, torch.float32)  # a loss is a long sum, for which 16 bits are too few
    # ---- loss
    value = _counted_loss(job.what.loss, output, targets, weight)
    pairs: list[Any] = [value if isinstance(value, tuple) else (value * weight * size, weight * size)]
    # ---- metrics
    if evaluation.metric is not None:
        values = measure_scores(evaluation.metric, output, targets)
        _check(tuple(values), evaluation.names[1:])
        for value in values.values():
            pairs.append(as_pair(value) or (value * weight * size, weight * size))
    device = pairs[0][0].device
    flat = (torch.as_tensor(number, dtype=torch.float64, device=device) for pair in pairs for number in pair)
    return tuple(number.detach().reshape(()) if weight else torch.zeros_like(number) for number in flat)


def _counted_loss(loss: Any, output: Any, targets: Value, weight: float) -> Any:
    """Return a loss's (total, count), also for one of torch's means; its value if its divisor is not known.

    Training on a batch in one part uses the mean itself. An evaluation weights its batches by the targets that count,
    as in `mk.mean_loss`, and not by samples.
    """
    if isinstance(loss, WholeBatchLoss):
        return loss(output, targets, counts=weight > 0)
    if isinstance(loss, Quotient):
        loss = loss.loss
    if isinstance(owner := getattr(loss, "__self__", None), MeanLoss):  # `MeanLoss.mean`
        loss = owner
    with SummedMeans() as means:
        value = loss(output, targets)
    pair = means.pair_of(value) or as_pair(value)
    return loss(output, targets) if pair is None and means.calls else pair or value


def _check(names: tuple[str, ...], expected: tuple[str, ...]) -> None:
    pairs = zip(names, expected, strict=True)
    if len(names) != len(expected) or any(a and f"eval {a}" != b for a, b in pairs):
        raise MpkitError(
            f"the metric function measured {', '.join(map(repr, names))} of this micro-batch, and "
            f"{', '.join(map(repr, expected))} of the first samples: it has to return the same names each time"
        )


def keep_attention(attended: object = None) -> AbstractContextManager[None]:
    """Return the context of a forward on whole sequences."""
    return nullcontext()


class StageForward:
    """The forward of a chain's stage, step after step.

    `attention` makes the context manager within which attention is over whole sequences.
    """

    evaluates = False  # if so, the last stage returns the scores of an evaluation, and no loss

    def __init__(
        self, context: Context, job: TrainJob, stage: Stage,
        attention: Callable[..., AbstractContextManager[Any]] = keep_attention,
    ) -> None:  # fmt: skip
        self._record, self._device = context.record, context.device
        self._job, self._stage, self._s = job, stage, stage.number
        self.computes_loss = stage.number == len(job.where.stages) - 1
        self._dtype = PRECISIONS.get(job.plan.precision)
        self._own = stage.sharded.draws
        self._replica = job.plan.mesh.place(context.rank).dp
        self.attention = attention
        self.others: OtherDraws | None = None  # learns whether forwards draw numbers that are not torch's
        self.facts: StepFacts | None = None  # learns what the loss does
        self._step = -1
        self._microbatches: list[MicroBatch] = []
        self.attended: dict[int, int] = {}  # pairs of a query and a key of divided sequences, by micro-batch

    def begin_step(self, number: int, microbatches: list[MicroBatch]) -> None:
        """Set the step and micro-batches of the next forwards."""
        self._step, self._microbatches, self.attended = number, microbatches, {}

    def flops(self, key: Hashable) -> Flops:
        """Return the FLOPs and bytes of the forward and its backward for micro-batches of this signature."""
        return self._job.where.flops(key, self._s)

    def _over_sequences(self, m: int) -> AbstractContextManager[Any]:
        """Return the context in which a micro-batch's attention is over whole sequences, and counted."""
        self.attended[m] = 0  # anew if the forward is repeated

        def count(pairs: int) -> None:
            self.attended[m] += pairs

        return self.attention(count)

    def data(self, m: int) -> Value:
        """Return a copy of the model's inputs on the device, in the plan's precision."""
        return self.onto_device(self._microbatches[m].inputs)

    def onto_device(self, inputs: Value) -> Value:
        """Return a copy of some of the model's inputs on the device, in the plan's precision."""
        copied = onto_device(inputs, self._device, self._record)
        return copied if self._dtype is None else cast(copied, self._dtype)

    def draws(self, m: int, inputs: Value) -> Draws:
        """Return the random numbers of a micro-batch; `inputs` are the stage's."""
        given = leaves(self._microbatches[m].inputs) or leaves(inputs)  # a stage in the middle has no data
        if given:
            self._own.tokens |= dict.fromkeys(self._own.around, tuple(given[0].shape[:2]))
        place = self._job.how.seed, self._step, self._replica, m
        return Draws(place, self._device, self._own, self.others)

    def __call__(self, m: int, inputs: Value) -> tuple[Tensor, ...]:
        """Return the stage's outputs for its inputs; at the last stage, the micro-batch's share of the loss."""
        draws = self.draws(m, inputs)
        with draws.preserve_state(), self._over_sequences(m):
            # The backward and a recomputation need the inputs as they are.
            output: Any = map_tensors(torch.clone, inputs) if self._stage.in_place else inputs
            args, kwargs = arguments_of(output, first=self._s == 0)
            for layer in self._stage.seeded_layers(draws):
                output = layer(*args, **kwargs)
                args, kwargs = (output,), {}
            if self.computes_loss:
                return self.loss(m, output, draws)
        return self.check_output(m, output)

    def loss(self, m: int, output: Any, draws: Draws) -> tuple[Tensor, ...]:
        """Return the micro-batch's share of the loss, and its count where the loss has one."""
        microbatch = self._microbatches[m]
        draws.begin("the loss")
        targets = onto_device(microbatch.targets, self._device, self._record)
        if self.evaluates:
            size = sum(each.samples for each in self._microbatches)
            return scores(self._job, output, targets, microbatch.weight, size)
        samples = len(leaves(targets)[0]) if leaves(targets) else 0
        with nullcontext() if self.facts is None else self.facts.of_loss(samples):
            return loss_share(self._job, output, targets, microbatch.weight)

    def check_output(self, m: int, output: Any) -> tuple[Tensor, ...]:
        """Return the tensors of the output, whose shapes must be those that the dry run found."""
        expected = self._job.where.boundary(self._microbatches[m].key, self._s)
        made = Boundary.from_output(output)
        if made is None or made.shapes != expected.shapes:
            raise ValueError(
                f"stage {self._s} made {made or type(output).__name__} of micro-batch {m}, and {expected} of one of "
                "the same shape before: the shapes that go from stage to stage may depend on the shapes of the data, "
                "and not on its values. Plan.serial() has no stages to go between."
            )
        return (output,) if isinstance(output, Tensor) else output


class PartForward(StageForward):
    """The forward of a partitioned model's stage: its inputs are other stages' outputs; every stage takes the data."""

    def __call__(self, m: int, inputs: Value) -> tuple[Tensor, ...]:
        """Return what other stages need from this one; at the last stage, the micro-batch's share of the loss."""
        stage, partition = self._stage, self._job.where.partition
        assert isinstance(stage, PartitionedStage) and isinstance(inputs, tuple) and partition is not None
        division = partition.divisions[self._microbatches[m].key]
        draws = self.draws(m, inputs)
        with draws.preserve_state(), self._over_sequences(m):
            outputs, made = stage.run(division, self.data(m), inputs, draws)
            return self.loss(m, outputs, draws) if self.computes_loss else made


def loss_share(job: TrainJob, output: Any, targets: Value, weight: float) -> tuple[Tensor, ...]:
    """Return a micro-batch's share of the loss, and its count if there is one (`strategies.loss.counted.shares`)."""
    if job.plan.precision != "full":
        output = cast(output, torch.float32)  # a loss is a long sum, for which 16 bits are too few
    if isinstance(job.what.loss, WholeBatchLoss):
        loss = job.what.loss(output, targets, counts=weight > 0)
    else:
        loss = job.what.loss(output, targets)
    return shares(loss, weight, job.what.nominal)
