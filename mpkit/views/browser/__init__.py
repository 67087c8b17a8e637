"""The half that runs in a browser: one ES module without a build step, in files of one concept each.

    words.js     numbers formatted for people
    store.js     spans in typed arrays, batches decoded
    raster.js    a row of boxes on the canvas
    lanes.js     which ranks have lanes, and where; groups of them, folded or not
    seen.js      which times are seen: all, a window, a step, a run's newest steps
    chart.js     what lies under a point; drawing one frame
    overview.js  the whole run as a strip, with a frame around what is seen
    tip.js       what is under the pointer, in words
    walk.js      from operation to operation by keys, said to a screen reader
    pointer.js   wheel, drag, hover, keys
    panel.js     the chart with figures, legend and table
    widget.js    the two entry points: a live widget, and a page that holds its data

They are concatenated in this order, and so need not import each other. Separate modules:

    memory.js    the memory chart of a run, drawn by plotly
    sortable.js  a table that the reader sorts
"""

from __future__ import annotations

from importlib.resources import files

__all__ = ["FILES", "css", "esm", "memory_esm", "sortable"]

FILES = (
    "words",
    "store",
    "raster",
    "lanes",
    "seen",
    "chart",
    "overview",
    "tip",
    "walk",
    "pointer",
    "panel",
    "widget",
)


def esm() -> str:
    """Return the module's source, for a widget's `_esm` or for `<script type="module">`.

    >>> esm().count("export default")
    1
    """
    here = files(__name__)
    return "\n".join((here / f"{name}.js").read_text(encoding="utf-8") for name in FILES)


def css() -> str:
    """Return the style sheet that belongs to it."""
    return (files(__name__) / "timeline.css").read_text(encoding="utf-8")


def memory_esm() -> str:
    """Return the source of the memory chart's module."""
    return (files(__name__) / "memory.js").read_text(encoding="utf-8")


def sortable() -> tuple[str, str]:
    """Return the source of the sortable table's module, and its style sheet."""
    here = files(__name__)
    return (here / "sortable.js").read_text(encoding="utf-8"), (here / "sortable.css").read_text(
        encoding="utf-8"
    )
