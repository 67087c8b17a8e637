"""A timeline in the terminal: one line per rank, plain characters.

    rank 0 (CPU) |0░1░2░3░·····················3▓▓▓2▓▓▓1▓▓▓0▓▓▓|

The number at the start of an operation is its micro-batch; the characters after it show its kind. Below stands what
NVML said of the ranks' GPUs, over all steps.
"""

import math
import shutil
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

import numpy as np

from mpkit.common.arrays import Array
from mpkit.common.display import in_notebook
from mpkit.common.units import bytes_text, percent, seconds
from mpkit.timeline import metrics
from mpkit.timeline.timeline import Timeline
from mpkit.trace import Kind
from mpkit.views.drawing.colours import INKS, Key, key_of
from mpkit.views.drawing.lanes import rank_label
from mpkit.views.memory.series import held_text
from mpkit.views.timeline.picture import Picture, coverage, picture, strongest
from mpkit.views.timeline.tracks import device_lines

NOTEBOOK_WIDTH = 100
FILL = dict(zip(Key, "·░▓▒█◆▚▞━═▤", strict=True))


@dataclass(frozen=True)
class Cells:
    """One row as characters: a key per column (-1: blank), and the digits written over them; or a group's header."""

    label: str
    keys: Array
    digits: dict[int, str]
    note: str
    heads: bool = False

    def __str__(self) -> str:
        filled = (FILL[Key(key)] if key >= 0 else " " for key in self.keys.tolist())
        return "".join(self.digits.get(column) or letter for column, letter in enumerate(filled))


def text(
    timeline: Timeline, width: int | None = None, *, step: int | None = None, fold: bool = False, notes: bool = True
) -> str:  # fmt: skip
    """Return the timeline as lines of text: one step, by default the last, which the figures are of.

    A width of None is the terminal's, or 100 columns in a notebook, which has none. `fold`: draw only the first rank of
    each group.
    """
    if width is None:
        # A kernel's terminal is the one that its server was started from, which the reader does not see.
        width = NOTEBOOK_WIDTH if in_notebook() else shutil.get_terminal_size((NOTEBOOK_WIDTH, 24)).columns
    if width < 40:
        raise ValueError(f"width={width} leaves no room for a picture: give 40 columns or more")
    steps = timeline.steps
    if step is None and len(steps) > 1:
        step = steps[-1]
    pic = picture(timeline, step, fold=fold)
    if not len(pic.boxes):
        return f"(an empty timeline of {timeline.world_size} ranks)"
    drawn = cells(pic, width)
    gutter = max(len(row.label) for row in drawn if not row.heads)
    lines = [
        row.label if row.heads else f"{row.label:>{gutter}} │{row}│ {row.note}".rstrip() for row in drawn
    ]
    lines.append(f"{'0':>{gutter + 3}}{seconds(pic.duration):>{len(drawn[0].keys) - 1}}")
    shown = {key for row in drawn for key in row.keys.tolist()}
    lines.append("  ".join(f"{FILL[key]} {INKS[key].word}" for key in pic.keys if key in shown))
    lines += wrap(_caption(pic, step, len(steps)), width, break_long_words=False)
    lines += device_lines(timeline)
    for note in timeline.notes if notes else []:
        lines += wrap(note, width, break_long_words=False)
    return "\n".join(lines)


def cells(pic: Picture, width: int) -> list[Cells]:
    """Convert the rows of a picture to characters, in `width` columns with label and idle share."""
    computes = bool(np.any(pic.boxes["key"][pic.boxes["span"] >= 0] < Key.COMM))
    parts = {"compute"} if computes else {"comm", "host", "data"}
    if np.any(pic.boxes["key"] == Key.DATA):
        parts |= {"data"}
    shown = [(number, row) for number, row in enumerate(pic.rows) if row.part in {*parts, "group"}]
    labels = {}
    for number, row in shown:
        label, most = row.label if row.part == "compute" else f"{row.label} {row.rank}", width // 2
        labels[number] = label if len(label) <= most else f"{label[: most - 3]}..."
    gutter = max((len(labels[number]) for number, row in shown if row.part != "group"), default=0)
    columns = columns_of(pic, width - gutter - len(" ││ idle 99.9 %"))
    return [
        Cells(row.label, np.full(columns, -1), {}, "", heads=True)
        if row.part == "group"
        else _row(pic, number, labels[number], columns, row.part == "compute")
        for number, row in shown
    ]


def columns_of(pic: Picture, room: int) -> int:
    """Return how many of `room` columns to use: if all times are multiples of one, each unit gets equal columns."""
    work = pic.boxes[(pic.boxes["key"] > Key.IDLE) & (pic.boxes["key"] < Key.COMM)]
    work = work[work["end"] > work["start"]]
    if len(work):
        units = pic.duration / float((work["end"] - work["start"]).min())
        starts = work["start"] / pic.duration * units
        whole = np.append(starts, units)
        if units <= room and np.allclose(whole, np.round(whole), atol=1e-6):
            return int(room // round(units) * round(units))
    return room


def _row(pic: Picture, number: int, label: str, columns: int, idle: bool) -> Cells:
    boxes = pic.of_row(number)
    # A character has no shades: it shows the key that takes most of its time.
    keys, _ = strongest(coverage(boxes, columns, pic.duration), least=0.5)
    scale = columns / pic.duration if pic.duration else 0.0
    digits: dict[int, str] = {}
    for box in boxes[(boxes["end"] - boxes["start"]) * scale >= 1.5]:
        number_text = pic.label(box)
        first, after = _nearest(box["start"] * scale), _nearest(box["end"] * scale)
        # At least one column of fill must remain, or a reader could not tell what the number belongs to.
        if number_text and after - first > len(number_text):
            digits.update({first + i: digit for i, digit in enumerate(number_text)})
    share = f"idle {percent(pic.idle_share(pic.rows[number].rank))}" if idle else ""
    return Cells(label, keys, digits, share)


def _nearest(column: float) -> int:
    """Round to the nearest column, a half down: a column that a box covers by half is not its own."""
    return math.ceil(column - 0.5 - 1e-9)


def _caption(pic: Picture, step: int | None, steps: int) -> str:
    words = [f"step {step} ({steps} steps in all)"] if step is not None and steps > 1 else []
    words += [f"{name} {value}" for name, value in pic.figures.items() if name != "clock"]
    of = pic.timeline if step is None else pic.timeline.step(step)
    words += _hidden_line(of)
    words += [f"data loading {seconds(max(of.data_time))}"] * any(of.data_time)
    return " · ".join([*words, pic.figures["clock"]])


def _hidden_line(timeline: Timeline) -> list[str]:
    """Report how much of all ranks' communication was hidden behind compute; nothing if none was."""
    kinds = timeline.spans["kind"]
    if not np.any((kinds >= Kind.ALL_REDUCE) & (kinds < Kind.BARRIER)) or timeline.overlap < 0.005:
        return []
    exposed = max(timeline.exposed_comm)
    return [f"communication hidden {percent(timeline.overlap)}, exposed {seconds(exposed)}"]


def rank_table(timeline: Timeline, like: float = 0) -> dict[str, Any]:
    """Return {"head": [...], "rows": [[...], ...]}, all text: the figures of the last complete step, by rank.

    Memory has the unit of `like`, the largest amount shown beside the table, if that is larger than its own.

    >>> import mpkit as mk
    >>> table = rank_table(mk.simulate(mk.Plan.gpipe(2, 2)))
    >>> table["head"], table["rows"][0]
    (['', 'idle', 'forward', 'backward', 'peak memory'], ['GPU 0', '33.3 %', '2.00 s', '4.00 s', '2 micro-batches'])
    """
    steps = timeline.steps
    spans = timeline.spans[timeline.spans["step"] == steps[-1]] if steps else timeline.spans
    work = metrics.work(spans)
    keys = key_of(work["kind"])
    shown = [key for key in Key if np.any(keys == key)]
    length = work["end"] - work["start"]
    sent = [sum(kinds.values()) - kinds.get("recv", 0) for kinds in timeline.comm_bytes]
    exposed, peak = timeline.exposed_comm, [held["total"] for held in timeline.peak_memory]
    whole, idle = timeline.step_time, timeline.idle
    data, rows = timeline.data_time, []
    head = ["", "idle", *(INKS[key].word for key in shown)]
    head += ["data loading"] * any(data) + ["exposed communication"] * any(exposed)
    head += ["bytes sent"] * any(sent) + ["peak memory"] * any(peak)
    for rank in range(timeline.world_size):
        mine = work["rank"] == rank
        row = [rank_label(timeline, rank), percent(idle[rank] / whole if whole else 0.0)]
        row += [seconds(float(length[mine & (keys == key)].sum())) for key in shown]
        row += [seconds(data[rank])] * any(data)
        row += [seconds(exposed[rank])] * any(exposed) + [bytes_text(sent[rank])] * any(sent)
        rows.append(row + [held_text(timeline, peak[rank], max(like, *peak))] * any(peak))
    return {"head": head, "rows": rows}
