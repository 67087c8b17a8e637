"""Copies to the host.

ZeRO-1 with the optimizer on the host: a GPU's memory holds none of Adam's states. The price is on the timeline, in the
lane "host". `run()` is the timeline of one step on four A100s.

How many bytes does a GPU copy to its host in a step, and how many back? How fast is that link, in bytes per second? And
then predict how many seconds a step takes

- if the link to the host were {FACTOR} times as fast,
- if the link between the GPUs were {FACTOR} times as fast,
- with the optimizer on the GPU again, and so without the copies (its step itself takes as long).

`run().to_dataframe()` has a row for each span: its lane, kind, start, end (seconds) and bytes, of all ranks. What a
prediction says may be off by 5 %.
"""

from __future__ import annotations

from collections.abc import Mapping

import mpkit as mk
from mpkit.course.framework.exercise import Mistake
from mpkit.course.framework.questions import Questions
from mpkit.course.framework.room import Room
from mpkit.course.lab import is_near, timeline
from mpkit.trace import Kind, Lane

# %% given
LAYERS = 4  # of the model
FACTOR = 2  # times as fast


def run() -> mk.Timeline:
    """Return the timeline of a ZeRO-1 step with the optimizer on the host."""
    from mpkit.course.lab import timeline

    return timeline("offload", layers=LAYERS)


# %% answer
### BEGIN SOLUTION
# instead: copies = {
# instead:     "bytes to the host": ...,
# instead:     "bytes per second": ...,
# instead:     "seconds, a faster link to the host": ...,
# instead:     "seconds, a faster link between GPUs": ...,
# instead:     "seconds, without copies": ...,
# instead: }
# read from the timelines of 3, 4, 5 and 6 layers: seconds of a step, of a copy, and of exposed communication
seconds = {
    3: (0.00909, 0.001624, 0.00100),
    4: (0.01219, 0.002165, 0.00126),
    5: (0.01530, 0.002706, 0.00151),
    6: (0.01841, 0.003247, 0.00176),
}
step, copy, exposed = seconds[LAYERS]
copies = {
    # the gradients that this GPU updates: a fourth of 4096 × 4096 numbers per layer, in fp32
    "bytes to the host": 16_777_216 * LAYERS,
    "bytes per second": 16_777_216 * LAYERS / copy,
    # there are two copies, one each way
    "seconds, a faster link to the host": step - 2 * copy * (1 - 1 / FACTOR),
    "seconds, a faster link between GPUs": step - exposed * (1 - 1 / FACTOR),
    "seconds, without copies": step - 2 * copy,
}
### END SOLUTION


# %% checks
VARIES = {"LAYERS": (3, 4, 5, 6), "FACTOR": (2, 3, 4)}
SAVED = 1 - 1 / FACTOR  # share of a copy's time


def truth(room: Room) -> Mapping[str, float | int]:
    """Return the right values, by replaying the run."""
    t = timeline("offload", layers=LAYERS, room=room)
    hosted = t.spans[(t.spans["lane"] == Lane.HOST) & (t.spans["rank"] == 0)]
    out = hosted[hosted["kind"] == Kind.COPY_TO_HOST]
    seconds = float((out["end"] - out["start"]).sum())
    right = (
        int(out["bytes"].sum()),
        float(out["bytes"].sum()) / seconds,
        timeline("offload", layers=LAYERS, host=FACTOR, room=room).step_time,
        timeline("offload", layers=LAYERS, link=FACTOR, room=room).step_time,
        t.step_time - float((hosted["end"] - hosted["start"]).sum()),
    )
    return dict(zip(copies, right, strict=True))


BYTES, RATE, HOST, LINK, WITHOUT = copies

EXERCISE = Questions(
    solution=copies,
    called="copies",
    truth=truth,
    within=dict.fromkeys((RATE, HOST, LINK, WITHOUT), 0.025),
    after="03-zero",
    place=25,
    start="`rows = run().to_dataframe()`, and then `rows[(rows['lane'] == 'host') & (rows['rank'] == 0)]`.",
    mistakes=(
        Mistake(
            "bytes-of-all-gpus",
            (
                "Of how many GPUs are the rows that you added up?",
                "The table has the spans of all four ranks. The question is about one GPU: `rows['rank'] == 0`.",
            ),
            [('"bytes to the host": 16_777_216', '"bytes to the host": 4 * 16_777_216')],
        ),
        Mistake(
            "both-ways-together",
            (
                "What goes to the host, and what comes back?",
                "Gradients go to the host, the updated parameters come back: as many bytes each way, one after the "
                "other.",
            ),
            [('"bytes to the host": 16_777_216', '"bytes to the host": 2 * 16_777_216')],
        ),
        Mistake(
            "one-copy-gets-faster",
            (
                "How many copies are there in a step, and which of them go over the link to the host?",
                "Both do, one before the optimizer's step and one after it. Both get faster.",
            ),
            [("step - 2 * copy * (1", "step - copy * (1")],
            when=lambda seen: is_near(seen, HOST, step - copy * SAVED, 0.01),
        ),
        Mistake(
            "twice-the-link-half-the-step",
            (
                "Which part of the step is spent on that link?",
                f"Only the copies get shorter. They are {2000 * copy:.1f} of {1000 * step:.1f} ms, and {SAVED:.0%} of "
                "that is saved.",
            ),
            [("step - 2 * copy * (1 - 1 / FACTOR)", "step / FACTOR")],
            when=lambda seen: is_near(seen, HOST, step / FACTOR) or is_near(seen, LINK, step / FACTOR),
        ),
        Mistake(
            "copies-go-over-the-gpus-link",
            (
                "Which link do the copies take, and which the reduce-scatter and all-gather?",
                "A copy goes over PCIe, between a GPU and its host. NVLink connects the GPUs, and only what is "
                "exposed of their communication gets shorter there.",
            ),
            [("step - exposed * (1", "step - 2 * copy * (1")],
            when=lambda seen: is_near(seen, LINK, step - 2 * copy * SAVED),
        ),
        Mistake(
            "without-copies-one-is-left",
            (
                "How many copies does a step without offloading have?",
                "None: the gradients stay where they are, and so do the parameters. Both copies are saved.",
            ),
            [("step - 2 * copy,", "step - copy,")],
            when=lambda seen: is_near(seen, WITHOUT, step - copy),
        ),
    ),
    otherwise=("Print `run()`, and look for what is between the backward and the optimizer, and after it.",),
)
