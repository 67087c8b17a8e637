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
from mpkit.views.browser import slider_names
from mpkit.views.explorer.exploration import Exploration, ExplorerSetting
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

    >>> SliderNames("Times are in seconds.").words
    'Times are in seconds.'
    """

    _esm = slider_names()
    words = traitlets.Unicode().tag(sync=True)

    def __init__(self, words: str) -> None:
        super().__init__(words=words)


OWN = "your own"
PER_MICROBATCH = "seconds per micro-batch on one rank"
SLIDERS = {
    "ranks": ("ranks p", "number of ranks p", 1, 16, 1),
    "microbatches": ("micro-batches m", "number of micro-batches m", 1, 64, 1),
    "virtual_stages": (
        "stages per rank v",
        "stages per rank v, where the schedule allows any number",
        1,
        4,
        1,
    ),
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
        self.figures = ipywidgets.HTML()
        self.view = TimelineView()
        self.rows = ipywidgets.Textarea(layout={"width": "auto", "height": "110px"}, continuous_update=False)
        self.rows.add_class("mpkit-rows")
        self.apply = ipywidgets.Button(
            description="draw my rows", tooltip="simulate the rows as they stand here"
        )
        self.problem = ipywidgets.HTML()
        self.explored: Exploration | None = None
        self.stale = False
        self.schedule.observe(self._on_choice, names="value")
        self.apply.on_click(self._on_apply)
        self.box = ipywidgets.VBox(
            [self.schedule, self.figures, self.problem, self.view, self.rows, self.apply],
            layout={"flex": "1 1 380px", "min_width": "300px"},
        )

    def set(self, setting: ExplorerSetting) -> None:
        """Simulate with these degrees and times; if they cannot work, say why and mark the picture as stale."""
        chosen = self._own if self.schedule.value == OWN else self.schedule.value
        try:
            self.explored = replace(setting, schedule=chosen).simulate()
        except ValueError as error:
            self.problem.value = _problem(str(error))
            self._mark_stale()
            return
        self.problem.value = ""
        self.stale = False
        self.view.stale = False
        words = [
            f"<b>{escape(value)}</b> {escape(name)}"
            for name, value in self.explored.figures.items()
            if name not in ("bubble", "step")  # the timeline shows these two itself
        ]
        self.figures.value = " &nbsp;·&nbsp; ".join(words)
        self.rows.value = self.explored.text

    def draw(self, room: float) -> None:
        """Show the simulated timeline on an axis of `room` seconds."""
        if self.explored is not None and not self.stale:
            self.view.room = room
            self.view.replace(self.explored.timeline)

    def _mark_stale(self) -> None:
        """Grey out the picture, which belongs to an earlier setting, with its figures taken away."""
        self.stale = True
        self.figures.value = ""
        self.view.bubble = self.view.step_time = None
        self.view.note = STALE
        self.view.stale = True

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
        super().__init__(
            [
                ipywidgets.Box(
                    [*self.sliders.values(), SliderNames(UNITS)], layout={"flex_flow": "row wrap"}
                ),
                ipywidgets.Box(
                    [side.box for side in self.sides], layout={"flex_flow": "row wrap", "grid_gap": "16px"}
                ),
            ]
        )
        self._on_change()

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        """Return the widget, together with what is shown where no kernel runs."""
        bundle = super()._repr_mimebundle_(**kwargs)
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle, {})
        shown = {side.schedule.value: side.explored.timeline for side in self.sides if side.explored}
        still = compare_timelines([*shown.items()])
        fallback = {"text/plain": str(still), "text/html": image(partial(comparison_svg, still), str(still))}
        return {**(data or {}), **fallback}, metadata

    def _on_change(self) -> None:
        setting = ExplorerSetting(**{name: slider.value for name, slider in self.sliders.items()})
        for side in self.sides:
            side.set(setting)
        drawn = [side.explored.timeline.step_time for side in self.sides if side.explored and not side.stale]
        room = max(drawn, default=0.0)
        for side in self.sides:
            side.draw(room)


def _slider(name: str, value: float) -> Any:
    words, tooltip, least, most, step = SLIDERS[name]
    make = ipywidgets.IntSlider if isinstance(step, int) else ipywidgets.FloatSlider
    style, layout = {"description_width": "130px"}, {"width": "350px"}
    most = max(most, value)
    return make(
        value=value,
        min=least,
        max=most,
        step=step,
        description=words,
        tooltip=tooltip,
        style=style,
        layout=layout,
    )


def _problem(words: str) -> str:
    look = f"color:{STATUS['bad']};{WHOLE_WORDS}"
    return f'<pre style="{look}">{escape(words)}</pre>'
