"""An uneven pipeline.

1F1B over four GPUs, 12 micro-batches, and somebody has cut the model badly. `run()` is the timeline: `print` it, read
`.busy`, `.idle` and `.makespan`. In all, the ranks compute as much as they have to; only who does what can be changed.

Find the slow stage, and predict the seconds of a step after each of three changes, before you try them:

- the same work, cut into four equal stages,
- the same cut, but 24 micro-batches of half the size,
- the same cut, but the slow stage's GPU replaced by one that is twice as fast.

A prediction may be off by 5 %. Then see: `run(forward=[...])`, with the seconds of a forward of each stage, and `m`.
"""

from __future__ import annotations

from collections.abc import Mapping

import mpkit as mk
from mpkit.classroom.framework.exercise import Mistake
from mpkit.classroom.framework.questions import Questions
from mpkit.classroom.framework.room import Room
from mpkit.classroom.lab import given, near


# %% given
def run(forward: tuple[float, ...] = (1.0, 1.2, 2.6, 1.2), m: int = 12) -> mk.Timeline:
    """Simulate 1F1B over four stages; a backward takes twice as long as a forward."""
    return mk.simulate(
        mk.Plan.pipeline("1f1b", 4, m), forward=forward, input_grad=forward, weight_grad=forward
    )


# %% answer
reading = {
    ### BEGIN SOLUTION
    # instead: "the slow stage": ...,
    # instead: "share of the step that rank 0 is idle": ...,
    # instead: "seconds, four equal stages": ...,
    # instead: "seconds, 24 micro-batches of half the size": ...,
    # instead: "seconds, the slow stage on a GPU twice as fast": ...,
    "the slow stage": 2,
    # it works for 36 of 101.2 seconds
    "share of the step that rank 0 is idle": 0.644,
    # (m + p - 1) slots of 3 x 1.5 s
    "seconds, four equal stages": 15 * 4.5,
    # the slow stage works as long as before; filling and draining takes half as long
    "seconds, 24 micro-batches of half the size": 93.6 + 7.6 / 2,
    # 1.3 s are the slowest forward now
    "seconds, the slow stage on a GPU twice as fast": 12 * 3.9 + 3 * (1.0 + 1.2 + 1.2),
    ### END SOLUTION
}


# %% checks
def truth(room: Room) -> Mapping[str, float | int]:
    """Return the right values, by simulation."""
    t = run()
    right = (
        2,
        t.idle[0] / t.makespan,
        run((1.5, 1.5, 1.5, 1.5)).makespan,
        run((0.5, 0.6, 1.3, 0.6), 24).makespan,
        run((1.0, 1.2, 1.3, 1.2)).makespan,
    )
    return dict(zip(reading, right, strict=True))


SLOW, IDLE, EQUAL, MORE, FASTER = reading

EXERCISE = Questions(
    solution=reading,
    called="reading",
    truth=truth,
    within={IDLE: 0.02, EQUAL: 0.05, MORE: 0.05, FASTER: 0.05},
    after="05-real-models",
    place=15,
    start="Print the timeline. Which row has hardly a gap? How long does that rank work in all?",
    mistakes=(
        Mistake(
            "counts-stages-from-1",
            (
                "How are stages counted in this kit, and which row of the picture is the first?",
                "Stages and ranks are counted from 0. The third row is stage 2.",
            ),
            [('"the slow stage": 2', '"the slow stage": 3')],
        ),
        Mistake(
            "the-one-that-waits-is-slow",
            (
                "Rank 0 has the longest gaps. Is it slow, or does it wait for somebody who is?",
                "The rank that never waits is the one that all others wait for. Look for the largest `.busy`.",
            ),
            [('"the slow stage": 2', '"the slow stage": 0')],
            when=lambda seen: given(seen, SLOW) == 0,
        ),
        Mistake(
            "more-micro-batches-cure-it",
            (
                "How many seconds does stage 2 work in all, with 12 micro-batches, and with 24 of half the size?",
                "It has the same work to do. Smaller micro-batches make filling and draining shorter, and not the "
                "slow stage faster: imbalance is no bubble.",
                "12 × 3 × 2.6 s of work for stage 2, and half of what comes before and after it.",
            ),
            [("93.6 + 7.6 / 2", "101.2 / 2")],
            when=lambda seen: isinstance(given(seen, MORE), int | float) and given(seen, MORE) < 93,
        ),
        Mistake(
            "no-bubble-when-equal",
            (
                "Equal stages: does a step take as long as the work of one of them?",
                "All work, divided by four, is what each rank computes: 54 s. The pipeline still fills and drains: "
                "m+p-1 slots, not m.",
            ),
            [("15 * 4.5", "12 * 4.5")],
            when=lambda seen: near(seen, EQUAL, 54.0),
        ),
        Mistake(
            "equal-to-the-others",
            (
                "Where has the work of the slow stage gone?",
                "Cutting anew moves layers, it does not make them vanish: 1 + 1.2 + 2.6 + 1.2 = 6 seconds of "
                "forward, 1.5 for each stage.",
            ),
            [("15 * 4.5", "15 * 3.4")],
            when=lambda seen: near(seen, EQUAL, 15 * 3.4),
        ),
        Mistake(
            "half-the-step-with-twice-the-gpu",
            (
                "Once stage 2 takes 1.3 s, which stage sets the pace?",
                "Stage 2 is still the slowest, but not by much, and filling and draining goes through all stages: "
                "those of the others take what they took.",
                "12 × 3 × 1.3 s for stage 2, and a forward and a backward of the other three.",
            ),
            [("12 * 3.9 + 3 * (1.0 + 1.2 + 1.2)", "101.2 / 2")],
            when=lambda seen: near(seen, FASTER, 50.6) or near(seen, FASTER, 46.8),
        ),
    ),
    otherwise=(
        "Read `run().busy`: how long each rank works. The step is the slowest rank's work, and filling and draining.",
    ),
)
