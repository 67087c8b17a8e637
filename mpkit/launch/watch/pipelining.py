"""The stages and micro-batches of torch.distributed.pipelining: what its schedules call for each action.

    F     forward_one_chunk
    B     backward_one_chunk, or I where it is asked for the gradients of the inputs only
    W     backward_weight_one_chunk

Everything that such a call computes belongs to its stage and micro-batch. A step's loss is the mean of those of its
micro-batches, as `scale_grads=True` has it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mpkit.common.process_wide import Replacements
from mpkit.common.torch_private import _PipelineStageBase
from mpkit.launch.watch.actions import Actions
from mpkit.trace import Kind

__all__ = ["ProgramStages"]


class ProgramStages:
    """The stages of one rank's program.

    Args:
        actions: the rank's actions.
    """

    def __init__(self, actions: Actions) -> None:
        self._actions = actions
        self._replaced = Replacements()

    def install(self) -> None:
        """Begin to see what schedules run."""
        base: Any = _PipelineStageBase
        forward, backward, weights = (
            base.forward_one_chunk, base.backward_one_chunk, base.backward_weight_one_chunk,
        )  # fmt: skip

        def forward_one_chunk(stage: Any, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
            return self._run_action(stage, fwd_chunk_id, Kind.FORWARD, forward, *args, **kwargs)

        def backward_one_chunk(
            stage: Any, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, *args: Any, **kwargs: Any
        ) -> Any:  # fmt: skip
            kind = Kind.BACKWARD if full_backward else Kind.INPUT_GRAD
            if stage.is_last and isinstance(loss, Tensor) and loss.numel() == 1:
                self._actions.note_share(loss / stage.chunks)
            return self._run_action(stage, bwd_chunk_id, kind, backward, loss, full_backward, *args, **kwargs)

        def backward_weight_one_chunk(stage: Any, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
            return self._run_action(stage, bwd_chunk_id, Kind.WEIGHT_GRAD, weights, *args, **kwargs)

        self._replaced.put(base, "forward_one_chunk", forward_one_chunk)
        self._replaced.put(base, "backward_one_chunk", backward_one_chunk)
        self._replaced.put(base, "backward_weight_one_chunk", backward_weight_one_chunk)

    def uninstall(self) -> None:
        """Leave stages as they were."""
        self._replaced.restore()

    def _run_action(
        self, stage: Any, microbatch: int, kind: Kind, run: Any, *args: Any, **kwargs: Any
    ) -> Any:
        actions = self._actions
        before, actions.place = actions.place, (stage.stage_index, microbatch)
        op = actions.begin(kind, f"stage {stage.stage_index}", (args, kwargs))
        try:
            return run(stage, microbatch, *args, **kwargs)
        finally:
            actions.end(op)
            if kind == Kind.FORWARD and stage.is_last:
                actions.begin_loss()
            actions.place = before
