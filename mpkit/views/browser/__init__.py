"""The half that runs in a browser: one ES module without a build step, in files of one concept each.

    words.js     numbers formatted for people
    store.js     spans in typed arrays, and the boxes of each row
    raster.js    a row of boxes on the canvas
    lanes.js     which ranks have lanes, and where; groups of them, folded or not
    seen.js      which times are seen: all, a window, a step, a run's newest steps
    links.js     what goes together on different ranks: messages, collectives; their arrows
    path.js      the critical path over the lanes
    chart.js     what lies under a point; drawing one frame
    overview.js  the whole run as a strip, with a frame around what is seen
    tip.js       what is under the pointer, in words
    walk.js      from operation to operation by keys, said to a screen reader
    search.js    operations found by words, and the rest paler
    pointer.js   wheel, drag, hover, keys
    track.js     below the lanes, on their time axis: a lane per rank with what it held of memory
    tracks.js    all of these, from the bytes that the kernel sends
    panel.js     the chart with figures, legend and table
    widget.js    the two entry points: a live widget, and a page that holds its data

They are concatenated in this order, and so need not import each other. Two more follow them on pages with schedules
to try:

    played.js    a schedule on a clock: when each action can run
    own.js       a schedule that the reader writes, checked
    trial.js     sliders, and the panel that shows what they set
    explore.js   two of these in a notebook
"""

from importlib.resources import files

from mpkit.views.theme import substitute_theme

__all__ = ["FILES", "TRIAL", "css", "esm"]

FILES = (
    "words",
    "store",
    "raster",
    "lanes",
    "seen",
    "links",
    "path",
    "chart",
    "overview",
    "tip",
    "walk",
    "search",
    "pointer",
    "track",
    "tracks",
    "panel",
    "widget",
)

TRIAL = ("played", "own", "trial")


def esm(more: tuple[str, ...] = (), widget: str = "timelineWidget") -> str:
    """Return the module's source, for a widget's `_esm` or for `<script type="module">`.

    Args:
        more: files that follow the others.
        widget: the entry point of an anywidget, which the module exports.

    >>> esm().count("export default")
    1
    """
    return "\n".join([*(_read(f"{name}.js") for name in [*FILES, *more]), f"export default {widget};"])


def css() -> str:
    """Return the style sheet that belongs to it."""
    return _read("timeline.css")


def _read(name: str) -> str:
    """Return a file of this folder, with the theme's values in it."""
    return substitute_theme((files(__name__) / name).read_text(encoding="utf-8"))
