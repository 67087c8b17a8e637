"""SliderNames: a line of words below ipywidgets' sliders that also tells screen readers what each of them sets."""

from __future__ import annotations

from mpkit.common.missing_packages import needs_notebook
from mpkit.views.browser import slider_names

try:
    import anywidget
    import traitlets
except ImportError as error:
    raise needs_notebook("the schedule explorer", error) from error

__all__ = ["SliderNames"]


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
