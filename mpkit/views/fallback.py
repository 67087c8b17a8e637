"""What an output shows where no kernel runs: on GitHub, in a saved notebook, in a terminal."""

from __future__ import annotations

from base64 import b64encode

from mpkit.timeline import Timeline
from mpkit.views.lanes import FOLDED
from mpkit.views.picture import picture
from mpkit.views.svg import summary, svg
from mpkit.views.text import text
from mpkit.visible import escape

__all__ = ["image", "static_bundle"]


def image(svg_text: str, words: str) -> str:
    """An `<img>` that holds its SVG, with words for who cannot see it. JupyterLab shows no other SVG of an
    output whose widget is gone, and an image runs no script.
    """
    data = b64encode(svg_text.encode()).decode()
    return f'<img alt="{escape(words, quote=True)}" style="max-width:100%" src="data:image/svg+xml;base64,{data}">'


def static_bundle(timeline: Timeline, title: str = "") -> dict[str, str]:
    """A mime bundle of text/plain and text/html.

    >>> import mpkit as mk
    >>> sorted(static_bundle(mk.simulate(mk.Plan.gpipe(2, 2))))
    ['text/html', 'text/plain']
    """
    fold = timeline.world_size > FOLDED
    drawn = svg(timeline, title=title, fold=fold)
    return {
        "text/plain": text(timeline, 100, fold=fold),
        "text/html": image(drawn, summary(picture(timeline, fold=fold))),
    }
