"""Execution: a launch that is followed: whoever looks at it is notified as it proceeds, until it ends.

`ProgressLine` is one who looks: a line in rank 0's terminal, under a launcher.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from mpkit.common.units import percent, seconds
from mpkit.timeline.live_timeline import LiveFeed
from mpkit.timeline.timeline import Timeline

if TYPE_CHECKING:
    from mpkit.devices.hardware import Hardware
    from mpkit.launch.launch import RankLaunch
    from mpkit.trace import Trace
    from mpkit.trace.metrics import Metrics


TICK = 0.1
"""Seconds between two ticks."""


class Observer(Protocol):
    """An object that follows an execution; its methods are called from the thread that follows it."""

    def tick(self, execution: Any) -> None:
        """Handle a periodic notification: something may have changed."""

    def output(self, line: str) -> None:
        """Handle a line that a rank printed."""

    def end(self, execution: Any) -> None:
        """Handle the end: it finished, was stopped, or failed."""


class Execution:
    """A launch that is followed, whether it trains a model or runs a program of the user's.

    Args:
        start: `Cluster.launch`.
        title: the name of the program, or the plan in a few words.
        function, args: what ranks call.
        how: further arguments of `start`.

    Attributes:
        steps, first_step: the number of steps, and of the first one; None and 0 where only the program knows.
        theory: the bubble according to the schedule's formula; None if there is none.
        blocks: whether its cell runs until it is over, so that the kernel hears of no button before that.
        done: whether it is over: finished, stopped or failed.
    """

    steps: int | None = None
    first_step = 0
    theory: float | None = None
    blocks = True

    def __init__(
        self, start: Callable[..., RankLaunch], title: str, function: Callable[..., Any],
        args: tuple[Any, ...], **how: Any,
    ) -> None:  # fmt: skip
        self.title, self.done = title, False
        self._observers: list[Observer] = []
        self._telling = threading.RLock()  # held while observers are notified or added
        self._launch = start(function, args, sink=self._output, **how)

    # ---- how it stands ------------------------------------------------------------------------------------

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
    def pids(self) -> list[int]:
        """Process ids by rank; empty until the ranks are started."""
        return self._launch.pids

    @property
    def waiting_for(self) -> str | None:
        """Which ranks have waited for others for at least 10 s, where those are, and whether they use CPU time."""
        return self._launch.waiting_for

    # ---- what its ranks recorded --------------------------------------------------------------------------

    @property
    def losses(self) -> list[float]:
        """The loss of every step finished so far; in a training equal to a serial one's, from `first_step` on."""
        return self._launch.losses

    @property
    def metrics(self) -> Metrics:
        """What `ctx.log` and `evaluate=` logged so far: `run.metrics["eval loss"]` is a dict of the value by step.

        `run.metrics.to_dataframe()` has those of all ranks.
        """
        return self.trace.metrics

    @property
    def trace(self) -> Trace:
        """The records of every rank so far."""
        return self._launch.trace

    def feed(self) -> LiveFeed:
        """Return a new reader of the records, which replays them as they arrive."""
        return LiveFeed(self._launch.folder, self._launch.ranks, self._launch.meta)

    def timeline(self, hardware: Hardware | str | None = None, clock: str | None = None) -> Timeline:
        """Put what was recorded so far on a clock.

        Args:
            hardware: the machine to replay it on, as a `Hardware` or the name of a catalogued machine
                (`mk.hardware()` lists them); None: the one it ran on.
            clock: "measured" (the wall clock) or "virtual" (every rank on a device of its own); None: measured on GPUs,
                virtual on CPU processes, which share their cores.
        """
        return Timeline.of(self.trace, hardware, clock)

    # ---- following it -------------------------------------------------------------------------------------

    def look(self, observer: Observer) -> None:
        """Notify `observer` of everything from now on."""
        with self._telling:
            self._observers.append(observer)
            if self.done:
                self._tell("end", self)

    def follow(self) -> None:
        """Let the ranks do their work, notify the observers meanwhile, and return when all is over."""
        try:
            self._launch.finish(TICK, self._tick)
        finally:
            self._end()

    def stop(self) -> Execution:
        """End the ranks now. Losses and trace keep what was recorded so far."""
        self._launch.end()
        return self

    def _tick(self) -> None:
        self._tell("tick", self)

    def _end(self) -> None:
        with self._telling:
            self.done = True
            self._tell("end", self)

    def _output(self, line: str) -> None:
        if self._observers:
            self._tell("output", line)
        else:
            print(line, flush=True)

    def _tell(self, what: str, value: Any) -> None:
        """Notify every observer; one that raises is removed, and the execution goes on."""
        with self._telling:
            for observer in list(self._observers):
                try:
                    getattr(observer, what)(value)
                except Exception as error:
                    self._observers.remove(observer)
                    trouble = f"{type(error).__name__}: {error}"
                    with suppress(OSError, ValueError):  # standard error may be closed
                        print(
                            f"mpkit: a view of the run stopped ({trouble}); the run goes on", file=sys.stderr
                        )


# ---- in a terminal -----------------------------------------------------------------------------------------------

LINE_EVERY = 1.0, 30.0
"""Seconds between two lines: in a terminal, where each replaces the last one; elsewhere, as in a job's log."""

CLEAR = "\r\x1b[K"
"""Moves to the beginning of a terminal's line and empties it."""


class ProgressLine:
    """Follows a run in rank 0's terminal: one line, renewed each second, with the loss and the bubble.

    Reading the trace takes longer as it grows, so at most 2 % of the time is spent on that.
    """

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._every = LINE_EVERY[0 if self._live else 1]
        self._begun = time.monotonic()
        self._next = self._begun + self._every
        self._feed: LiveFeed | None = None

    def tick(self, run: Any) -> None:
        """Show how the run stands, if that is due."""
        now = time.monotonic()
        if now >= self._next:
            self._feed = self._feed or run.feed()
            self._feed.advance()
            self._write(run, self._feed.timeline(), "" if self._live else "\n")
            self._next = time.monotonic() + max(self._every, 50 * (time.monotonic() - now))

    def output(self, line: str) -> None:
        """Show a line of mpkit's own."""
        print(f"{CLEAR if self._live else ''}{line}", file=sys.stderr)

    def end(self, run: Any) -> None:
        """Show how the run ended."""
        self._write(run, run.timeline(), "\n" if run.proof.difference else f"; {run.proof}\n")

    def _write(self, run: Any, timeline: Timeline, after: str) -> None:
        losses = list(run.losses)
        text = f"mpkit: {run.plan}: step {run.first_step + len(losses)} of {run.steps}"
        if losses:
            text += (
                f", loss {losses[-1]:.4g}, {seconds((time.monotonic() - self._begun) / len(losses))} per step"
            )
        if timeline.steps:
            text += f", bubble {percent(timeline.bubble)}"
        if run.waiting_for:
            text += f"; {run.waiting_for}"
        sys.stderr.write(f"{CLEAR if self._live else ''}{text}{after}")
        sys.stderr.flush()
