"""What F computes on a rank of DP: the model's outputs for its share. Rank 0 computes the loss of all shares."""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

from mpkit.strategies.compute.stage_forward import StageForward
from mpkit.strategies.data.microbatch import Value
from mpkit.trace.record.flops import Flops

__all__ = ["ShareForward"]


class ShareForward(StageForward):
    """The forward of the whole model without its loss, for one rank's share of a micro-batch."""

    def flops(self, key: Hashable) -> Flops:
        """Return FLOPs and bytes of the layers' forward and backward, for shares of this signature."""
        return self._job.where.flops(key, self._s, loss=False)

    def __call__(self, m: int, inputs: Value) -> tuple[Tensor, ...]:
        """Return the model's outputs for this rank's share, which rank 0 gathers."""
        draws = self.draws(m, inputs)
        with draws.preserve_state():
            output = self._stage(inputs, draws)
        return self.check_output(m, output)

    def _refusal(self, m: int, made: str, expected: str) -> str:
        return (
            f"the model made {made}, and {expected} of inputs of the same shape before: DP gathers outputs, whose "
            "shapes may depend on the shapes of the data, and not on its values. Plan.ddp gathers none."
        )
