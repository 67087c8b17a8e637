"""What F computes: the outputs of a stage for one micro-batch; at the last stage, the micro-batch's share of the loss.

inputs      of the model: copied to the device, in the plan's precision
layers      of the stage, with the micro-batch's own random numbers
loss        at the last stage
check       at the others: what goes to other ranks has the shapes that the dry run found
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mpkit.strategies.compute.loss_share import loss_share
from mpkit.strategies.data.microbatch import Value, leaves
from mpkit.strategies.job.feed import MicroBatch
from mpkit.strategies.job.job import TrainJob
from mpkit.strategies.models.randomness import Draws, OtherDraws, Randomness
from mpkit.strategies.partition.boundary import Boundary
from mpkit.strategies.stage.stage import PRECISIONS, Stage, cast
from mpkit.strategies.stage.to_device import onto_device
from mpkit.trace.record.flops import Flops

if TYPE_CHECKING:
    from mpkit.strategies.rank_context import Context

__all__ = ["StageForward"]


class StageForward:
    """The forward of a chain's stage, step after step.

    Args:
        context: this rank's context.
        job: what to train, and how.
        stage: the stage's layers.
        attention: makes the context manager within which attention is over whole sequences.

    Attributes:
        attention: as above; recomputation needs it too.
        others: learns whether forwards draw random numbers that are not torch's; None: nobody wants to know.
    """

    def __init__(
        self,
        context: Context,
        job: TrainJob,
        stage: Stage,
        attention: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._record, self._device = context.record, context.device
        self._job, self._stage, self._s = job, stage, stage.number
        self._last = stage.number == len(job.where.stages) - 1
        self._dtype = PRECISIONS.get(job.plan.precision)
        self._own = stage.sharded.draws
        replica = job.plan.mesh.place(context.rank).dp
        self._randomness = Randomness(job.how.seed, replica, context.device, self._own)
        self.attention = attention
        self.others: OtherDraws | None = None
        self._step = -1
        self._microbatches: list[MicroBatch] = []

    def begin_step(self, number: int, microbatches: list[MicroBatch]) -> None:
        """Set the step and micro-batches of the next forwards."""
        self._step, self._microbatches = number, microbatches

    def flops(self, key: Hashable) -> Flops:
        """Return FLOPs and bytes of the forward and its backward, for micro-batches of this signature."""
        return self._job.where.flops(key, self._s)

    # ---- inputs -------------------------------------------------------------------------------------------

    def data(self, m: int) -> Value:
        """Return the model's inputs, on the device and in the plan's precision."""
        return self.onto_device(self._microbatches[m].inputs)

    def onto_device(self, inputs: Value) -> Value:
        """Return a copy of some of the model's inputs on the device, in the plan's precision."""
        return self.narrow(onto_device(inputs, self._device, self._record))

    def narrow(self, inputs: Value) -> Value:
        """Return some of the model's inputs in the plan's precision."""
        return inputs if self._dtype is None else cast(inputs, self._dtype)

    # ---- layers -------------------------------------------------------------------------------------------

    def draws(self, m: int, inputs: Value) -> Draws:
        """Return the random numbers of a micro-batch; `inputs` are the stage's."""
        given = leaves(self._microbatches[m].inputs) or leaves(inputs)  # a stage in the middle has no data
        if given:
            self._own.tokens |= dict.fromkeys(self._own.around, tuple(given[0].shape[:2]))
        return self._randomness.draws(self._step, m, self.others)

    def __call__(self, m: int, inputs: Value) -> tuple[Tensor, ...]:
        """Return the stage's outputs for its inputs; at the last stage, the micro-batch's share of the loss."""
        draws = self.draws(m, inputs)
        with draws.preserve_state(), self.attention():
            output = self._stage(inputs, draws)
            if self._last:
                return self.loss(m, output, draws)
        return self.check_output(m, output)

    # ---- loss ---------------------------------------------------------------------------------------------

    def loss(self, m: int, output: Any, draws: Draws) -> tuple[Tensor, ...]:
        """Return the micro-batch's share of the loss, and its count where the loss has one."""
        microbatch = self._microbatches[m]
        draws.begin("the loss")
        targets = onto_device(microbatch.targets, self._device, self._record)
        return loss_share(self._job, output, targets, microbatch.weight)

    # ---- check --------------------------------------------------------------------------------------------

    def check_output(self, m: int, output: Any) -> tuple[Tensor, ...]:
        """Return the tensors of the output.

        Raises:
            ValueError: they have other shapes or dtypes than those that the dry run found.
        """
        expected, made = (
            self._job.where.boundary(self._microbatches[m].key, self._s),
            Boundary.from_output(output),
        )
        if made is None or made.shapes != expected.shapes:
            raise ValueError(self._refusal(m, str(made or type(output).__name__), str(expected)))
        return (output,) if isinstance(output, Tensor) else output

    def _refusal(self, m: int, made: str, expected: str) -> str:
        return (
            f"stage {self._s} made {made} of micro-batch {m}, and {expected} of one of the same shape before: the "
            "shapes that go from stage to stage may depend on the shapes of the data, and not on its values. "
            "Plan.serial() has no stages to go between."
        )
