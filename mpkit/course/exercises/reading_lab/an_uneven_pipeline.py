"""An uneven pipeline.

1F1B over four GPUs, {M} micro-batches, and somebody has cut the model badly. `run()` is the timeline: `print` it, read
`.busy`, `.idle` and `.makespan`. In all, the ranks compute as much as they have to; only who does what can be changed.

Find the slow stage, and predict the seconds of a step after each of three changes, before you try them:

- the same work, cut into four equal stages,
- the same cut, but {TWICE} micro-batches of half the size,
- the same cut, but the slow stage's GPU replaced by one that is twice as fast.

The last prediction may be off by 5 %, the others by 1 %. Then see: `run(forward=[...])`, with the seconds of a forward
of each stage, and `m`.
"""

from __future__ import annotations

from collections.abc import Mapping

import mpkit as mk
from mpkit.course.framework.exercise import Mistake
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

EXERCISE = Questions(
    solution=reading,
    called="reading",
    truth=truth,
    within={FASTER: 0.05},
    after="05-real-models",
    place=15,
    start="Print the timeline. Which row has hardly a gap? How long does that rank work in all?",
    mistakes=(
        Mistake(
            "counts-stages-from-1",
            (
                "How are stages counted in this kit, and which row of the picture is the first?",
                f"Stages and ranks are counted from 0. The {ORDINAL} row is stage {STAGE}.",
            ),
            [("FORWARD.index(slowest)", "FORWARD.index(slowest) + 1")],
        ),
        Mistake(
            "the-one-that-waits-is-slow",
            (
                "Rank 0 has the longest gaps. Is it slow, or does it wait for somebody who is?",
                "The rank that never waits is the one that all others wait for. Look for the largest `.busy`.",
            ),
            [("FORWARD.index(slowest)", "0")],
            when=lambda seen: read_answer(seen, SLOW) == 0,
        ),
        Mistake(
            "more-micro-batches-cure-it",
            (
                f"How many seconds does stage {STAGE} work in all, with {M} micro-batches, and with {TWICE} of half "
                "the size?",
                "It has the same work to do. Smaller micro-batches make filling and draining shorter, and not the "
                "slow stage faster: imbalance is no bubble.",
                f"{M} × 3 × {max(FORWARD)} s of work for stage {STAGE}, and half of what comes before and after it.",
            ),
            [("work + (step - work) / 2", "step / 2")],
            when=lambda seen: (
                isinstance(read_answer(seen, MORE), int | float) and read_answer(seen, MORE) < 0.995 * WORK
            ),
        ),
        Mistake(
            "no-bubble-when-equal",
            (
                "Equal stages: does a step take as long as the work of one of them?",
                f"All work, divided by four, is what each rank computes: {M * 3 * EQUAL_SHARE:g} s. The pipeline still "
                "fills and drains: m+p-1 slots, not m.",
            ),
            [("(M + 3) * 3", "M * 3")],
            when=lambda seen: is_near(seen, EQUAL, M * 3 * EQUAL_SHARE),
        ),
        Mistake(
            "equal-to-the-others",
            (
                "Where has the work of the slow stage gone?",
                f"Cutting anew moves layers, it does not make them vanish: {' + '.join(map(str, FORWARD))} = "
                f"{sum(FORWARD):g} seconds of forward, {EQUAL_SHARE:g} for each stage.",
            ),
            [("(M + 3) * 3 * whole / 4", "(M + 3) * 3 * (whole - slowest) / 3")],
            when=lambda seen: is_near(seen, EQUAL, (M + 3) * 3 * OF_OTHERS),
        ),
        Mistake(
            "half-the-step-with-twice-the-gpu",
            (
                f"Once stage {STAGE} takes {max(FORWARD) / 2:g} s, which stage sets the pace?",
                f"Stage {STAGE} is still the slowest, but not by much, and filling and draining goes through all "
                "stages: those of the others take what they took.",
                f"{M} × 3 × {max(FORWARD) / 2:g} s for stage {STAGE}, and a forward and a backward of the other three.",
            ),
            [("work / 2 + 3 * (whole - slowest)", "step / 2")],
            when=lambda seen: is_near(seen, FASTER, run().makespan / 2) or is_near(seen, FASTER, WORK / 2),
        ),
    ),
    otherwise=(
        "Read `run().busy`: how long each rank works. The step is the slowest rank's work, and filling and draining.",
    ),
)
