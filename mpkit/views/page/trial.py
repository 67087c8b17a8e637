"""The section "Try it: another schedule" of a page: sliders without a kernel.

    schedules   every schedule by name, p and m, as text: what the page's script plays
    controls    a dropdown and sliders, with words and units
    still       the first setting as SVG, until the script has drawn it and where no script may run

The script (`mpkit/views/browser/played.js`, `trial.js`) plays a schedule as `mpkit.simulate` does.
"""

from __future__ import annotations

import gzip
import json
from base64 import b64encode
from typing import NamedTuple

from mpkit.common.safe_text import escape
from mpkit.plan.plan import Plan
from mpkit.plan.schedule.catalogue import ONE_F_ONE_B, SCHEDULES
from mpkit.timeline.simulation import simulate
from mpkit.trace import Kind
from mpkit.views.drawing.colours import Key
from mpkit.views.timeline.svg import svg
from mpkit.views.timeline.wire import COLUMNS

__all__ = ["LINK", "MICROBATCHES", "RANKS", "pack_schedules", "title", "trial"]

RANKS, MICROBATCHES = range(2, 9), range(1, 17)
"""What the sliders reach: p ranks, m micro-batches."""

LINK = (
    '<p class="intro"><a href="#try">Try it: another schedule</a>, with sliders, at the end of this page.</p>'
)
"""What the top of the page says of the section."""

FIRST = ONE_F_ONE_B
"""The schedule that the section begins with."""


class Slider(NamedTuple):
    """A slider: its label and range."""

    label: str
    least: float
    most: float
    step: float
    value: float
    unit: str = ""


def trial(p: int, m: int) -> str:
    """Return the section as HTML, with the data of its script; it begins with p ranks and m micro-batches.

    A p or m that the sliders do not reach becomes the nearest one that they do.
    """
    p, m = (min(max(n, within[0]), within[-1]) for n, within in ((p, RANKS), (m, MICROBATCHES)))
    sliders = {
        "ranks": Slider("ranks p", RANKS[0], RANKS[-1], 1, p),
        "microbatches": Slider("micro-batches m", MICROBATCHES[0], MICROBATCHES[-1], 1, m),
        "forward": Slider("forward F", 0, 4, 0.05, 1, "seconds"),
        "backward": Slider("backward B", 0, 8, 0.1, 2, "seconds"),
        "input_grad": Slider("input gradients I", 0, 4, 0.05, 1, "seconds"),
        "weight_grad": Slider("weight gradients W", 0, 4, 0.05, 1, "seconds"),
        "hop": Slider("message", 0, 2, 0.05, 0, "seconds"),
    }
    options = "".join(
        f'<option value="{name}"{" selected" if name == FIRST else ""}>{escape(title(name))}</option>'
        for name in SCHEDULES
    )
    options += '<option value="own">your own, to write</option>'
    still = svg(simulate(plan_of(FIRST, p, m)))
    return (
        '<section class="card" id="try"><h2>Try it: another schedule</h2><p class="intro">Choose a schedule, and set '
        "how long its actions take. Times are those of one micro-batch on one rank: where a rank holds two stages, "
        "each of them takes half. A message is what a stage sends to the next one, or back; only its receiver waits "
        "for it.</p>"
        '<div class="controls" role="group" aria-label="settings of the schedule" hidden><div class="control">'
        f'<label for="try-schedule">schedule</label><select id="try-schedule" name="schedule">{options}</select></div>'
        f"{''.join(_slider(name, slider) for name, slider in sliders.items())}"
        '<div class="control own" hidden><label for="try-own">a line per rank: F0 is the forward of micro-batch 0, B0 '
        "its backward, I0 and W0 its halves</label>"
        '<textarea id="try-own" name="own" rows="6" spellcheck="false"></textarea></div></div>'
        '<p class="wrong" role="alert"></p>'
        f'<p class="intro words">{escape(SCHEDULES[FIRST].words)}</p>'
        f'<div class="trial"><div class="static scroll">{still}</div></div>'
        f'<script type="text/plain" data-schedules>{pack_schedules()}</script></section>'
    )


def plan_of(name: str, p: int, m: int) -> Plan:
    """Return the plan of a schedule by name, with two stages per rank where it allows them."""
    return Plan(pp=p, schedule=name, microbatches=m, virtual_stages=1 if SCHEDULES[name].can_have(1) else 2)


def title(name: str) -> str:
    """Return the title of a schedule in the dropdown.

    >>> title("zbv")
    'ZB-V, 2 stages per rank'
    """
    entry = SCHEDULES[name]
    return entry.title + ("" if entry.can_have(1) else ", 2 stages per rank")


def pack_schedules() -> str:
    """Return what the script needs, as JSON in gzip in base64: schedules by name and "p m", words, columns, keys."""
    data = {
        "schedules": {
            name: {
                f"{p} {m}": "\n".join(plan_of(name, p, m).build().spelled())
                for p in RANKS
                for m in MICROBATCHES
            }
            for name in SCHEDULES
        },
        "words": {name: entry.words for name, entry in SCHEDULES.items()},
        "columns": COLUMNS,
        "keys": {
            "F": Kind.FORWARD, "B": Kind.BACKWARD, "I": Kind.INPUT_GRAD, "W": Kind.WEIGHT_GRAD, "message": Key.COMM,
        },
    }  # fmt: skip
    text = json.dumps(data, separators=(",", ":"))
    return b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


def _slider(name: str, slider: Slider) -> str:
    at = f'id="try-{name}" name="{name}" min="{slider.least}" max="{slider.most}" step="{slider.step}"'
    unit = f' data-unit="{slider.unit}"' if slider.unit else ""
    return (
        f'<div class="control"><label for="try-{name}">{slider.label}</label>'
        f'<output for="try-{name}"></output><input type="range" {at} value="{slider.value}"{unit}></div>'
    )
