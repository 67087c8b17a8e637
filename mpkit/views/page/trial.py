"""The section "Try it: another schedule" of a page: sliders without a kernel.

    schedules   every schedule by name, p and m, as text: what the page's script plays
    controls    a dropdown and sliders, with words and units; `mk.explore` has those of two schedules
    still       the first setting as SVG, until the script has drawn it and where no script may run

The script (`mpkit/views/browser/played.js`, `trial.js`) plays a schedule as `mpkit.simulate` does.
"""

import gzip
import json
from base64 import b64encode
from collections.abc import Mapping
from typing import NamedTuple

from mpkit.common.safe_text import escape
from mpkit.plan.plan import Plan
from mpkit.plan.schedule.catalogue import ONE_F_ONE_B, SCHEDULES
from mpkit.timeline.simulation import simulate, time_of
from mpkit.timeline.timeline import Timeline
from mpkit.trace import Kind
from mpkit.views.drawing.colours import Key
from mpkit.views.timeline.svg import svg
from mpkit.views.timeline.wire import COLUMNS

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


SLIDERS = {
    "ranks": Slider("ranks p", RANKS[0], RANKS[-1], 1, 4),
    "microbatches": Slider("micro-batches m", MICROBATCHES[0], MICROBATCHES[-1], 1, 8),
    "forward": Slider("forward F", 0, 4, 0.05, 1, "seconds"),
    "backward": Slider("backward B", 0, 8, 0.1, 2, "seconds"),
    "input_grad": Slider("input gradients I", 0, 4, 0.05, 1, "seconds"),
    "weight_grad": Slider("weight gradients W", 0, 4, 0.05, 1, "seconds"),
    "hop": Slider("message", 0, 2, 0.05, 0, "seconds"),
}
"""By the name of what is set; a whole backward sets both halves."""


def trial(p: int, m: int) -> str:
    """Return the section as HTML, with the data of its script; it begins with p ranks and m micro-batches.

    A p or m that the sliders do not reach becomes the nearest one that they do.
    """
    p, m = (min(max(n, within[0]), within[-1]) for n, within in ((p, RANKS), (m, MICROBATCHES)))
    setting = {"ranks": p, "microbatches": m}
    still = svg(simulated(FIRST, setting))
    return (
        '<section class="card" id="try"><h2>Try it: another schedule</h2><p class="intro">Choose a schedule, and set '
        "how long its actions take. Times are those of one micro-batch on one rank: where a rank holds two stages, "
        "each of them takes half. A message is what a stage sends to the next one, or back; only its receiver waits "
        f"for it.</p>{controls('try', FIRST, setting, still)}"
        f'<script type="text/plain" data-schedules>{pack_schedules()}</script></section>'
    )


def controls(place: str, schedule: str, setting: Mapping[str, float], still: str = "") -> str:
    """Return the controls as HTML, whose ids begin with `place`, and below them the place of the panel.

    `schedule` (a name or rows) is chosen at first, `setting` has the first values of sliders by name, and `still` is in
    the panel's place until the script has drawn it.
    """
    named = schedule in SCHEDULES
    chosen = {schedule if named else "own": " selected"}
    options = "".join(
        f'<option value="{name}"{chosen.get(name, "")}>{escape(title(name))}</option>' for name in SCHEDULES
    )
    options += f'<option value="own"{chosen.get("own", "")}>your own, to write</option>'
    at = {name: setting.get(name, each.value) for name, each in SLIDERS.items()}
    at["backward"] = at["input_grad"] + at["weight_grad"]
    sliders = (_slider(place, name, each._replace(value=at[name])) for name, each in SLIDERS.items())
    words = SCHEDULES[schedule].words if named else ""
    return (
        '<div class="mpkit-controls" role="group" aria-label="settings of the schedule" hidden>'
        f'<div class="mpkit-control"><label for="{place}-schedule">schedule</label>'
        f'<select id="{place}-schedule" name="schedule">{options}</select></div>{"".join(sliders)}'
        f'<div class="mpkit-control own" hidden><label for="{place}-own">a line per rank: F0 is the forward of '
        "micro-batch 0, B0 its backward, I0 and W0 its halves</label>"
        f'<textarea id="{place}-own" name="own" rows="6" spellcheck="false">{"" if named else escape(schedule)}'
        f'</textarea></div></div><p class="mpkit-wrong" role="alert"></p><p class="intro words">{escape(words)}</p>'
        f'<div class="trial"><div class="static scroll">{still}</div></div>'
    )


def simulated(schedule: str, setting: Mapping[str, float]) -> Timeline:
    """Return what the script shows, by `mpkit.simulate`: times are of a rank's share, however many stages it has.

    >>> simulated("zbv", {"forward": 2}).step_time
    36.0
    """
    at = {name: setting.get(name, slider.value) for name, slider in SLIDERS.items()}
    rows = len(schedule.split()) > 1
    plan = (
        Plan.from_schedule(schedule) if rows else plan_of(schedule, int(at["ranks"]), int(at["microbatches"]))
    )
    v = plan.stages / plan.pp
    forward, input_grad, weight_grad = (
        time_of(name, at[name]) / v for name in ("forward", "input_grad", "weight_grad")
    )
    return simulate(plan, forward, input_grad, weight_grad, hop=at["hop"])


def plan_of(name: str, p: int, m: int) -> Plan:
    """Return the plan of a schedule by name, with two stages per rank where it allows them."""
    known = SCHEDULES.get(name)  # of an unknown one the plan says which is meant
    return Plan(
        pp=p, schedule=name, microbatches=m, virtual_stages=2 if known and not known.can_have(1) else 1
    )


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


def _slider(place: str, name: str, slider: Slider) -> str:
    most = max(slider.most, slider.value)
    steps = slider.value / slider.step
    # A browser would round a value between steps.
    between = name == "backward" or abs(steps - round(steps)) > 1e-9
    step = "any" if between else slider.step
    at = f'id="{place}-{name}" name="{name}" min="{slider.least}" max="{most}" step="{step}"'
    unit = f' data-unit="{slider.unit}"' if slider.unit else ""
    return (
        f'<div class="mpkit-control"><label for="{place}-{name}">{slider.label}</label>'
        f'<output for="{place}-{name}"></output><input type="range" {at} value="{slider.value}"{unit}></div>'
    )
