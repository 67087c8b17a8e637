"""A watched program in a notebook: its dashboard is filled while its cell runs, as a training's is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mpkit.common.display import draw, in_notebook
from mpkit.launch.session.observer import Observers
from mpkit.timeline.live_timeline import LiveFeed
from mpkit.timeline.timeline import Timeline

if TYPE_CHECKING:
    from mpkit.launch.launch import Launch
    from mpkit.launch.launched_rank import LaunchedRank
    from mpkit.trace.metrics import Metrics

__all__ = ["WatchedRun", "run_watched"]

TICK = 0.1
"""Seconds between two ticks."""


def run_watched(
    launch: Callable[..., Launch | LaunchedRank], fn: Callable[..., Any], args: tuple[Any, ...], watch: bool | int,
    timeout: float | None,
) -> list[Any]:  # fmt: skip
    """Run `fn(ctx, *args)` on every rank, recorded, and in a notebook shown meanwhile; return the results by rank.

    Args:
        launch: `Cluster.launch`.
        fn, args, watch, timeout: as in `Cluster.run`.
    """
    from mpkit.launch.watch.rank_program import NEEDED, check_watch, watch_function

    observers, shown = Observers(), in_notebook()
    launched = launch(
        watch_function, (fn, check_watch(watch), *args), timeout=timeout, modules=NEEDED,
        sink=observers.output if shown else print, meta={"watched": True},
    )  # fmt: skip
    if shown:
        WatchedRun(fn, launched, observers).follow()
    else:
        launched.work()
    return launched.results()


class WatchedRun:
    """What is known of a program that `cluster.run(fn, watch=True)` runs. A view asks it what it asks a Run.

    Args:
        fn: the program.
        launch: its ranks.
        observers: are notified as it proceeds; the view is added to them.

    Attributes:
        title: the name of the program.
        theory: the bubble in theory, which nobody knows.
        steps: the number of steps, which only the program knows.
        first_step: the number of its first step.
        blocks: its cell runs until it ends, so that the kernel hears of no button before that.
        done: whether it has ended.
    """

    theory: float | None = None
    steps: int | None = None
    first_step = 0
    blocks = True

    def __init__(self, fn: Callable[..., Any], launch: Launch | LaunchedRank, observers: Observers) -> None:
        self.title = getattr(fn, "__name__", type(fn).__name__)
        self._launch, self._observers = launch, observers
        self.done = False

    def follow(self) -> None:
        """Show the program, let its ranks do their work, and return when they have ended."""
        self._observers.add(draw(self, "widget"))
        try:
            self._launch.finish(TICK, lambda: self._observers.tell("tick", self))
        finally:
            self.done = True
            self._observers.tell("end", self)

    def stop(self) -> None:
        """End the ranks now."""
        self._launch.end()

    # ---- what a view asks

    @property
    def status(self) -> str:
        """One of "running", "finished", "stopped" or "failed"."""
        if not self.done:
            return "running"
        if self._launch.error is not None:
            return "failed"
        return "stopped" if self._launch.stopped else "finished"

    @property
    def error(self) -> Exception | None:
        """The error that it failed with, or None."""
        return self._launch.error

    @property
    def losses(self) -> list[float]:
        """The loss of each step so far, on the first rank that knows it."""
        return self._launch.losses

    @property
    def metrics(self) -> Metrics:
        """What it logged so far."""
        return self._launch.trace.metrics

    def feed(self) -> LiveFeed:
        """Return a new reader of its records, which replays them as they arrive."""
        return LiveFeed(self._launch.folder, self._launch.ranks, self._launch.meta)

    def timeline(self) -> Timeline:
        """Put what it did so far on a clock."""
        return Timeline.of(self._launch.trace)
