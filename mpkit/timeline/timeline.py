"""A Timeline is a Trace put on a clock."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import numpy as np

from mpkit.common.arrays import Array
from mpkit.common.disk import write_whole
from mpkit.common.display import data_frame, draw, write_text
from mpkit.common.tracebacks import public
from mpkit.devices.catalogue import hardware as find
from mpkit.plan.mesh import Mesh, mesh_of
from mpkit.timeline import metrics
from mpkit.timeline.answer import SIMULATED, Answer, Basis, basis_of
from mpkit.timeline.metrics import Figures, stage_times
from mpkit.timeline.notes import clock_notes, failure_notes, placement_notes, proof_notes, sample_notes
from mpkit.timeline.replay import Replay, ReplayResult, replay
from mpkit.trace import Kind, Lane, read_rank

if TYPE_CHECKING:
    import pandas as pd

    from mpkit.devices.hardware import Hardware
    from mpkit.timeline.dependencies.critical_path import CriticalPath
    from mpkit.timeline.findings import Diagnosis
    from mpkit.timeline.traffic import CommMatrix, CommVolume
    from mpkit.trace import Trace


@public
@dataclass(repr=False)
class Timeline(ReplayResult, Figures, Answer):
    """The operations of a run or a simulation, with their times.

    The figures are those of the last step that all ranks completed; `t.step(2)` is the timeline of step 2, with
    the figures of that step.

    Attributes:
        spans: (n,) array of `SPAN`, sorted by rank, then start.
        names: the strings that `spans` refers to; names[0] is "".
        held: (m,) array of `HELD`, sorted by rank and time.
        world_size: the number of ranks.
        clock: "measured", "virtual" or "simulated".
        meta: the meta of the Trace, with "hardware" set to the name of the machine that it was replayed on.
        notes: sentences that a reader should see (ops left out because a rank was killed, ...).
        so_far: for a run in progress, why there is more to come; else "".
        device_samples: (s,) array by rank of what NVML says of its GPU every 100 ms: time (s), utilisation (%) and
            memory (bytes in use); nan: it does not tell.
        sent_parts: (k,) array of `PART_SENT`: what all-to-alls of uneven parts sent to whom.
        basis: what was measured, and what is assumed.

    >>> import mpkit as mk
    >>> t = mk.simulate(mk.Plan.gpipe(4, 8))
    >>> t
    <Timeline of 4 ranks, 1 step, simulated: 33 s, bubble 0.273>
    """

    basis: Basis = SIMULATED

    @classmethod
    def of(cls, trace: Trace, hardware: Hardware | str | None = None, clock: str | None = None) -> Timeline:
        """Put a trace on a clock.

        Args:
            trace: a trace of a run, loaded from a file, or made by `mpkit.trace_fake`.
            hardware: the name of a catalogued machine (`mpkit.hardware()` lists them) or a `Hardware` to replay it
                on; None: the machine that it was recorded on.
            clock: "measured" or "virtual", as in `Run.timeline`.

        Raises:
            ValueError: there is no such hardware or clock.
        """
        timeline = cls.from_replay(replay(trace, hardware, clock), elsewhere=hardware is not None)
        timeline.notes += (
            failure_notes(timeline.meta)
            + (proof_notes(timeline.meta) if hardware is None else [])
            + clock_notes(timeline.meta)
            + sample_notes(trace, hardware is not None)
        )
        if hardware is not None:
            timeline.notes += placement_notes(timeline, find(hardware))
        return timeline

    @classmethod
    def from_replay(cls, replayed: ReplayResult, *, elsewhere: bool = False) -> Timeline:
        """Make a Timeline from the result of a replay, with figures and views."""
        return cls(**vars(replayed), basis=basis_of(replayed.clock, replayed.meta, elsewhere=elsewhere))

    def timeline(self) -> Timeline:
        """Return itself, as every answer returns its timeline."""
        return self

    @property
    def because(self) -> dict[str, float]:
        """Where the last complete step goes: seconds per rank of work, and of idle time by cause, the longest first.

        They are averaged over ranks, and add up to the step.
        """
        from mpkit.timeline.idleness import parts_of_step

        return parts_of_step(self)

    @cached_property
    def mesh(self) -> Mesh | None:
        """The mesh of the ranks, from the plan in meta; None without a plan."""
        return mesh_of(self.meta, self.world_size)

    # ---- steps --------------------------------------------------------------------------------------------

    def step(self, number: int) -> Timeline:
        """Return the timeline of one step, as far as it was recorded, with the times that it has in the whole.

        It begins with the step's first action, message or copy: the time in which a rank waits for that while others
        finish the previous step does not count.

        Raises:
            ValueError: the timeline holds nothing of that step.
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
        sampled = self.device_samples
        sampled = sampled[(sampled["time"] >= start) & (sampled["time"] <= end)]
        return replace(
            self, spans=spans, held=metrics.changes_within(self.held, start, end), device_samples=sampled
        )

    @property
    def last_step(self) -> Timeline:
        """The timeline of the last complete step, which the figures are of; the whole one if there is none."""
        return self.step(self.steps[-1]) if self.steps else self

    # ---- who sends what to whom --------------------------------------------------------------------------

    def comm_matrix(self, axis: str | None = None) -> CommMatrix:
        """Return the bytes from rank to rank in the last complete step, by axis of the mesh: heatmaps in a notebook.

        A message goes from its sender to its receiver; in a ring, each rank sends to the next one. See
        `mpkit.timeline.traffic`.

        Args:
            axis: such as "tp", or "dp x cp" for groups that span both; None: every axis with communication.

        Raises:
            ValueError: there is no communication along that axis.
        """
        from mpkit.timeline.traffic import comm_matrix

        return comm_matrix(self, axis)

    def comm_volume(self, rank: int | None = None) -> CommVolume:
        """Return what a rank sends in the last complete step, by axis and kind, beside what the papers' formulas say.

        A formula is shown if all of its inputs are known: see `mpkit.timeline.formulas`.

        Args:
            rank: the rank; None: the average over all ranks.

        Raises:
            ValueError: there is no such rank.
        """
        from mpkit.timeline.traffic import comm_volume

        return comm_volume(self, rank)

    # ---- what decides a step --------------------------------------------------------------------------------

    def critical_path(self, step: int | None = None) -> CriticalPath:
        """Return the operations that decide how long a step takes, and the slack of every other one.

        Raises:
            ValueError: there is no such step.
        """
        from mpkit.timeline.dependencies.critical_path import critical_path

        number = self.steps[-1] if step is None and self.steps else step
        return critical_path(self if number is None else self.step(number), -1 if number is None else number)

    def diagnose(self, step: int | None = None, *, hardware: Hardware | str | None = None) -> Diagnosis:
        """Say why a step takes as long as it does: findings by what they cost, with reasons and what to try.

        Each wait is charged to the rank that came last, and each gain is the step played again without its cause.

        Args:
            step: its number; None: the last complete one, which the figures are of.
            hardware: the machine that it ran on, for the memory of its devices and the latency of its links, where the
                timeline does not name one of the catalogue.

        Raises:
            ValueError: there is no such step or hardware.

        >>> import mpkit as mk
        >>> found = mk.simulate(mk.Plan.pipeline("1f1b", 4, 16), forward=[1, 1, 3, 1]).diagnose()
        >>> print(found[0].words)
        Rank 2 with stage 2 has 1.43 times the mean time of a rank: it works 92.0 % of the step, the others 55.2 %.
        """
        found: Diagnosis = resolve_name("mpkit.timeline.diagnosis.rules:diagnose")(self, step, hardware)
        return found

    def stage_times(self) -> dict[str, Any]:
        """Return how long forwards and backwards took, by stage, and messages, as arguments for `mk.simulate`.

        The first step is left out if there are others, since it is slower. A backward that was not split is assumed to
        spend half its time on the gradients of the inputs and half on those of the weights. Recomputation does not
        count.

        Returns:
            "forward", "input_grad", "weight_grad": seconds by stage; "hop": seconds that a message takes; and
            "backward", if a stage had both whole backwards and split ones.

        Raises:
            ValueError: some stage has no forward in the timeline, or there are no stages.

        >>> import mpkit as mk
        >>> t = mk.simulate(mk.Plan.pipeline("zb_h1", 2, 4), [1, 2], [3, 4], 0.5, hop=0.25)
        >>> t.stage_times()
        {'forward': [1.0, 2.0], 'input_grad': [3.0, 4.0], 'weight_grad': [0.5, 0.5], 'hop': 0.25}
        >>> mk.simulate(mk.Plan.pipeline("zb_h1", 2, 4), **t.stage_times()).step_time == t.step_time
        True
        """
        return stage_times(self)

    # ---- as something else ---------------------------------------------------------------------------------

    def to_dataframe(self) -> pd.DataFrame:
        """Return one row per span: what each lane did, by rank, then by start.

        Columns: rank, lane ("compute", "comm", "host"), kind (such as "forward"), stage and microbatch (-1: none),
        name, start, end (seconds), bytes, flops, step (-1: none), depth (from 1: a layer within the action above it).

        Raises:
            ImportError: pandas is not installed.
        """
        spans = metrics.active(self.spans)
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

    def to_svg(self, path: str | Path | None = None) -> str:
        """Return the picture as SVG; write it to `path` as well if that is given."""
        return write_text(draw(self, "svg"), path)

    def to_html(self, path: str | Path | None = None) -> str:
        """Return the interactive timeline as one self-contained HTML page; write it to `path` as well if given."""
        return write_text(draw(self, "html"), path)

    def to_perfetto(self, path: str | Path) -> Path:
        """Write a trace that ui.perfetto.dev and chrome://tracing can open, and return its path."""
        write_whole(Path(path), draw(self, "perfetto"))
        return Path(path)

    def show(self, *, memory: bool = False) -> Any:
        """Show the interactive timeline in a notebook.

        Args:
            memory: whether to draw below it what each rank held, over time.
        """
        return draw(self, "widget", memory=memory)

    def __str__(self) -> str:
        return str(draw(self, "text"))

    def __repr__(self) -> str:
        steps, ranks = len(self.steps), f"{self.world_size} rank{'s' * (self.world_size != 1)}"
        length = f"{self.step_time:.4g} s, bubble {self.bubble:.3f}"
        more = f"; {self.so_far}" if self.so_far else ""
        return f"<Timeline of {ranks}, {steps} step{'s' * (steps != 1)}, {self.clock}: {length}{more}>"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        """Show the interactive timeline as a cell's last line, with a picture where there is no kernel or no widget."""
        if not len(self.spans):
            return {"text/plain": repr(self)}
        bundle: dict[str, Any] = {}
        with suppress(ImportError):  # then the picture has to do
            shown = self.show()._repr_mimebundle_()
            bundle = dict(shown[0] if isinstance(shown, tuple) else shown)
        return bundle or dict(draw(self, "bundle"))


def _ranges(numbers: list[int]) -> str:
    whole = numbers == list(range(numbers[0], numbers[-1] + 1))
    if whole and len(numbers) > 2:
        return f"steps {numbers[0]} to {numbers[-1]}"
    return "steps " + ", ".join(map(str, numbers)) if len(numbers) > 1 else f"step {numbers[0]}"


class LiveFeed:
    """The records of a run in progress, read as they grow and replayed immediately.

    `names` has the strings that the spans refer to; the list grows.
    """

    def __init__(self, folder: Path, ranks: int, meta: dict[str, Any]) -> None:
        self._folder, self._ranks = folder, ranks
        self._replay = Replay(ranks, meta=meta)
        self.names = self._replay.names

    def advance(self) -> Array:
        """Return the spans, (n,) of `SPAN`, that follow from what was recorded since the last call."""
        for rank in range(self._ranks) if self._folder.is_dir() else ():  # it goes when the run is over
            self._replay.feed(rank, read_rank(self._folder, rank))
        return self._replay.advance()

    def timeline(self) -> Timeline:
        """Return the timeline of everything so far."""
        return Timeline.from_replay(self._replay.collect())
