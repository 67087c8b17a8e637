"""Copies to the host."""

from __future__ import annotations

from collections.abc import Mapping

import mpkit as mk
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

COPIES_MS = 2000 * copy
STEP_MS = 1000 * step

EXERCISE = Questions(
    solution=copies,
    called="copies",
    truth=truth,
    within=dict.fromkeys((RATE, HOST, LINK, WITHOUT), 0.025),
    after="03-zero",
    place=25,
    when={
        "one-copy-gets-faster": lambda seen: is_near(seen, HOST, step - copy * SAVED, 0.01),
        "twice-the-link-half-the-step": lambda seen: (
            is_near(seen, HOST, step / FACTOR) or is_near(seen, LINK, step / FACTOR)
        ),
        "copies-go-over-the-gpus-link": lambda seen: is_near(seen, LINK, step - 2 * copy * SAVED),
        "without-copies-one-is-left": lambda seen: is_near(seen, WITHOUT, step - copy),
    },
)
