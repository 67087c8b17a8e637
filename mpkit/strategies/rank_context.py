"""The context that a function on a rank receives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from mpkit.strategies.comm.communicator import Communicator
    from mpkit.trace.record.recorder import Recorder


@dataclass(frozen=True)
class Context:
    """The first argument of a function that `Cluster.run` starts on every rank.

    Attributes:
        rank: which rank this is, 0 to world_size - 1.
        world_size: how many ranks there are.
        device: this rank's torch.device; tensors that are communicated live on it.
        comm: collectives and messages, recorded: `ctx.comm.all_reduce(tensor)`.
        record: the recorder: `with ctx.record.span("attention"): ...` puts a span of your own on the timeline.
    """

    rank: int
    world_size: int
    device: torch.device
    comm: Communicator
    record: Recorder

    def log(self, name: str, value: Any, step: int | None = None) -> None:
        """Log a number of your own: `ctx.log("accuracy", 0.5)`. It is charted, and kept in the trace.

        `run.metrics` and `cluster.trace.metrics` return it.

        Args:
            name: what it is, with its unit.
            value: a number, or a tensor of one element.
            step: the step that it belongs to; None: the step that is under way, or else one more than the latest.

        Raises:
            ValueError: the value is not one number.
        """
        self.record.log(name, value, step)
