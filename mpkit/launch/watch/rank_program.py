"""What a watched run's ranks call: the user's function, with everything that it does recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpkit.launch.watch.instrumentation import ProgramRecording
from mpkit.strategies.rank_context import Context

__all__ = ["NEEDED", "check_watch", "watch_function"]

NEEDED = ("torch.distributed.pipelining",)
"""Modules whose classes are watched, so the fork server imports them once for all ranks."""


def check_watch(watch: Any) -> int | None:
    """Return the depth to which modules are recorded, None for the repeated blocks.

    Args:
        watch: True, or the depth.

    Raises:
        ValueError: it is neither.

    >>> check_watch(True) is None, check_watch(2)
    (True, 2)
    """
    if watch is True:
        return None
    if isinstance(watch, int) and watch >= 0:
        return watch
    raise ValueError(
        f"watch={watch!r}: True records a model's repeated blocks, a number its modules down to that depth, such as "
        "cluster.run(fn, watch=2)"
    )


def watch_function(ctx: Context, function: Callable[..., Any], depth: int | None, *args: Any) -> Any:
    """Call `function(ctx, *args)` and record what it computes, communicates and holds.

    Args:
        ctx: the rank's context.
        function: the user's function.
        depth: how deep modules are recorded; None: repeated blocks.
        args: the function's further arguments.
    """
    with ProgramRecording(ctx.comm, depth):
        return function(ctx, *args)
