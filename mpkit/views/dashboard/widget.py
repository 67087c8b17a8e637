"""The dashboard that a Run shows in a notebook: progress, timeline, memory, a stop button, the ranks' output.

    Dashboard      the widgets, filled from any thread by methods that take the data they need
    RunView        observes a Run, and fills a Dashboard
    show_run       makes both and displays them
    show_waiting   displays the empty lanes of a run that is being prepared, which `show_run` then fills

When the run ends, the output is replaced by one that contains pictures, too, so that a saved notebook shows them
without a kernel.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from mpkit.common.arrays import Array
from mpkit.common.display import image
from mpkit.common.missing_packages import needs_notebook
from mpkit.timeline.idleness import bubble_words
from mpkit.timeline.timeline import Timeline
from mpkit.trace.metrics import Metrics
from mpkit.trace.proof import Proof
from mpkit.views.chart.svg import chart_svg
from mpkit.views.dashboard import html as parts
from mpkit.views.drawing.lanes import FOLDED
from mpkit.views.drawing.pace import Pace
from mpkit.views.memory.charts import memory_over_time
from mpkit.views.theme import MARGIN
from mpkit.views.timeline.picture import picture
from mpkit.views.timeline.svg import summary, svg
from mpkit.views.timeline.text import text
from mpkit.views.timeline.tracks import has_tracks
from mpkit.views.timeline.widget import TimelineView

try:
    import ipywidgets
except ImportError as error:
    raise needs_notebook("a run's dashboard", error) from error

if TYPE_CHECKING:
    from mpkit.launch.session.cluster import Cluster
    from mpkit.launch.session.execution import Execution
    from mpkit.plan.plan import Plan


SPEAK = 10.0
"""The least seconds between two lines that a screen reader is told about steps and losses."""

LEGIBLE = 8
"""Steps up to which one picture shows all of them, as `seen.js` does."""

LINES = 500
"""The number of lines of the ranks' output that stay in view."""


class Dashboard:
    """The widgets of a run of so many steps (None: unknown). All methods may be called from any thread."""

    def __init__(self, title: str, ranks: int, steps: int | None) -> None:
        self.title, self.steps = title, steps
        self._lock = threading.RLock()
        self._on_stop: Callable[[], object] | None = None
        self._theory: float | None = None
        self._lines: list[str] = []
        self._static: tuple[str, str] | None = None  # text/html and text/plain, once the run is over
        self._handle: Any = None
        self._losses: list[float] = []
        self._step = 0
        self._started = False
        self._proof: Proof | None = None
        self._head = ipywidgets.HTML(parts.head(title, parts.starting_html(ranks)))
        self._bar = ipywidgets.IntProgress(value=0, max=max(steps or 1, 1), layout={"width": "220px"})
        if steps is None:
            self._bar.layout.display = "none"
        self._words = ipywidgets.HTML(parts.progress(0, steps, []))
        self._stop = ipywidgets.Button(
            description="Stop", icon="stop", layout={"width": "110px"}, tooltip=parts.STOP_HINT, disabled=True
        )
        self._stop.on_click(self._on_press)
        self.timeline = TimelineView(labels=[f"rank {rank}" for rank in range(ranks)])
        self.timeline.live = True
        self._trouble, self._output = ipywidgets.HTML(), ipywidgets.HTML()
        # Its place is kept from the start, so that nothing below it moves when the first losses come.
        self._charts, self._charted = ipywidgets.HTML(parts.charts([], 0, Metrics(), steps)), ""
        self.timeline.expect_tracks()
        self._said = Pace(SPEAK)
        self._stop.add_class("mpkit-stop")
        line = ipywidgets.HBox([self._bar, self._stop, self._words], layout={"align_items": "center"})
        self.widget = ipywidgets.VBox(
            [self._head, line, self._trouble, self.timeline, self._charts, self._output]
        )
        self.widget.add_class("mpkit-run")

    def begin(
        self, so_far: Timeline, on_stop: Callable[[], object] | None, theory: float | None = None
    ) -> None:
        """Say what is known of a run as soon as it is launched.

        Args:
            so_far: its timeline, which may have no spans yet.
            on_stop: called, in a thread of its own, when the stop button is pressed; None: there is no button.
            theory: the bubble according to the formula, to show next to the measured one.
        """
        self._on_stop, self._theory = on_stop, theory
        self._stop.disabled = False
        if on_stop is None:
            self._stop.layout.display = "none"
        with self.timeline.hold_sync():
            self.timeline.begin(so_far)
            self.timeline.note = self._note()
            self.timeline.expect_tracks(gpus="sampled_gpus" in so_far.meta)

    # ---- filling ------------------------------------------------------------------------------------------

    def add_spans(self, spans: Array, names: Sequence[str]) -> None:
        """Add operations, in the form that `TimelineView.append` takes."""
        if not self._started and len(spans):
            self._started = True
            self._head.value = parts.head(self.title, "running", self._proof)
        self.timeline.append(spans, names)

    def set_proof(self, proof: Proof) -> None:
        """Show what is known of the run's equality with serial training."""
        if proof != self._proof:
            self._proof = proof
            if self._started and self._static is None:
                self._head.value = parts.head(self.title, "running", proof)

    def set_progress(self, step: int, losses: Sequence[float]) -> None:
        """Show how far the run has come: the number of finished steps, and the loss of each."""
        with self._lock:
            self._losses, self._step = list(losses), step
            self._bar.value = min(step, self._bar.max)
            self._words.value = parts.progress(step, self.steps, losses)
            if step:
                self._said(lambda: self._say(step))

    def set_charts(self, losses: Sequence[float], first_step: int, metrics: Metrics) -> None:
        """Show the loss and what was logged, by step."""
        charted = parts.charts(losses, first_step, metrics, self.steps)
        with self._lock:
            self._charted = charted
            self._charts.value = self._charted

    def set_memory(self, timeline: Timeline) -> None:
        """Show memory and samples of GPUs so far."""
        if has_tracks(timeline):
            self.timeline.set_tracks(timeline)

    def add_output(self, line: str) -> None:
        """Show a line that a rank printed, with the rank's label."""
        with self._lock:
            self._lines += line.splitlines() or [""]
            del self._lines[:-LINES]
            self._output.value = parts.output(self._lines)

    def finish(self, timeline: Timeline, message: str = "", *, status: str = "finished") -> None:
        """End the dashboard: show the whole timeline, and keep pictures for readers without a kernel."""
        with self._lock:
            self.timeline.replace(timeline)
            self.timeline.live = False
            note = self._note(timeline)
            self.timeline.note = " ".join([note, *timeline.notes]).strip()
            if has_tracks(timeline):
                self.set_memory(timeline)
            else:
                self.timeline.tracks_head = {}
            self._head.value = parts.head(self.title, status, self._proof)
            self._trouble.value = parts.trouble(message)
            self._bar.bar_style = {"finished": "success", "failed": "danger"}.get(status, "warning")
            self._stop.layout.visibility = "hidden"  # keeps its place: what stands beside it does not move
            told = [f"{self.title}: {status}.", message.partition("\n")[0]]
            self.timeline.said = " ".join(filter(None, told))
            words = self._words.value = parts.progress(self._step, self.steps, self._losses)
            head = parts.head(self.title, status, self._proof, wraps=True)
            above = f'<div style="margin-left:{MARGIN:g}px">{head}</div>{words}{parts.trouble(message)}{self._charted}'
            shown = f"{above}{_pictures(timeline, note)}{parts.output(self._lines)}"
            drawn = text(timeline, 100, fold=timeline.world_size > FOLDED)
            self._static = shown, "\n".join(filter(None, [f"{self.title}: {status}", message, drawn]))
            if self._handle is not None:
                self._handle.update(self.mimebundle(), raw=True)

    # ---- showing ------------------------------------------------------------------------------------------

    def withdraw(self) -> None:
        """Take the dashboard out of the output: its run was rejected before it began.

        The widgets are not closed, since a front end that is just drawing them would report an error.
        """
        if self._handle is not None:
            self._handle.update({"text/plain": ""}, raw=True)

    def show(self) -> None:
        """Display the dashboard here; the same output is replaced when the run ends."""
        from IPython.display import display

        if self._handle is not None:  # since the run was prepared
            return
        self._handle = display(self.mimebundle(), raw=True, display_id=True)

    def mimebundle(self) -> dict[str, Any]:
        """Return the widgets, together with what is shown where no kernel runs."""
        with self._lock:
            status = "running" if self._started else parts.starting_html(len(self.timeline.labels))
            static = self._static or (
                parts.head(self.title, status, self._proof),
                f"{self.title}: running, in a widget that this front end does not show",
            )
            view = {"version_major": 2, "version_minor": 0, "model_id": self.widget.model_id}
            told = {"text/html": static[0], "text/plain": static[1]}
            return {"application/vnd.jupyter.widget-view+json": view, **told}

    def _note(self, timeline: Timeline | None = None) -> str:
        return "" if self._theory is None else bubble_words(self._theory, timeline)

    def _say(self, step: int) -> None:
        """Tell a screen reader how far the run has come."""
        of = f" of {self.steps}" if self.steps is not None else ""
        loss = f", loss {self._losses[-1]:.4f}" if self._losses else ""
        self.timeline.said = f"step {step}{of}{loss}"

    def _on_press(self, _button: object) -> None:
        self._stop.disabled = True
        self._stop.description = "Stopping"
        # Not in this thread: it is the kernel's, or one that the kernel must not wait for.
        assert self._on_stop is not None
        threading.Thread(target=self._on_stop, name="mpkit-stop", daemon=True).start()


def _pictures(timeline: Timeline, note: str) -> str:
    """Return timeline and memory as images, for a saved notebook: of a long run the last step."""
    fold = timeline.world_size > FOLDED
    step = timeline.steps[-1] if len(timeline.steps) > LEGIBLE else None
    words = summary(picture(timeline, step, fold=fold))
    drawn = image(partial(svg, timeline, step=step, fold=fold), words) + parts.remark(note)
    if len(timeline.held):
        memory = memory_over_time(timeline if step is None else timeline.step(step))
        drawn += image(partial(chart_svg, memory), "Memory by GPU over time")
    return drawn


class RunView:
    """Observes a training or a watched program (`Execution.look`), and fills a Dashboard."""

    def __init__(self, run: Execution, board: Dashboard | None = None) -> None:
        self.run = run
        self.cell_id = _cell_id()
        self._feed, self._cell = run.feed(), _cell()
        self._span_pace, self._loss_pace, self._memory_pace = Pace(0.0), Pace(0.3), Pace(0.4, first=0.3)
        so_far = self._feed.timeline()
        self.dashboard = board or Dashboard(run.title, so_far.world_size, run.steps)
        self.dashboard.begin(so_far, None if run.blocks else run.stop, run.theory)

    def was_before(self, other: RunView) -> bool:
        """Return whether its cell was run in an earlier execution than that of another view."""
        return self._cell < other._cell

    def tick(self, run: Execution) -> None:
        """Show what is new."""
        self._span_pace(lambda: self.dashboard.add_spans(self._feed.advance(), self._feed.names))
        self._loss_pace(lambda: self._progress(run))
        self._memory_pace(lambda: self.dashboard.set_memory(self._feed.timeline()))

    def output(self, line: str) -> None:
        """Show a line that a rank printed."""
        self.dashboard.add_output(line)

    def end(self, run: Execution) -> None:
        """Show the whole run, which has finished, been stopped, or failed."""
        self._progress(run)
        self.dashboard.finish(run.timeline(), str(run.error or ""), status=run.status)

    def mimebundle(self) -> dict[str, Any]:
        """Return what displaying the Run again shows; in the cell that shows it already, only a short text."""
        if _cell() == self._cell:
            return {"text/plain": f"<Run: {self.dashboard.title}; shown above>"}
        return self.dashboard.mimebundle()

    def _progress(self, run: Execution) -> None:
        if isinstance(proof := getattr(run, "proof", None), Proof):  # a watched program has none
            self.dashboard.set_proof(proof)
        losses = run.losses
        self.dashboard.set_progress(run.first_step + len(losses), losses)
        self.dashboard.set_charts(losses, run.first_step, run.metrics)


def _cell() -> int:
    """Return the execution count of the running cell; -1 outside IPython."""
    from IPython import get_ipython

    shell = get_ipython()
    return -1 if shell is None else int(shell.execution_count)


def _cell_id() -> str:
    """Return the front end's id of the running cell, which is the same in every execution; "" if there is none."""
    from IPython import get_ipython

    parent: dict[str, Any] = getattr(get_ipython(), "get_parent", dict)() or {}
    return str(parent.get("metadata", {}).get("cellId", ""))


def show_waiting(cluster: Cluster, plan: Plan, steps: int) -> Dashboard:
    """Display the empty lanes of a run that is being prepared, and return the dashboard for `show_run`."""
    title = plan.describe().split(". ")[0].rstrip(".")
    board = Dashboard(title, cluster.ranks, steps)
    board.show()
    return board


def show_run(run: Execution, board: Dashboard | None = None) -> RunView:
    """Display a run's dashboard here, and return its view, which has to be notified of the run's progress.

    If this cell was run before, the front end has cleared its output. A run from then that is still going, on a cluster
    that has been replaced since, could no longer be seen or stopped by anyone, so it is stopped here.
    """
    from IPython import get_ipython

    view = RunView(run, board)
    shown: WeakSet[RunView] = vars(get_ipython()).setdefault("_mpkit_views", WeakSet())
    for earlier in [each for each in shown if each.cell_id and each.cell_id == view.cell_id]:
        if earlier.was_before(view) and not earlier.run.done:
            earlier.run.stop()
            print("mpkit: the run that this cell started before was stopped, since its view is gone")
    shown.add(view)
    view.dashboard.show()
    return view
