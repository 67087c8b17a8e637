"""The widget of `mk.explore`: the section "Try it" of a page once for each schedule (`browser/explore.js`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from mpkit.common.display import image
from mpkit.common.missing_packages import needs_notebook
from mpkit.views.browser import TRIAL, css, esm
from mpkit.views.page.trial import controls, pack_schedules
from mpkit.views.results.comparison import comparison_svg
from mpkit.views.timeline.wire import look

if TYPE_CHECKING:
    from mpkit.timeline.comparison import Comparison

try:
    import anywidget
    import traitlets
except ImportError as error:
    raise needs_notebook("the schedule explorer", error) from error


class Explorer(anywidget.AnyWidget):
    """Schedules side by side, on one time axis; see `mpkit.explore`."""

    _esm = esm((*TRIAL, "explore"), "explorer")
    _css = css()
    sections = traitlets.List(traitlets.Unicode()).tag(sync=True)  # the controls of each side as HTML
    data = traitlets.Unicode().tag(sync=True)  # the schedules that the script plays
    look = traitlets.Dict().tag(sync=True)  # colours and words

    def __init__(self, schedules: Sequence[str], setting: Mapping[str, float], still: Comparison) -> None:
        place = f"explore-{uuid4().hex}"  # a notebook may show several: labels find their controls by ids
        sections = [controls(f"{place}-{i}", name, setting) for i, name in enumerate(schedules)]
        super().__init__(sections=sections, data=pack_schedules(), look=look())
        self.still = still  # shown where no script runs

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        """Return the widget, together with what is shown where no kernel runs."""
        bundle = super()._repr_mimebundle_(**kwargs)
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle, {})
        words = str(self.still)
        fallback = {"text/plain": words, "text/html": image(partial(comparison_svg, self.still), words)}
        return {**(data or {}), **fallback}, metadata
