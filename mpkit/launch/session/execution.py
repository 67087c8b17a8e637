"""Execution: a launch that notifies observers as it proceeds, until it ends.

`ProgressLine` is such an observer: a line in rank 0's terminal, under a launcher.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from mpkit.common.exceptions import one_line
from mpkit.common.units import percent, seconds
from mpkit.timeline.timeline import LiveFeed, Timeline

if TYPE_CHECKING:
    from mpkit.devices.hardware import Hardware
    from mpkit.launch.launch import RankLaunch
    from mpkit.trace import Trace
    from mpkit.trace.metrics import Metrics


TICK = 0.1  # seconds between two ticks


class Execution:
    """A launch that is followed, whether it trains a model or runs a program of the user's.

    `start` is `Cluster.launch`, and `how` has its further arguments; `title` is the name of the program, or the plan in
    a few words.
    """

    steps: int | None = None  # in all; None where only the program knows
    first_step = 0
    theory: float | None = None  # the bubble according to the schedule's formula
    blocks = True  # whether its cell runs until it is over, so that the kernel hears of no button before that
    done = False  # finished, stopped or failed

    def __init__(
        self, start: Callable[..., RankLaunch], title: str, function: Callable[..., Any],
        args: tuple[Any, ...], **how: Any,
    ) -> None:  # fmt: skip
        self.title = title
        self._observers: list[Any] = []
        self._telling = threading.RLock()  # held while observers are notified or added
        self._launch = start(function, args, sink=self._output, **how)

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
        return self._launch.hangs.waiting_for

    @property
    def losses(self) -> list[float]:
        """The loss of every step finished so far; in a training equal to a serial one's, from `first_step` on."""
        return self._launch.losses

    @property
    def metrics(self) -> Metrics:
        """What `ctx.log` and `evaluate=` logged so far: `run.metrics["eval loss"]` is a dict of the value by step.

        `run.metrics.to_dataframe()` has the metrics of all ranks.
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
        """Put what was recorded so far on a clock; see `Run.timeline`."""
        return Timeline.of(self.trace, hardware, clock)

    def look(self, observer: Any) -> None:
        """Notify `observer` from now on, from the thread that follows the ranks.

        It has `tick(execution)`, since something may have changed; `output(line)`, which a rank printed; and
        `end(execution)`.
        """
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
                    warning = f"mpkit: a view of the run stopped ({one_line(error)}); the run goes on"
                    with suppress(OSError, ValueError):  # standard error may be closed
                        print(warning, file=sys.stderr)


LINE_EVERY = 1.0, 30.0  # seconds between lines: in a terminal, where one replaces the last; in a log
CLEAR = "\r\x1b[K"  # moves to the beginning of a terminal's line and empties it


class ProgressLine:
    """Shows a run in rank 0's terminal: one line, renewed each second, with the loss and the bubble.

    Reading the trace takes longer as it grows, so at most 2 % of the time is spent on that.
    """

    def __init__(self) -> None:
        self._live, self._begun = sys.stderr.isatty(), time.monotonic()
        self._every = LINE_EVERY[0 if self._live else 1]
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
            pace = seconds((time.monotonic() - self._begun) / len(losses))
            text += f", loss {losses[-1]:.4g}, {pace} per step"
        if timeline.steps:
            text += f", bubble {percent(timeline.bubble)}"
        if run.waiting_for:
            text += f"; {run.waiting_for}"
        sys.stderr.write(f"{CLEAR if self._live else ''}{text}{after}")
        sys.stderr.flush()
