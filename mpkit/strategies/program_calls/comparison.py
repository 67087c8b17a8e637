"""What a rank's program calls of torch.distributed itself, compared with its peers' calls as those of `ctx.comm` are.

Each call is recorded and, before data is exchanged, compared: kind, dtype, shape, reduction, root and group. What DDP,
FSDP, DTensor or a DeviceMesh issue is torch's own affair, and neither recorded nor kept alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mpkit.strategies.comm.call_checks import CallChecks
from mpkit.strategies.comm.communicator import Communicator
from mpkit.strategies.program_calls.communication import Communication
from mpkit.strategies.program_calls.completion import Completion
from mpkit.strategies.program_calls.program import Annotations, SourceLines
from mpkit.strategies.rank_context import Context

__all__ = ["ComparedFunction", "compare_calls"]


@contextmanager
def compare_calls(comm: Communicator, checks: CallChecks | None = None) -> Iterator[None]:
    """Compare the program's own calls of torch.distributed from here to the end of the block.

    Args:
        comm: the communicator of all ranks.
        checks: compares the calls; None: what compares those of `comm`. Where that compares nothing, as between
            machines, this does nothing either.
    """
    checks = checks or comm.wire.checks
    if checks is None or comm.world_size == 1:
        yield
        return
    completion = Completion(comm.wire.record)
    communication = Communication(comm, completion, SourceLines(), Annotations(), checks, direct_only=True)
    completion.install()
    communication.install()
    try:
        yield
    finally:
        communication.uninstall()
        completion.uninstall()


class ComparedFunction:
    """A rank's function whose own calls of torch.distributed are compared; it has that function's name.

    Args:
        function: the user's function.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__name__ = getattr(function, "__name__", type(function).__name__)

    def __call__(self, context: Context, *args: Any) -> Any:
        """Call the function on this rank."""
        with compare_calls(context.comm):
            return self.function(context, *args)
