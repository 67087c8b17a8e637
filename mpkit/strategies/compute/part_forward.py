"""What F computes at a stage of a partitioned model: its part of the model's own forward."""

from __future__ import annotations

from torch import Tensor

from mpkit.strategies.compute.stage_forward import StageForward
from mpkit.strategies.data.microbatch import Value
from mpkit.strategies.stage.partitioned import PartitionedStage

__all__ = ["PartForward"]


class PartForward(StageForward):
    """The forward of a part. Its inputs are what other stages made; every stage takes the data itself."""

    def __call__(self, m: int, inputs: Value) -> tuple[Tensor, ...]:
        """Return what other stages need from this one; at the last stage, the micro-batch's share of the loss."""
        assert (
            isinstance(self._stage, PartitionedStage)
            and isinstance(inputs, tuple)
            and self._job.where.partition is not None
        )
        division = self._job.where.partition.divisions[self._microbatches[m].key]
        draws = self.draws(m, inputs)
        with draws.preserve_state(), self.attention():
            outputs, made = self._stage.run(division, self.data(m), inputs, draws)
            return self.loss(m, outputs, draws) if self._last else made
