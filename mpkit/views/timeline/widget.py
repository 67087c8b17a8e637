"""The live timeline: an anywidget canvas that shows the spans in its traits.

    append   the spans of a run, as they come: the newest steps are in view, at most as often as `Pace` allows
    replace  a whole timeline instead

All that is shown is state: a page that is loaded again, or late, has it at once.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mpkit.common.arrays import Array
from mpkit.common.missing_packages import needs_notebook
from mpkit.common.units import percent
from mpkit.timeline import metrics
from mpkit.timeline.replay import HELD, SPAN
from mpkit.timeline.timeline import Timeline
from mpkit.views.browser import css, esm
from mpkit.views.drawing.lanes import CLOCKS, clock_words, groups_of, groups_trait, rank_label
from mpkit.views.drawing.pace import Pace
from mpkit.views.timeline.critical_path import has_path, pack_path, path_of
from mpkit.views.timeline.stages import layers_trait
from mpkit.views.timeline.svg import static_bundle
from mpkit.views.timeline.text import rank_table
from mpkit.views.timeline.tracks import expected_tracks, pack_tracks
from mpkit.views.timeline.waits_in_vain import length_with_waits, waits_in_vain
from mpkit.views.timeline.wire import look, pack_spans

if TYPE_CHECKING:
    from mpkit.timeline.dependencies.critical_path import CriticalPath

try:
    import anywidget
    import traitlets
except ImportError as error:
    raise needs_notebook("the live timeline", error) from error


PAUSE = 0.08
"""The least seconds between two updates: more would exceed the server's limit of messages."""

STEPS, SPANS, MOST = 4, 2_000, 50_000
"""Of a run that goes on, so many of its newest steps are in view, and more as long as these are not so many spans; and
so many spans at most."""


class TimelineView(anywidget.AnyWidget):
    """A timeline to look at in a notebook: zoom by Ctrl and the wheel, pan by dragging, details by hovering.

    Args:
        timeline: what to show; None for one that is filled by `append`.
        labels: the labels of the lanes, one per rank, if no timeline is given.
        title: a heading.
        room: see below.
        widest: see below.
        memory: whether to draw what each rank held, below the lanes.

    Attributes:
        bubble: the idle share of a step; None before there is any.
        step_time: the seconds of that step.
        of: the step that these two belong to, such as "step 3" or "step 4 so far"; "" if there is only one.
        clock: which clock the times are of, in words.
        note: a sentence below the picture.
        live: whether more spans will follow; if so, the view follows the newest operations.
        room: the least seconds that the axis covers, so that several views share a scale.
        widest: a label as wide as the widest of the views above and below, so that all axes begin at one place.
        said: what a screen reader is told of the run: its step and loss, and its end.
        waits: the waits in vain of ranks that hang: rank, start in seconds, words.
        has_path: whether a critical path can be shown, which is found when `path_shown` is set.
        path_shown: whether it is shown.
        path_head, path_slack: the path, as `pack_path` has it.
        spans, spans_head: the spans in view, as `pack_spans` has them.
        tracks: the memory of each rank, and its GPU, below the lanes; `tracks_head` says what is in it (`pack_tracks`).
    """

    _esm = esm()
    _css = css()
    title = traitlets.Unicode().tag(sync=True)
    labels = traitlets.List(traitlets.Unicode()).tag(sync=True)
    groups = traitlets.List(traitlets.Dict()).tag(sync=True)
    layers = traitlets.List(traitlets.Dict()).tag(sync=True)
    bubble = traitlets.Float(None, allow_none=True).tag(sync=True)
    step_time = traitlets.Float(None, allow_none=True).tag(sync=True)
    of = traitlets.Unicode().tag(sync=True)
    clock = traitlets.Unicode().tag(sync=True)
    note = traitlets.Unicode().tag(sync=True)
    live = traitlets.Bool(False).tag(sync=True)
    room = traitlets.Float(0.0).tag(sync=True)
    widest = traitlets.Unicode().tag(sync=True)
    said = traitlets.Unicode().tag(sync=True)
    waits = traitlets.List(traitlets.Dict()).tag(sync=True)
    tracks = traitlets.Bytes(b"").tag(sync=True)
    tracks_head = traitlets.Dict().tag(sync=True)
    has_path = traitlets.Bool(False).tag(sync=True)
    path_shown = traitlets.Bool(False).tag(sync=True)
    path_head = traitlets.Dict().tag(sync=True)
    path_slack = traitlets.Bytes(b"").tag(sync=True)
    table = traitlets.Dict().tag(sync=True)
    look = traitlets.Dict().tag(sync=True)
    spans = traitlets.Bytes(b"").tag(sync=True)
    spans_head = traitlets.Dict().tag(sync=True)

    def __init__(
        self,
        timeline: Timeline | None = None,
        *,
        labels: Sequence[str] = (),
        title: str = "",
        room: float = 0.0,
        widest: str = "",
        memory: bool = False,
    ) -> None:
        clock = CLOCKS["virtual"]
        super().__init__(look=look(), title=title, labels=list(labels), clock=clock, room=room, widest=widest)
        self._lock = threading.RLock()
        self._timeline: Timeline | None = None
        self._memory = memory
        self._kept, self._names = np.zeros(0, SPAN), [""]
        # The number of the first span that is kept, and the run's begin.
        self._first, self._origin = (
            0,
            np.inf,
        )
        self._fresh, self._pace = False, Pace(PAUSE)
        self.observe(self._find_path, "path_shown")
        if timeline is not None:
            self.replace(timeline)
            if memory or len(timeline.device_samples):
                self.set_tracks(timeline)

    def begin(self, timeline: Timeline) -> None:
        """Name the lanes of a timeline, of which a run that goes on may have no spans yet."""
        self.labels = [rank_label(timeline, rank) for rank in range(timeline.world_size)]
        self.groups = groups_trait(groups_of(timeline), timeline.world_size)
        self.layers = layers_trait(timeline)

    # ---- feeding --------------------------------------------------------------------------------------------

    def append(self, spans: Array, names: Sequence[str] = ("",)) -> None:
        """Add spans, (n,) of `SPAN`, from any thread; without any, show those that came too soon after the last ones.

        Args:
            spans: the spans; their `cause` counts all spans appended so far, from 0.
            names: all strings so far that spans refer to, not only the new ones.
        """
        with self._lock:
            if len(spans):
                self._forget(None)
                self._kept, self._names, self._fresh = np.concatenate([self._kept, spans]), list(names), True
                self._origin = min(self._origin, float(spans["start"].min()))
                self._drop_old()
            if self._fresh:
                self._pace(self.flush)

    def _drop_old(self) -> None:
        """Keep the spans from the first one of the newest steps on."""
        steps = np.unique(self._kept["step"])
        firsts = np.array([np.argmax(self._kept["step"] == step) for step in steps[-STEPS:]])
        drop = min(int(firsts.min(initial=0)), max(len(self._kept) - SPANS, 0)) if len(steps) > STEPS else 0
        drop = max(drop, len(self._kept) - MOST)
        self._kept, self._first = self._kept[drop:], self._first + drop

    def flush(self) -> None:
        """Show the newest spans now, and their figures."""
        with self._lock, self.hold_sync():
            self.spans_head, self.spans = pack_spans(self._kept, self._names, self._first, self._origin)
            self._fresh = False
            self._count()

    def _count(self) -> None:
        """Update the figures: of the last complete step, or of the first one as far as it has come."""
        kept = Timeline(self._kept, list(self._names), np.zeros(0, HELD), max(len(self.labels), 1), "virtual")
        shown = kept.steps[-1] if kept.steps else int(self._kept["step"].max())
        of_step = self._kept[self._kept["step"] == shown]
        step = replace(kept, spans=of_step)
        self.of = f"step {shown}{' so far' * (not kept.steps)}" if shown >= 0 else "so far"
        self.bubble = step.bubble if len(metrics.work(of_step)) else None
        self.step_time = step.step_time
        shares = [percent(1 - share) for share in step.utilisation]
        rows = [[label, share] for label, share in zip(self.labels, shares, strict=False)]
        self.table = {"head": ["", f"idle, {self.of}"], "rows": rows}

    def replace(self, timeline: Timeline) -> None:
        """Show this timeline instead of everything shown so far."""
        with self._lock, self.hold_sync():
            self._forget(timeline)
            works, steps = len(metrics.work(timeline.spans)) > 0, timeline.steps
            self.spans_head, self.spans = pack_spans(timeline.spans, timeline.names)
            self.begin(timeline)
            self.clock = clock_words(timeline)
            if hardware := timeline.meta.get("hardware", "") if timeline.clock != "simulated" else "":
                self.clock += f", on {hardware}"
            self.note = " ".join(timeline.notes)
            self.table = rank_table(timeline)
            self._show_waits(timeline)
            self.of = f"step {steps[-1]}" if works and len(steps) > 1 else ""
            self.bubble = timeline.bubble if works else None
            self.step_time = timeline.step_time if works else None

    def _forget(self, timeline: Timeline | None) -> None:
        """Another timeline is shown now, or spans of which there is none yet: what was known of the last one goes."""
        self._timeline = timeline
        if self.path_head:
            with self.hold_sync():
                self.path_shown, self.path_head, self.path_slack = False, {}, b""
        self.has_path = timeline is not None and has_path(timeline)

    def _find_path(self, _change: Any) -> None:
        """Find the critical path the first time that it is to be shown."""
        with self._lock:
            if self.path_shown and not self.path_head and self._timeline is not None and self.has_path:
                self.show_path(*path_of(self._timeline))

    def show_path(self, head: dict[str, Any], slack: bytes) -> None:
        """Show a critical path, as `pack_path` returns it, over the timeline."""
        with self.hold_sync():
            self.has_path, self.path_slack, self.path_head, self.path_shown = True, slack, head, True

    def _show_waits(self, timeline: Timeline) -> None:
        """Show for whom ranks wait in vain, with room for it."""
        begin = metrics.extent(metrics.active(timeline.spans))[0]
        self.waits = timeline.meta["waiting"] if waits_in_vain(timeline, begin) else []
        if self.waits:
            self.room = max(self.room, length_with_waits(timeline, begin))

    def expect_tracks(self, *, gpus: bool = False) -> None:
        """Keep a place for the tracks, of which nothing is known yet, so that nothing moves when they come."""
        self.tracks_head = expected_tracks(len(self.labels), gpus=gpus)

    def set_tracks(self, timeline: Timeline) -> None:
        """Show memory and GPUs of this timeline below the lanes, for the times that they show; from any thread."""
        head, values = pack_tracks(timeline)
        if head["tracks"]:
            with self.hold_sync():
                self.tracks, self.tracks_head = values, head

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        """Return the widget, together with what is shown where no kernel runs."""
        bundle = super()._repr_mimebundle_(**kwargs)
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle, {})
        with self._lock:
            timeline = self._timeline
            still = {} if timeline is None else static_bundle(timeline, self.title, memory=self._memory)
        return {**(data or {}), **still}, metadata


def show_path(path: CriticalPath) -> TimelineView:
    """Return a view of the path's step with the path over it."""
    assert isinstance(path.timeline, Timeline)
    view = TimelineView(path.timeline)
    view.show_path(*pack_path(path))
    return view
