"""An uneven pipeline."""

from __future__ import annotations

from collections.abc import Mapping

import mpkit as mk
from mpkit.course.framework.questions import Questions
from mpkit.course.framework.room import Room
from mpkit.course.lab import is_near, read_answer

# %% given
FORWARD = (1.0, 1.2, 2.6, 1.2)  # seconds of a forward, by stage
M = 12  # micro-batches


def run(forward: tuple[float, ...] = FORWARD, m: int = M) -> mk.Timeline:
    """Simulate 1F1B over four stages; a backward takes twice as long as a forward."""
    return mk.simulate(
        mk.Plan.pipeline("1f1b", 4, m), forward=forward, input_grad=forward, weight_grad=forward
    )


# %% answer
### BEGIN SOLUTION
# instead: reading = {
# instead:     "the slow stage": ...,
# instead:     "share of the step that rank 0 is idle": ...,
# instead:     "seconds, four equal stages": ...,
# instead:     "seconds, twice as many micro-batches of half the size": ...,
# instead:     "seconds, the slow stage on a GPU twice as fast": ...,
# instead: }
slowest, whole, step = max(FORWARD), sum(FORWARD), run().makespan
work = M * 3 * slowest  # seconds that the slow stage computes
reading = {
    "the slow stage": FORWARD.index(slowest),
    # rank 0 works for a forward and a backward of each micro-batch
    "share of the step that rank 0 is idle": 1 - M * 3 * FORWARD[0] / step,
    # m + p - 1 slots of a forward and a backward
    "seconds, four equal stages": (M + 3) * 3 * whole / 4,
    # the slow stage works as long as before; filling and draining takes half as long
    "seconds, twice as many micro-batches of half the size": work + (step - work) / 2,
    # it still sets the pace, and the others' forward and backward fill and drain
    "seconds, the slow stage on a GPU twice as fast": work / 2 + 3 * (whole - slowest),
}
### END SOLUTION


# %% checks
VARIES = {
    "FORWARD": (
        (1.0, 1.2, 2.6, 1.2),
        (1.2, 2.6, 1.0, 1.2),
        (1.0, 1.1, 1.3, 2.6),
        (1.4, 3.0, 1.4, 1.0),
        (1.2, 1.4, 3.0, 1.2),
        (1.0, 1.2, 1.4, 3.0),
        (1.1, 2.4, 1.0, 1.1),
        (1.0, 0.8, 2.4, 1.0),
        (0.9, 1.1, 1.2, 2.4),
    ),
    "M": (10, 12, 14, 16),
}
TWICE = 2 * M
STAGE = FORWARD.index(max(FORWARD))
ORDINAL = ("first", "second", "third", "fourth")[STAGE]
EQUAL_SHARE, OF_OTHERS = sum(FORWARD) / 4, (sum(FORWARD) - max(FORWARD)) / 3
WORK = M * 3 * max(FORWARD)


def truth(room: Room) -> Mapping[str, float | int]:
    """Return the right values, by simulation."""
    t = run()
    half = tuple(each / 2 for each in FORWARD)
    faster = tuple(each / 2 if stage == STAGE else each for stage, each in enumerate(FORWARD))
    right = (
        STAGE,
        t.idle[0] / t.makespan,
        run((EQUAL_SHARE,) * 4).makespan,
        run(half, TWICE).makespan,
        run(faster).makespan,
    )
    return dict(zip(reading, right, strict=True))


SLOW, IDLE, EQUAL, MORE, FASTER = reading

SLOWEST = max(FORWARD)
ALL_WORK = M * 3 * EQUAL_SHARE
FORWARDS = " + ".join(map(str, FORWARD))
WHOLE = sum(FORWARD)
HALF = max(FORWARD) / 2

EXERCISE = Questions(
    solution=reading,
    called="reading",
    truth=truth,
    within={FASTER: 0.05},
    after="05-real-models",
    place=15,
    when={
        "the-one-that-waits-is-slow": lambda seen: read_answer(seen, SLOW) == 0,
        "more-micro-batches-cure-it": lambda seen: (
            isinstance(read_answer(seen, MORE), int | float) and read_answer(seen, MORE) < 0.995 * WORK
        ),
        "no-bubble-when-equal": lambda seen: is_near(seen, EQUAL, M * 3 * EQUAL_SHARE),
        "equal-to-the-others": lambda seen: is_near(seen, EQUAL, (M + 3) * 3 * OF_OTHERS),
        "half-the-step-with-twice-the-gpu": lambda seen: (
            is_near(seen, FASTER, run().makespan / 2) or is_near(seen, FASTER, WORK / 2)
        ),
    },
)
