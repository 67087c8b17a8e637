"""The dashboard's text as HTML, every string escaped."""

from collections.abc import Sequence
from functools import partial

from mpkit.common.display import image
from mpkit.common.safe_text import escape
from mpkit.trace.metrics import Metrics
from mpkit.trace.proof import Proof
from mpkit.views.chart.svg import chart_svg
from mpkit.views.drawing.colours import WHITE
from mpkit.views.results.losses import losses as losses_chart
from mpkit.views.theme import ACCENT, ALARM, MARGIN, MONO, STATUS, TEXT, THEMES, WHOLE_WORDS

STOP_HINT = "End the ranks now. While a cell is running, interrupt the kernel instead: that stops them too."

_CHIPS = {"running": ACCENT, "finished": STATUS["good"], "stopped": STATUS["doubt"], "failed": STATUS["bad"]}
_FAINT = f"color:var(--jp-ui-font-color2,{STATUS['done']})"
_MONO = f"font:12px/1.45 {MONO}"


def head(title: str, status: str, proof: Proof | None = None, *, wraps: bool = False) -> str:
    """Return the run's title, its status ("running", "finished", ..., or how it starts) and the badge of its proof.

    Unless it `wraps` it is one line, with a title that is cut to fit, so that nothing below moves while a run goes on.

    >>> "&lt;b&gt;" in head("<b>", "running")
    True
    """
    chip = (
        f"background:{_CHIPS.get(status, _CHIPS['running'])};color:{WHITE};border-radius:9px;padding:1px 9px;"
        "font-size:12px;line-height:1.5;margin-left:6px"
    )
    going = "" if status in ("finished", "stopped", "failed") else ' class="mpkit-chip-going"'
    line = "font-size:15px;font-weight:600;line-height:1.7;display:flex;align-items:center;gap:0 4px"
    line += ";flex-wrap:wrap" if wraps else ";white-space:nowrap;overflow:hidden"
    cut = "" if wraps else "overflow:hidden;text-overflow:ellipsis"
    words = f' title="{escape(proof.badge, quote=True)}"' if proof is not None and proof.badge else ""
    return (
        f'<div{words} style="{line}"><span style="{cut}">{escape(title)}</span>'
        f'<span{going} style="{chip};font-weight:500">{escape(status)}</span> {badge(proof)}</div>'
    )


def starting_html(ranks: int) -> str:
    """Return the status of a run of which nothing has been recorded yet.

    >>> starting_html(1), starting_html(4)
    ('starting 1 process', 'starting 4 processes')
    """
    return f"starting {ranks} process{'es' if ranks > 1 else ''}"


def progress(step: int, steps: int | None, losses: Sequence[float]) -> str:
    """Return the number of steps, and the latest loss.

    >>> "step <b>3</b> of 9" in progress(3, 9, [])
    True
    """
    words = f"step <b>{step}</b>" + (f" of {steps}" if steps is not None else "")
    if losses:
        words += f' <span style="{_FAINT}">&nbsp;loss</span> <b>{losses[-1]:.4f}</b>'
    return f'<div style="font-variant-numeric:tabular-nums;margin:0 {MARGIN:g}px;white-space:nowrap">{words}</div>'


def output(lines: Sequence[str]) -> str:
    """Return what the ranks printed, with the newest lines in view."""
    if not lines:
        return ""
    # Two boxes: the outer one reverses the order, which keeps it scrolled to the end.
    return (
        '<div style="max-height:220px;overflow:auto;display:flex;flex-direction:column-reverse;'
        f'border-top:1px solid var(--jp-border-color2,{THEMES["light"].line})">'
        f'<pre style="{_MONO};margin:6px 0;{WHOLE_WORDS}">{escape(chr(10).join(lines))}</pre></div>'
    )


def remark(note: str) -> str:
    """Return what a picture cannot say, such as why its bubble is not that of theory; "" without it."""
    look = f"margin:6px {MARGIN:g}px;font-size:{TEXT}px;{_FAINT}"
    return f'<p style="{look}">{escape(note)}</p>' if note else ""


def trouble(message: str) -> str:
    """Return the error message of a run that failed."""
    if not message:
        return ""
    return (
        f'<pre style="{_MONO};{WHOLE_WORDS};margin:6px 0;padding:8px 12px;border-left:4px solid {ALARM};'
        f'background:{ALARM}14">{escape(message)}</pre>'
    )


def charts(losses: Sequence[float], first_step: int, metrics: Metrics, steps: int | None = None) -> str:
    """Return the charts of loss and metrics as an image; "" if there is too little to draw."""
    chart = losses_chart(losses, first_step, metrics, steps)
    return "" if chart is None else image(partial(chart_svg, chart), chart.told, fill=True)


_COLOURS = {"equal": STATUS["good"], "not verified": STATUS["doubt"], "not equal": STATUS["bad"]}
_STYLE = (
    "border-radius:9px;padding:1px 9px;font-size:12px;font-weight:500;display:inline-block;line-height:1.5"
)


def badge(proof: Proof | None) -> str:
    """Return the badge; "" without a proof, or while nothing is known.

    >>> "&lt;b&gt;" in badge(Proof(why_not="<b>")), badge(None)
    (True, '')
    """
    if proof is None or not proof.badge:
        return ""
    return f'<span style="border:1.5px solid {_COLOURS[proof.status]};{_STYLE}">{escape(proof.badge)}</span>'
