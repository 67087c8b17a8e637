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

from mpkit.plan.plan import Plan
from mpkit.schedule import NAMES
from mpkit.schedule.catalogue import LOOPED, V_SHAPED
from mpkit.support.visible import escape
from mpkit.timeline.simulation import simulate
from mpkit.trace import Kind
from mpkit.views.drawing.colours import Key
from mpkit.views.timeline.svg import svg
from mpkit.views.timeline.wire import COLUMNS

__all__ = ["LINK", "MICROBATCHES", "RANKS", "SCHEDULES", "packed", "trial"]

RANKS, MICROBATCHES = range(2, 9), range(1, 17)
"""What the sliders reach: p ranks, m micro-batches."""

LINK = (
    '<p class="intro"><a href="#try">Try it: another schedule</a>, with sliders, at the end of this page.</p>'
)
"""What the top of the page says of the section."""

FIRST = "1f1b"
"""The schedule that the section begins with."""

SCHEDULES: dict[str, tuple[str, str]] = {
    "naive": ("naive", "One micro-batch at a time: while one stage works, all others wait."),
    "gpipe": (
        "GPipe",
        "All forwards, then all backwards. A rank holds the activations of all micro-batches.",
    ),
    "1f1b": (
        "1F1B",
        "After a warm-up each rank alternates between one forward and one backward. The bubble is GPipe's, but a rank "
        "holds the activations of at most p micro-batches.",
    ),
    "looped_bfs": (
        "looped BFS, 2 stages per rank",
        "GPipe with two stages per rank: all micro-batches pass a stage before the rank turns to its next one.",
    ),
    "interleaved_1f1b": (
        "interleaved 1F1B, 2 stages per rank",
        "1F1B with two stages per rank: warm-up and cool-down take half as long, for more than twice as many messages.",
    ),
    "zb_h1": (
        "ZB-H1",
        "Backwards are split: the stage before waits for the input gradients only, and the weight gradients fill what "
        "would be bubble. No rank holds more activations than 1F1B's first one.",
    ),
    "zb_h2": (
        "ZB-H2",
        "Split backwards and a longer warm-up: with equal times and free messages no rank waits between its first "
        "action and its last, at almost twice 1F1B's activations. The idle ends of the rows would close up if each "
        "rank went on with the next step at once.",
    ),
    "zbv": (
        "ZB-V, 2 stages per rank",
        "Split backwards, and stages in a V: the first rank holds the first stage and the last one, so that it begins "
        "with backwards early.",
    ),
    "interleaved_zb": (
        "interleaved zero bubble, 2 stages per rank",
        "Interleaved 1F1B with split backwards, whose weight gradients fill what would be bubble.",
    ),
    "dualpipev": (
        "DualPipe-V, 2 stages per rank",
        "Stages in a V. In the middle of the step, the forward of one micro-batch and the backward of another run as a "
        "pair, and their results leave together when both are done.",
    ),
}
"""By the schedule's name: its title in the dropdown, and what there is to be seen."""


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
        f'<option value="{name}"{" selected" if name == FIRST else ""}>{escape(SCHEDULES[name][0])}</option>'
        for name in NAMES
    )
    still = svg(simulate(plan_of(FIRST, p, m)))
    return (
        '<section class="card" id="try"><h2>Try it: another schedule</h2><p class="intro">Choose a schedule, and set '
        "how long its actions take. Times are those of one micro-batch on one rank: where a rank holds two stages, "
        "each of them takes half. A message is what a stage sends to the next one, or back; only its receiver waits "
        "for it.</p>"
        '<div class="controls" role="group" aria-label="settings of the schedule" hidden><div class="control">'
        f'<label for="try-schedule">schedule</label><select id="try-schedule" name="schedule">{options}</select></div>'
        f"{''.join(_slider(name, slider) for name, slider in sliders.items())}</div>"
        f'<p class="intro words">{escape(SCHEDULES[FIRST][1])}</p>'
        f'<div class="trial"><div class="static scroll">{still}</div></div>'
        f'<script type="text/plain" data-schedules>{packed()}</script></section>'
    )


def plan_of(name: str, p: int, m: int) -> Plan:
    """Return the plan of a schedule by name, with two stages per rank where it allows them."""
    v = 2 if name in LOOPED or name in V_SHAPED else 1
    return Plan(pp=p, schedule=name, microbatches=m, virtual_stages=v)


def packed() -> str:
    """Return what the script needs, as JSON in gzip in base64: schedules by name and "p m", words, columns, keys."""
    data = {
        "schedules": {
            name: {
                f"{p} {m}": "\n".join(plan_of(name, p, m).build().spelled())
                for p in RANKS
                for m in MICROBATCHES
            }
            for name in NAMES
        },
        "words": {name: words for name, (_, words) in SCHEDULES.items()},
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
