"""A Timeline is a Trace put on a clock."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mpkit import metrics
from mpkit.disk import write_whole
from mpkit.figures import Figures
from mpkit.mesh import Mesh
from mpkit.shown import data_frame
from mpkit.trace import Kind, Lane
from mpkit.tracebacks import public
from mpkit.whereabouts import mesh_of

if TYPE_CHECKING:
    import pandas as pd

    from mpkit.devices import Hardware
    from mpkit.trace import Trace
    from mpkit.traffic import CommMatrix
    from mpkit.volume import CommVolume

__all__ = ["HELD", "SPAN", "Timeline"]

SPAN = np.dtype(
    [
        ("rank", "<i4"),
        ("lane", "u1"),  # trace.Lane
        ("kind", "u1"),  # trace.Kind
        ("depth", "u1"),  # 0: a whole action; 1 and more: a layer within it
        ("pad", "u1"),
        ("stage", "<i4"),
        ("microbatch", "<i4"),
        ("step", "<i4"),
        ("name", "<i4"),  # index into Timeline.names
        ("start", "<f8"),  # seconds
        ("end", "<f8"),
        ("bytes", "<i8"),
        ("flops", "<f8"),
        ("peer", "<i4"),
        ("group", "<i4"),  # index into Timeline.names
        ("cause", "<i4"),  # WAIT: the row of the span whose end it waited for, -1 if unknown
        (
            "issued",
            "<f8",
        ),  # communication: when this rank asked for it (start: when it really began)
    ]
)

HELD = np.dtype(
    [
        ("time", "<f8"),  # seconds
        ("rank", "<i4"),
        ("category", "<i4"),  # index into trace.CATEGORIES
        ("total", "<i8"),  # bytes held in this category from this time on
    ]
)


@public
@dataclass(repr=False)
class Timeline(Figures):
    """Operations with times, of a run or of a simulation.

    The figures are those of the last step that all ranks completed; `t.step(2)` is the timeline of step 2, with
    the figures of that.

    Attributes:
        spans: (n,) array of `SPAN`, sorted by rank, then start.
        names: the strings that `spans` refers to; names[0] is "".
        held: (m,) array of `HELD`, sorted by rank and time.
        world_size: how many ranks.
        clock: "measured", "virtual" or "simulated".
        meta: as of the Trace, with "hardware" set to the name of what was replayed on.
        notes: sentences a reader should see (ops left out since a rank was killed, ...).
        so_far: why more is to come, of a run that goes on; else "".

    >>> import mpkit as mk
    >>> t = mk.simulate(mk.Plan.gpipe(4, 8))
    >>> t
    <Timeline of 4 ranks, 1 step, simulated: 33 s, bubble 0.273>
    """

    spans: npt.NDArray[Any]
    names: list[str]
    held: npt.NDArray[Any]
    world_size: int
    clock: str
    meta: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    so_far: str = ""

    @classmethod
    def of(cls, trace: Trace, hardware: Hardware | str | None = None, clock: str | None = None) -> Timeline:
        """A trace put on a clock.

        Args:
            trace: of a run, loaded from a file, or of `mpkit.trace_fake`.
            hardware: the name of a catalogued machine (`mpkit.hardware()` lists them) or a `Hardware` to replay it
                on; None: the one it is of.
            clock: "measured" or "virtual", as in `Run.timeline`.

        Raises:
            ValueError: no such hardware or clock.
        """
        from mpkit.replay import replay

        return replay(trace, hardware, clock)

    @cached_property
    def mesh(self) -> Mesh | None:
        """Where its ranks are, by the plan in meta; None without one."""
        return mesh_of(self.meta, self.world_size)

    # ---- steps --------------------------------------------------------------------------------------------

    def step(self, number: int) -> Timeline:
        """The timeline of one step, as far as it came, with the times it has in the whole.

        It begins with the step's first action, message or copy: a rank that waits for it while others finish the
        step before is not in this step yet.

        Raises:
            ValueError: nothing of such a step is there.
        """
        rows = np.flatnonzero(self.spans["step"] == number)
        if not len(rows):
            there = f"It has {_ranges(self.steps)}." if self.steps else "No step was completed by all ranks."
            raise ValueError(f"step({number}): this timeline has no step {number}. {there}")
        spans = self.spans[rows]
        place = np.full(len(self.spans) + 1, -1)
        place[rows] = np.arange(len(rows))
        spans["cause"] = place[spans["cause"]]
        start, end = metrics.extent(spans)
        if len(active := metrics.active(spans)):
            start = metrics.extent(active)[0]
        for bound in ("start", "end"):
            spans[bound] = np.maximum(spans[bound], start)
        return replace(self, spans=spans, held=metrics.within(self.held, start, end))

    def bubble_of(self, step: int, *, ideal: bool = False) -> float:
        """The bubble of a step: GPipe's, or with `ideal` Megatron's."""
        one = self.step(step)
        return one.ideal_bubble if ideal else one.bubble

    # ---- who sends what to whom --------------------------------------------------------------------------

    def comm_matrix(self, axis: str | None = None) -> CommMatrix:
        """Bytes from rank to rank in the last complete step, by axis of the mesh: heatmaps in a notebook.

        Messages go from their sender to their receiver, what a ring sends goes to the next in it; see `mpkit.traffic`.

        Args:
            axis: "tp", say, or "dp x cp" of groups that span both; None: each axis that has communication.

        Raises:
            ValueError: no communication along that axis.
        """
        from mpkit.traffic import comm_matrix

        return comm_matrix(self, axis)

    def comm_volume(self, rank: int | None = None) -> CommVolume:
        """What a rank sends in the last complete step, by axis and kind, beside what the papers' formulas say.

        A formula is shown where all that it needs is known: see `mpkit.formulas`.

        Args:
            rank: whose; None: the average over all.

        Raises:
            ValueError: no such rank.
        """
        from mpkit.volume import comm_volume

        return comm_volume(self, rank)

    # ---- as something else ---------------------------------------------------------------------------------

    def to_dataframe(self, *, waits: bool = False) -> pd.DataFrame:
        """A row a span: what each lane did, by rank, then start.

        Columns: rank, lane ("compute", "comm", "host"), kind (such as "forward"), stage and microbatch (-1: none),
        name, start, end (seconds), bytes, flops, step (-1: none), depth (from 1: a layer within the action above it).

        Args:
            waits: also the times at which the compute lane waited for communication.

        Raises:
            ImportError: pandas is not installed.
        """
        chosen = self.spans["lane"] != Lane.NONE
        if not waits:
            chosen &= self.spans["kind"] != Kind.WAIT
        spans = self.spans[chosen]
        words = {int(kind): kind.word for kind in Kind}
        columns: dict[str, Any] = {
            "rank": spans["rank"],
            "lane": [Lane(lane).name.lower() for lane in spans["lane"].tolist()],
            "kind": [words[kind] for kind in spans["kind"].tolist()],
            "stage": spans["stage"],
            "microbatch": spans["microbatch"],
            "name": [self.names[name] for name in spans["name"].tolist()],
        }
        columns |= {name: spans[name] for name in ("start", "end", "bytes", "flops", "step", "depth")}
        return data_frame(columns)

    def to_svg(self, path: str | Path | None = None, *, fold: bool = False) -> str:
        """The picture as SVG; written to `path` as well if that is given.

        Args:
            path: of a file.
            fold: of each group of ranks (a stage of a replica) draw the first only.
        """
        from mpkit.views.svg import svg

        return _written(svg(self, fold=fold), path)

    def to_html(self, path: str | Path | None = None) -> str:
        """The interactive timeline as one self-contained HTML page; written to `path` as well if given."""
        from mpkit.views.html import html

        return _written(html(self), path)

    def to_perfetto(self, path: str | Path) -> Path:
        """Write a trace that ui.perfetto.dev and chrome://tracing open; returns its path."""
        from mpkit.views.perfetto import perfetto

        write_whole(Path(path), perfetto(self))
        return Path(path)

    def show(self) -> Any:
        """The interactive timeline, in a notebook."""
        from mpkit.views.timeline import TimelineView

        return TimelineView(self)

    def __str__(self) -> str:
        from mpkit.views.text import text

        return text(self)

    def __repr__(self) -> str:
        steps = len(self.steps)
        length = f"{self.makespan:.4g} s, bubble {self.bubble:.3f}"
        more = f"; {self.so_far}" if self.so_far else ""
        return f"<Timeline of {self.world_size} ranks, {steps} step{'s' * (steps != 1)}, {self.clock}: {length}{more}>"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        """As a cell's last line: the interactive timeline, and a picture where no kernel or no widget is."""
        from mpkit.views.fallback import static_bundle

        if not len(self.spans):
            return {"text/plain": repr(self)}
        found: dict[str, Any] = {}
        with suppress(ImportError):  # then the picture has to do
            shown = self.show()._repr_mimebundle_()
            found = dict(shown[0] if isinstance(shown, tuple) else shown)
        return found or static_bundle(self)


def _written(text: str, path: str | Path | None) -> str:
    if path is not None:
        write_whole(Path(path), text.encode())
    return text


def _ranges(numbers: list[int]) -> str:
    whole = numbers == list(range(numbers[0], numbers[-1] + 1))
    if whole and len(numbers) > 2:
        return f"steps {numbers[0]} to {numbers[-1]}"
    return "steps " + ", ".join(map(str, numbers)) if len(numbers) > 1 else f"step {numbers[0]}"
