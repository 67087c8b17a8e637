"""A run in the terminal, in colour, while it goes on.

    GPipe, 8 micro-batches   step 3 of 4 ━━━━━━━━━━━━━━━━━━╸━━━━━━   loss 4.541   bubble 28 %
    rank 0 (CPU) 0 1 2 3 4 5 6 7 ·············· 7   6   5   4
    rank 1 (CPU)

The rows are those of `text.py`; the picture shows the newest step, as far as it has come on the virtual clock, and at
the end the step that is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mpkit.common.units import percent
from mpkit.timeline.timeline import Timeline
from mpkit.views.drawing.colours import INKS, Key
from mpkit.views.drawing.lanes import FOLDED
from mpkit.views.timeline.picture import picture
from mpkit.views.timeline.text import Cells, cells
from mpkit.views.timeline.text import text as plain

if TYPE_CHECKING:
    from mpkit.launch.session.run import Run

__all__ = ["TerminalView", "watch"]

WIDEST = 120
"""The most columns; a wider picture is harder to read, not easier."""


class TerminalView:
    """An observer that draws a run with rich.

    Args:
        title: what the run is called.
        console: where to draw; None: standard output.
        typical: the step that is drawn once the run is over; None: its last one.
    """

    def __init__(
        self, title: str, console: Console | None = None, typical: Callable[[Timeline], int] | None = None
    ) -> None:
        self.title, self._typical = title, typical
        self.console = console or Console()
        self._live = Live(console=self.console, auto_refresh=False, transient=False)
        self._feed = None

    def __enter__(self) -> TerminalView:
        self._live.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.__exit__(None, None, None)

    def tick(self, run: Run) -> None:
        """Draw what is new."""
        if self._feed is None:
            self._feed = run.feed()  # type: ignore[assignment]
        assert self._feed is not None
        self._feed.advance()
        self._live.update(self.draw(run, self._feed.timeline()), refresh=True)

    def output(self, line: str) -> None:
        """Print a line of a rank's output above the picture."""
        self.console.print(Text(line, style="dim"))

    def end(self, run: Run) -> None:
        """Draw the whole run."""
        self._live.update(self.draw(run, run.timeline()), refresh=True)

    def draw(self, run: Run, timeline: Timeline) -> RenderableType:
        """Return the progress line and the newest step of the timeline."""
        width = min(self.console.width, WIDEST)
        done = run.losses
        ended = self._typical(timeline) if run.done and self._typical is not None else None
        bubble = (
            timeline.bubble_of(ended) if ended is not None else timeline.bubble if timeline.steps else None
        )
        rows: list[RenderableType] = [_progress(self.title, run, done, bubble)]
        step = _newest(timeline) if ended is None else ended
        if step is not None and width >= 40:
            pic = picture(timeline, step, fold=timeline.world_size > FOLDED)
            rows += [_colour_row(row) for row in cells(pic, width)]
            if run.done:
                rows.append(_legend(timeline, step))
        return Group(*rows)


def watch(
    run: Run,
    title: str,
    console: Console | None = None,
    *,
    live: bool = True,
    typical: Callable[[Timeline], int] | None = None,
) -> Run:
    """Draw a run until it is over, without the timeline's notes; returns it.

    Without a terminal, or with `live` off, only its end is drawn: the step that `typical` returns, or the last one.

    Raises:
        RankFailed: as `Run.wait`.
    """
    view = TerminalView(title, console, typical)
    if live and view.console.is_terminal:
        with view:
            run.look(view)
            return run.wait()
    run.wait()
    view.console.print(f"{title}: loss {run.losses[-1]:.4f} after {run.steps} steps")
    timeline, width = run.timeline(), min(view.console.width, WIDEST)
    step = typical(timeline) if typical is not None else None
    view.console.print(
        plain(timeline, width, step=step, fold=run.plan.ranks > FOLDED, notes=False),
        highlight=False,
        soft_wrap=True,
    )
    return run


def _newest(timeline: Timeline) -> int | None:
    """Return the step to draw: at the end the last complete one, before that the last that has begun."""
    begun = timeline.spans["step"][timeline.spans["step"] >= 0]
    return int(begun.max()) if len(begun) else None


def _progress(title: str, run: Run, losses: list[float], bubble: float | None) -> RenderableType:
    line = Table.grid(padding=(0, 2))
    done = run.first_step + len(losses)
    bar = ProgressBar(total=run.steps, completed=done, width=24)
    figures = [f"loss {losses[-1]:.4f}" if losses else ""]
    if run.plan.ranks > 1 and bubble is not None:
        figures.append(f"bubble {percent(bubble)}")
    line.add_row(Text(title, style="bold", no_wrap=True), f"step {done} of {run.steps}", bar, *figures)
    return line


def _colour_row(row: Cells) -> Text:
    """Colour a row of cells; runs of equal keys share a style."""
    text = Text(no_wrap=True)
    text.append(f"{row.label} ", style="dim bold" if row.heads else "dim")
    if row.heads:
        return text
    keys = row.keys.tolist()
    for column, key in enumerate(keys):
        mark = row.digits.get(column, "·" if key == Key.IDLE else " ")
        if key == Key.IDLE or key < 0:
            text.append(mark, style="bright_black")
        else:
            ink = INKS[Key(key)]
            text.append(mark, style=f"{ink.on_light} on {ink.light}")
    text.append(f" {row.note}", style="dim")
    return text


def _legend(timeline: Timeline, step: int) -> Text:
    """Explain the colours that occur in the picture."""
    text = Text(" " * 4)
    present = np.unique(picture(timeline, step).boxes["key"]).tolist()
    for key in (Key(key) for key in present if key < Key.COMM):
        mark, style = ("·", "bright_black") if key == Key.IDLE else (" ", f"on {INKS[key].light}")
        text.append(mark * 2, style=style)
        text.append(f" {INKS[key].word}   ", style="dim")
    return text
