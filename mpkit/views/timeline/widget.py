"""The live timeline: an anywidget canvas, fed in batches.

    append   from any thread, as often as one likes; spans are collected
    flush    at most every PAUSE seconds, all collected spans are sent as one binary message
    hello    a browser that (re)loads reports how much it has, and is sent the rest

Until a browser has said hello, messages may have been lost while its page loaded, and a kernel that is busy with a
cell cannot receive its hello. Until then, a copy of everything is therefore kept in the trait `backlog`, whose
contents are not lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from mpkit.common.missing_packages import needs_notebook
from mpkit.common.units import percent
from mpkit.timeline import metrics
from mpkit.timeline.timeline import Timeline
from mpkit.views.browser import css, esm
from mpkit.views.drawing.clock_words import CLOCKS, clock_words
from mpkit.views.drawing.lanes import LaneGroup, groups_of, groups_trait, rank_label
from mpkit.views.timeline.bubble_count import BubbleCounter
from mpkit.views.timeline.critical_path import has_path, pack_path, path_of
from mpkit.views.timeline.stages import layers_trait
from mpkit.views.timeline.svg import static_bundle
from mpkit.views.timeline.table import rank_table
from mpkit.views.timeline.tracks import expected_tracks, pack_tracks
from mpkit.views.timeline.waits_in_vain import length_with_waits, waits_in_vain
from mpkit.views.timeline.wire import SpanBatches, look

if TYPE_CHECKING:
    from mpkit.timeline.dependencies.critical_path import CriticalPath

try:
    import anywidget
    import traitlets
except ImportError as error:
    raise needs_notebook("the live timeline", error) from error

__all__ = ["TimelineView", "show_path"]

PAUSE = 0.08
"""The least seconds between two messages. One message per span would exceed the server's limit of messages."""

WATCHABLE = 1.0
"""Seconds: the figures of a step that takes longer are updated while it goes on; faster ones would only flicker."""

BACKLOG = 200_000
"""The most spans in the backlog; beyond that, a browser that missed something recovers only by saying hello."""


class TimelineView(anywidget.AnyWidget):
    """A timeline to look at in a notebook: zoom by Ctrl and the wheel, pan by dragging, details by hovering.

    Args:
        timeline: what to show; None for one that is filled by `append`.
        labels: the labels of the lanes, one per rank, if no timeline is given.
        title: a heading.
        clock: "measured", "virtual" or "simulated", if no timeline is given.
        room: see below.
        groups: the groups of the ranks, if no timeline is given.
        layers: the layers of each stage (`layers_trait`), if no timeline is given.
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
        stale: whether the picture is of something that has changed since; it is greyed out.
        has_path: whether a critical path can be shown, which is found when `path_shown` is set.
        path_shown: whether it is shown.
        path_head, path_slack: the path, as `pack_path` has it.
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
    stale = traitlets.Bool(False).tag(sync=True)
    tracks = traitlets.Bytes(b"").tag(sync=True)
    tracks_head = traitlets.Dict().tag(sync=True)
    has_path = traitlets.Bool(False).tag(sync=True)
    path_shown = traitlets.Bool(False).tag(sync=True)
    path_head = traitlets.Dict().tag(sync=True)
    path_slack = traitlets.Bytes(b"").tag(sync=True)
    table = traitlets.Dict().tag(sync=True)
    look = traitlets.Dict().tag(sync=True)
    backlog = traitlets.Bytes(b"").tag(sync=True)
    backlog_head = traitlets.Dict().tag(sync=True)

    def __init__(
        self,
        timeline: Timeline | None = None,
        *,
        labels: Sequence[str] = (),
        title: str = "",
        clock: str = "virtual",
        room: float = 0.0,
        groups: Sequence[LaneGroup] = (),
        layers: Sequence[dict[str, Any]] = (),
        widest: str = "",
        memory: bool = False,
    ) -> None:
        super().__init__(
            look=look(), title=title, labels=list(labels), clock=CLOCKS.get(clock, clock), room=room, widest=widest,
            groups=groups_trait(groups, len(labels)), layers=list(layers),
        )  # fmt: skip
        self._lock = threading.RLock()
        self._batches = SpanBatches()
        self._counter = BubbleCounter(max(len(labels), 1))
        self._timeline: Timeline | None = None
        self._memory = memory
        self._sent = self._names_sent = 0
        self._changed: set[int] = set()  # steps whose extents grew since they were last sent
        self._flushed = 0.0
        self._timer: threading.Timer | None = None
        self._newest: tuple[int | None, float] = (None, 0.0)  # the newest step, and since when
        self._heard = False
        self._in_backlog = 0
        self.on_msg(self._hear)
        self.observe(self._find_path, "path_shown")
        if timeline is not None:
            self.replace(timeline)
            if memory or len(timeline.device_samples):
                self.set_tracks(timeline)

    def begin(
        self, labels: Sequence[str], groups: Sequence[LaneGroup], layers: Sequence[dict[str, Any]]
    ) -> None:
        """Name the lanes of a view that was displayed before anything was known of them."""
        self._counter = BubbleCounter(max(len(labels), 1))
        self.labels, self.groups, self.layers = list(labels), groups_trait(groups, len(labels)), list(layers)

    # ---- feeding --------------------------------------------------------------------------------------------

    def append(self, spans: npt.NDArray[Any], names: Sequence[str] = ("",)) -> None:
        """Add spans, (n,) of `SPAN`, from any thread. They are shown within a tenth of a second.

        Args:
            spans: the spans; their `cause` counts all spans appended so far, from 0.
            names: all strings so far that spans refer to, not only the new ones.
        """
        with self._lock:
            if not len(spans):
                return
            self._forget(None)
            self._batches.add(spans, names)
            self._changed.update(self._counter.add(spans))
            wait = self._flushed + PAUSE - time.monotonic()
            if wait <= 0:
                self.flush()
            elif self._timer is None:
                self._timer = threading.Timer(wait, self.flush)
                self._timer.daemon = True
                self._timer.start()

    def replace(self, timeline: Timeline) -> None:
        """Show this timeline instead of everything shown so far."""
        with self._lock:
            self._forget(timeline)
            self._batches.reset()
            self._counter = BubbleCounter(timeline.world_size)
            self._batches.add(timeline.spans, timeline.names)
            self._changed = set(self._counter.add(timeline.spans))
            self._sent = self._names_sent = self._in_backlog = 0
            works = len(metrics.work(timeline.spans)) > 0
            with self.hold_sync():
                self.labels = [rank_label(timeline, rank) for rank in range(timeline.world_size)]
                self.groups = groups_trait(groups_of(timeline), timeline.world_size)
                self.layers = layers_trait(timeline)
                self.clock = clock_words(timeline)
                if hardware := timeline.meta.get("hardware", "") if timeline.clock != "simulated" else "":
                    self.clock += f", on {hardware}"
                self.note = " ".join(timeline.notes)
                self.table = rank_table(timeline)
                self._show_waits(timeline)
            self.flush()
            with self.hold_sync():
                steps = timeline.steps
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
        """Keep a place for the tracks, of which nothing is known yet, so that nothing moves when they come.

        Args:
            gpus: whether the ranks' GPUs are sampled.
        """
        self.tracks_head = expected_tracks(len(self.labels), gpus=gpus)

    def set_tracks(self, timeline: Timeline) -> None:
        """Show memory and GPUs of this timeline below the lanes, for the times that they show; from any thread."""
        head, values = pack_tracks(timeline)
        if head["tracks"]:
            with self.hold_sync():
                self.tracks, self.tracks_head = values, head

    def flush(self) -> None:
        """Send the collected spans now."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            self._flushed = time.monotonic()
            if self._sent == self._batches.count and self._sent:
                return
            # The backlog first: a page that is still loading builds on it when the message arrives.
            self._keep_backlog()
            steps = {step: self._counter.extents[step] for step in sorted(self._changed)}
            for head, buffer in self._batches.messages_since(self._sent, steps, self._names_sent):
                self.send(head, [buffer])
            self._sent, self._names_sent = self._batches.count, len(self._batches.names)
            self._changed.clear()
            if self._timeline is None:
                self._count()

    def _count(self) -> None:
        """Update the figures: of the step in progress if it is slow enough to watch, else of the last complete one."""
        step, now = max(self._counter.extents, default=None), time.monotonic()
        if step != self._newest[0]:
            self._newest = (step, now)
        complete = self._counter.complete
        so_far = complete is None or (complete != step and now - self._newest[1] > WATCHABLE)
        shown = step if so_far else complete
        with self.hold_sync():
            self.of = "" if shown is None else f"step {shown}{' so far' * so_far}" if shown >= 0 else "so far"
            self.bubble = self._counter.bubble(shown)
            self.step_time = self._counter.step_time(shown)
            idle = [percent(share) for share in self._counter.idle_shares(shown)]
            rows = [[label, share] for label, share in zip(self.labels, idle, strict=False)]
            self.table = {"head": ["", f"idle, {self.of}"], "rows": rows}

    # ---- browsers -------------------------------------------------------------------------------------------

    def _hear(self, _widget: Any, content: Any, _buffers: Any) -> None:
        """Handle a browser's hello, which says what it has: send the rest."""
        if not isinstance(content, dict) or content.get("type") != "hello":
            return
        with self._lock:
            self._heard = True
            self.backlog, self.backlog_head = b"", {}
            known = content.get("epoch") == self._batches.epoch
            have = int(content.get("have", 0)) if known else 0
            if have < self._batches.count:
                for head, buffer in self._batches.messages_since(have, self._counter.extents):
                    self.send(head, [buffer])

    def _keep_backlog(self) -> None:
        """Keep a copy of all spans until a browser has said hello; renewed whenever they have grown by a quarter."""
        count = self._batches.count
        if self._heard or count > BACKLOG or count < 1.25 * self._in_backlog:
            return
        ((head, buffer),) = self._batches.messages_since(0, self._counter.extents, most=BACKLOG)
        self._in_backlog = count
        with self.hold_sync():
            self.backlog, self.backlog_head = buffer, head

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        """Return the widget, together with what is shown where no kernel runs."""
        bundle = super()._repr_mimebundle_(**kwargs)
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle, {})
        with self._lock:
            fallback = (
                static_bundle(self._timeline, self.title, memory=self._memory)
                if self._timeline is not None
                else {}
            )
        return {**(data or {}), **fallback}, metadata


def show_path(path: CriticalPath) -> TimelineView:
    """Return a view of the path's step with the path over it."""
    assert isinstance(path.timeline, Timeline)
    view = TimelineView(path.timeline)
    view.show_path(*pack_path(path))
    return view
