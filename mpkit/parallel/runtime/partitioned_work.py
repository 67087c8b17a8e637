"""What a stage of a partitioned model does for a micro-batch: as any stage, but its forward is a walk."""

from __future__ import annotations

from torch import Tensor

from mpkit.data.microbatch import Value
from mpkit.parallel.runtime.stage_work import StageWork
from mpkit.parallel.stage.partitioned import Part

__all__ = ["PartWork"]


class PartWork(StageWork):
    """One stage's compute. Its inputs are what other stages made; every stage takes the data itself."""

    def _compute(self, m: int, inputs: Value) -> tuple[Tensor, ...]:
        assert (
            isinstance(self._stage, Part)
            and isinstance(inputs, tuple)
            and self._job.where.partition is not None
        )
        microbatch = self._microbatches[m]
        division = self._job.where.partition.divisions[microbatch.key]
        draws = self._randomness.draws(self._step, m)
        with draws.apart(), self._attention():
            outputs, made = self._stage.run(division, self.data(m), inputs, draws)
            return self._loss_of(outputs, m, draws) if self._last else made
