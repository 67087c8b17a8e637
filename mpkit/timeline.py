"""A Timeline is a Trace put on a clock."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mpkit import metrics
from mpkit.trace import Kind, Lane

if TYPE_CHECKING:
    import pandas as pd

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


@dataclass(repr=False)
class Timeline:
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

    # ---- steps --------------------------------------------------------------------------------------------

    @property
    def steps(self) -> list[int]:
        """The numbers of the steps that all ranks completed."""
        return metrics.steps(self.spans, self.world_size)

    def step(self, number: int) -> Timeline:
        """The timeline of one step, its times as they are in the whole.

        Raises:
            ValueError: there is no such step, or it was not completed.
        """
        steps = self.steps
        if number not in steps:
            there = f"It has {_ranges(steps)}." if steps else "No step was completed by all ranks."
            raise ValueError(f"step({number}): this timeline has no complete step {number}. {there}")
        rows = np.flatnonzero(self.spans["step"] == number)
        spans = self.spans[rows]
        place = np.full(len(self.spans) + 1, -1)
        place[rows] = np.arange(len(rows))
        spans["cause"] = place[spans["cause"]]
        start, end = metrics.extent(spans)
        return replace(self, spans=spans, held=metrics.within(self.held, start, end))

    @property
    def _last(self) -> npt.NDArray[Any]:
        """The spans of the last complete step; all, where there are no steps."""
        steps = self.steps
        return self.spans[self.spans["step"] == steps[-1]] if steps else self.spans

    # ---- figures ------------------------------------------------------------------------------------------

    @property
    def makespan(self) -> float:
        """Seconds from the step's first action to the end of its last, over all ranks: what a bubble is a share of."""
        start, end = metrics.extent(metrics.work(self._last))
        return end - start

    @property
    def step_time(self) -> float:
        """Seconds from the beginning of the step's first op of any kind to the end of its last."""
        start, end = metrics.extent(self._last)
        return end - start

    @property
    def busy(self) -> list[float]:
        """Seconds of work by rank."""
        return [float(b) for b in metrics.busy(self._last, self.world_size)]

    @property
    def idle(self) -> list[float]:
        """Seconds without work by rank, within the makespan."""
        makespan = self.makespan
        return [makespan - busy for busy in self.busy]

    @property
    def utilisation(self) -> list[float]:
        """The share of the makespan that each rank works."""
        makespan = self.makespan
        return [busy / makespan if makespan else 0.0 for busy in self.busy]

    @property
    def bubble(self) -> float:
        """The idle share of the makespan, averaged over ranks; 0 where nobody computes.

        This is GPipe's definition (Huang et al. 2019, section 2.3), by which p stages and m micro-batches have
        (p-1)/(m+p-1). Megatron's is `ideal_bubble`.
        """
        return 1.0 - sum(self.utilisation) / self.world_size if self.makespan else 0.0

    @property
    def ideal_bubble(self) -> float:
        """Idle time over work, averaged over ranks: (p-1)/m of GPipe (Narayanan et al. 2021, section 2.2)."""
        work = sum(self.busy)
        return sum(self.idle) / work if work else 0.0

    def bubble_of(self, step: int, *, ideal: bool = False) -> float:
        """The bubble of a step, GPipe's, or with `ideal` Megatron's."""
        one = self.step(step)
        return one.ideal_bubble if ideal else one.bubble

    @property
    def comm_time(self) -> list[float]:
        """Seconds by rank in which at least one communication of it is under way."""
        return [metrics.length(metrics.covered(spans)) for spans in self._lanes(Lane.COMM)]

    @property
    def exposed_comm(self) -> list[float]:
        """Seconds by rank in which it communicates and does not compute meanwhile."""
        together = [np.concatenate(both) for both in zip(*self._comm_and_work(), strict=True)]
        work = self._comm_and_work()[1]
        return [
            metrics.length(metrics.covered(both)) - metrics.length(metrics.covered(own))
            for both, own in zip(together, work, strict=True)
        ]

    @property
    def overlap(self) -> float:
        """The share of all communication time that is hidden behind compute; 1 where there is none."""
        whole = sum(self.comm_time)
        return 1.0 - sum(self.exposed_comm) / whole if whole else 1.0

    @property
    def comm_bytes(self) -> list[dict[str, int]]:
        """Payload bytes by rank, by kind of communication; a message counts at both its ends."""
        return metrics.bytes_by_kind(self._last, self.world_size)

    @property
    def peak_memory(self) -> list[dict[str, int]]:
        """Bytes by rank, by category, at the moment of the step at which the rank held most; "total" is their sum."""
        return metrics.peak(self.held, self.world_size, *metrics.extent(self._last))

    @property
    def peak_memory_of_run(self) -> list[dict[str, int]]:
        """`peak_memory`, of all steps and of what comes before and after them."""
        return metrics.peak(self.held, self.world_size, -np.inf, np.inf)

    def throughput(self, samples: int | None = None) -> float:
        """Samples a second; `samples` a step are those of the run's batch if not given.

        Raises:
            ValueError: nobody knows how many samples a step has.
        """
        samples = samples if samples is not None else self.meta.get("batch_size")
        if samples is None:
            raise ValueError(
                "This timeline does not know how many samples a step has: throughput(samples=32), say"
            )
        return samples / self.step_time if self.step_time else 0.0

    # ---- as something else ---------------------------------------------------------------------------------

    def to_dataframe(self, *, waits: bool = False) -> pd.DataFrame:
        """A row a span: what each lane did, by rank, then start.

        Columns: rank, lane ("compute", "comm", "host"), kind (such as "forward"), stage and microbatch (-1: none),
        name, start, end (seconds), bytes, flops, step (-1: none), depth (from 1: a layer within the action above it).

        Args:
            waits: also the times at which the compute lane waited for communication.
        """
        import pandas as pd

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
        return pd.DataFrame(columns)

    def to_svg(self, path: str | Path | None = None) -> str:
        """The picture as SVG; written to `path` as well if that is given."""
        from mpkit.views.svg import svg

        return _written(svg(self), path)

    def to_html(self, path: str | Path | None = None) -> str:
        """The interactive timeline as one self-contained HTML page; written to `path` as well if given."""
        from mpkit.views.html import html

        return _written(html(self), path)

    def to_perfetto(self, path: str | Path) -> Path:
        """Write a trace that ui.perfetto.dev and chrome://tracing open; returns its path."""
        from mpkit.views.perfetto import perfetto

        Path(path).write_bytes(perfetto(self))
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
        return (
            f"<Timeline of {self.world_size} ranks, {steps} step{'s' * (steps != 1)}, {self.clock}: {length}>"
        )

    def _lanes(self, lane: Lane) -> list[npt.NDArray[Any]]:
        spans = self._last
        spans = spans[spans["lane"] == lane]
        return [spans[spans["rank"] == rank] for rank in range(self.world_size)]

    def _comm_and_work(self) -> tuple[list[npt.NDArray[Any]], list[npt.NDArray[Any]]]:
        return self._lanes(Lane.COMM), [metrics.work(spans) for spans in self._lanes(Lane.COMPUTE)]


def _written(text: str, path: str | Path | None) -> str:
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text


def _ranges(numbers: list[int]) -> str:
    whole = numbers == list(range(numbers[0], numbers[-1] + 1))
    if whole and len(numbers) > 2:
        return f"steps {numbers[0]} to {numbers[-1]}"
    return "steps " + ", ".join(map(str, numbers)) if len(numbers) > 1 else f"step {numbers[0]}"
