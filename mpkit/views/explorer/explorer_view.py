"""The schedule explorer: sliders and dropdowns above, a timeline with its figures and its rows for each schedule.

set     a slider moved: each side is simulated and drawn again
edit    the text of a side was edited and applied: it becomes a schedule of its own; if it cannot work, the picture of
        the one before is marked as stale
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from mpkit.common.display import image
from mpkit.common.missing_packages import needs_notebook
from mpkit.common.safe_text import escape
from mpkit.plan.schedule.catalogue import SCHEDULES
from mpkit.timeline.comparison import compare_timelines
from mpkit.timeline.timeline import Timeline
from mpkit.views.browser import slider_names
from mpkit.views.explorer.setting import ExplorerSetting
from mpkit.views.results.comparison import comparison_svg
from mpkit.views.theme import STATUS, WHOLE_WORDS
from mpkit.views.timeline.widget import TimelineView

__all__ = ["Explorer", "SliderNames"]

try:
    import anywidget
    import ipywidgets
    import traitlets
except ImportError as error:
    raise needs_notebook("the schedule explorer", error) from error


class SliderNames(anywidget.AnyWidget):
    """Words below the sliders in the same box; each slider is named by its tooltip, or else its description.

    Without it, ipywidgets' sliders are read out as "slider, 8": their descriptions are not tied to them.

    >>> SliderNames(words="Times are in seconds.").words
    'Times are in seconds.'
    """

    _esm = slider_names()
    words = traitlets.Unicode().tag(sync=True)


OWN = "your own"
PER_MICROBATCH = "seconds per micro-batch on one rank"
STAGES = "stages per rank v, where the schedule allows any number"
SLIDERS = {
    "ranks": ("ranks p", "number of ranks p", 1, 16, 1),
    "microbatches": ("micro-batches m", "number of micro-batches m", 1, 64, 1),
    "virtual_stages": ("stages per rank v", STAGES, 1, 4, 1),
    "forward": ("forward F, s", f"forward F, {PER_MICROBATCH}", 0.0, 4.0, 0.1),
    "input_grad": ("input grad I, s", f"gradients of the inputs I, {PER_MICROBATCH}", 0.0, 4.0, 0.1),
    "weight_grad": ("weight grad W, s", f"gradients of the weights W, {PER_MICROBATCH}", 0.0, 4.0, 0.1),
    "hop": ("message, s", "message, seconds from one stage to the next", 0.0, 2.0, 0.05),
}
"""By setting: its label, what it is in words, minimum, maximum and step."""

UNITS = (
    "All times are in seconds: F, I and W per micro-batch on one rank, a message from one stage to the next, and the "
    "step time from the step's first action to its last. A backward in one piece takes I + W."
)
STALE = "The picture is that of the last schedule that worked, not of what is set now."
ROW = {"flex_flow": "row wrap", "grid_gap": "16px"}


class Side:
    """One schedule: its dropdown, figures, timeline, rows.

    While what is set cannot work, the side is `stale`: it shows the last schedule that did.

    Args:
        setting: the initial settings.
        redraw: called after the schedule was changed.
    """

    def __init__(self, setting: ExplorerSetting, redraw: Callable[[], None]) -> None:
        self._redraw = redraw
        named = setting.schedule in SCHEDULES
        self._own = "" if named else setting.schedule
        self.schedule = ipywidgets.Dropdown(
            options=[*SCHEDULES, OWN], value=setting.schedule if named else OWN, description="schedule"
        )
        self.figures, self.problem, self.view = ipywidgets.HTML(), ipywidgets.HTML(), TimelineView()
        self.rows = ipywidgets.Textarea(layout={"width": "auto", "height": "110px"}, continuous_update=False)
        self.rows.add_class("mpkit-rows")
        self.apply = ipywidgets.Button(
            description="draw my rows", tooltip="simulate the rows as they stand here"
        )
        self.timeline: Timeline | None = None
        self.schedule.observe(self._on_choice, names="value")
        self.apply.on_click(self._on_apply)
        self.box = ipywidgets.VBox(
            [self.schedule, self.figures, self.problem, self.view, self.rows, self.apply],
            layout={"flex": "1 1 380px", "min_width": "300px"},
        )

    @property
    def stale(self) -> bool:
        """Whether the picture is of an earlier setting."""
        return bool(self.problem.value)

    def set(self, setting: ExplorerSetting) -> None:
        """Simulate with these degrees and times; if they cannot work, say why, and grey out the picture."""
        chosen = self._own if self.schedule.value == OWN else self.schedule.value
        try:
            self.timeline, figures, self.rows.value = replace(setting, schedule=chosen).simulate()
            self.problem.value = ""
        except ValueError as error:
            look, figures = f"color:{STATUS['bad']};{WHOLE_WORDS}", {}
            self.problem.value = f'<pre style="{look}">{escape(str(error))}</pre>'
            self.view.bubble = self.view.step_time = None
            self.view.note = STALE
        self.view.stale = self.stale
        words = (f"<b>{escape(value)}</b> {escape(name)}" for name, value in figures.items())
        self.figures.value = " &nbsp;·&nbsp; ".join(words)

    def draw(self, room: float) -> None:
        """Show the simulated timeline on an axis of `room` seconds."""
        if self.timeline is not None and not self.stale:
            self.view.room = room
            self.view.replace(self.timeline)

    def _on_choice(self, _: Any) -> None:
        if self.schedule.value == OWN and not self._own:
            self._own = self.rows.value
        self._redraw()

    def _on_apply(self, _: Any) -> None:
        self._own = self.rows.value
        if self.schedule.value == OWN:
            self._redraw()
        else:
            self.schedule.value = OWN  # this redraws, too


class Explorer(ipywidgets.VBox):
    """The explorer's widget; see `mpkit.explore`.

    Attributes:
        sliders: the sliders, by the name of the setting.
        sides: the sides, one per schedule.
    """

    def __init__(self, settings: Sequence[ExplorerSetting]) -> None:
        self.sliders = {name: _slider(name, getattr(settings[0], name)) for name in SLIDERS}
        self.sides = [Side(setting, self._on_change) for setting in settings]
        for slider in self.sliders.values():
            slider.observe(lambda _: self._on_change(), names="value")
        controls = ipywidgets.Box(
            [*self.sliders.values(), SliderNames(words=UNITS)], layout={"flex_flow": "row wrap"}
        )
        super().__init__([controls, ipywidgets.Box([side.box for side in self.sides], layout=ROW)])
        self._on_change()

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        """Return the widget, together with what is shown where no kernel runs."""
        bundle = super()._repr_mimebundle_(**kwargs)
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle, {})
        still = compare_timelines(
            [(side.schedule.value, side.timeline) for side in self.sides if side.timeline]
        )
        fallback = {"text/plain": str(still), "text/html": image(partial(comparison_svg, still), str(still))}
        return {**(data or {}), **fallback}, metadata

    def _on_change(self) -> None:
        setting = ExplorerSetting(**{name: slider.value for name, slider in self.sliders.items()})
        for side in self.sides:
            side.set(setting)
        drawn = [side.timeline.step_time for side in self.sides if side.timeline and not side.stale]
        for side in self.sides:
            side.draw(max(drawn, default=0.0))


def _slider(name: str, value: float) -> Any:
    words, tooltip, least, most, step = SLIDERS[name]
    make = ipywidgets.IntSlider if isinstance(step, int) else ipywidgets.FloatSlider
    return make(
        value=value, min=least, max=max(most, value), step=step, description=words, tooltip=tooltip,
        style={"description_width": "130px"}, layout={"width": "350px"},
    )  # fmt: skip
