"""Double the micro-batches.

GPipe, 4 stages, 4 micro-batches; a forward takes 1 second, a backward 2. `now()` is its timeline. Predict, before you
simulate:

- *the same batch, cut into 8*: each action takes half as long. Its bubble, and the seconds of a step?
- *twice the batch, in 8 micro-batches of the old size*: the seconds of a step? How many micro-batches' activations does
  the fullest rank hold, with GPipe, and with 1F1B?
- *an action has a price*: in fact an action on a GPU takes 0.2 s however small it is, and the rest of its time goes by
  its size. So with the batch cut into m, a forward takes 0.2 + 0.8 × 4/m seconds, a backward twice that. Which m
  of 2, 4, 8, 16, 32 and 64 has the shortest step?

Then see: `mk.simulate(mk.Plan.gpipe(4, 8), forward=0.5, input_grad=0.5, weight_grad=0.5)`.
"""

from __future__ import annotations

from collections.abc import Mapping

import mpkit as mk
from mpkit.classroom.framework.exercise import Mistake
from mpkit.classroom.framework.questions import Questions
from mpkit.classroom.framework.room import Room
from mpkit.classroom.lab import given, near


# %% given
def now() -> mk.Timeline:
    """Simulate GPipe as it is now."""
    return mk.simulate(mk.Plan.gpipe(4, 4))


# %% answer
predictions = {
    ### BEGIN SOLUTION
    # instead: "the same batch: bubble": ...,
    # instead: "the same batch: seconds of a step": ...,
    # instead: "twice the batch: seconds of a step": ...,
    # instead: "twice the batch: live micro-batches, GPipe": ...,
    # instead: "twice the batch: live micro-batches, 1F1B": ...,
    # instead: "an action has a price: best m": ...,
    "the same batch: bubble": 3 / 11,
    "the same batch: seconds of a step": 16.5,
    "twice the batch: seconds of a step": 33.0,
    "twice the batch: live micro-batches, GPipe": 8,
    "twice the batch: live micro-batches, 1F1B": 4,
    "an action has a price: best m": 8,
    ### END SOLUTION
}


# %% checks
def step(m: int, forward: float) -> mk.Timeline:
    """Simulate GPipe with m micro-batches."""
    return mk.simulate(mk.Plan.gpipe(4, m), forward=forward, input_grad=forward, weight_grad=forward)


def live(schedule: str) -> int:
    """Return how many micro-batches the fullest rank holds."""
    t = mk.simulate(mk.Plan.pipeline(schedule, 4, 8))
    return max(held["activations"] for held in t.peak_memory)


def truth(room: Room) -> Mapping[str, float | int]:
    """Return the right values, by simulation."""
    priced = {m: step(m, 0.2 + 0.8 * 4 / m).makespan for m in (2, 4, 8, 16, 32, 64)}
    right = (
        step(8, 0.5).bubble,
        step(8, 0.5).makespan,
        step(8, 1.0).makespan,
        live("gpipe"),
        live("1f1b"),
        min(priced, key=priced.__getitem__),
    )
    return dict(zip(predictions, right, strict=True))


BUBBLE, SAME, TWICE, GPIPE, ONE, PRICE = predictions

EXERCISE = Questions(
    solution=predictions,
    called="predictions",
    truth=truth,
    after="01-pipeline-bubbles",
    place=30,
    start="Begin with the formula: the bubble is (p-1)/(m+p-1). What are p and m before and after?",
    mistakes=(
        Mistake(
            "half-the-bubble",
            (
                "Twice the micro-batches: is the bubble half of what it was? What does the formula say?",
                "The ranks are idle for p-1 micro-batches' time, of m+p-1 in all. Doubling m does not double m+p-1: "
                "3/7 becomes 3/11, and not 3/14.",
            ),
            [("3 / 11", "3 / 14")],
            when=lambda seen: near(seen, BUBBLE, 3 / 14),
        ),
        Mistake(
            "megatron-s-bubble",
            (
                "By what do you divide the idle time: by the work, or by the whole step?",
                "(p-1)/m is Megatron's definition, idle time over work. Here the bubble is the idle share of the "
                "span, as GPipe has it: (p-1)/(m+p-1).",
            ),
            [("3 / 11", "3 / 8")],
            when=lambda seen: near(seen, BUBBLE, 3 / 8),
        ),
        Mistake(
            "half-the-step",
            (
                "An action takes half as long. How many of them are one after the other, on the way from the first "
                "to the last?",
                "There are m+p-1 slots of a forward and a backward: 7 before, 11 now, each 1.5 s instead of 3 s.",
            ),
            [("16.5", "10.5")],
            when=lambda seen: near(seen, SAME, 10.5) or near(seen, SAME, 21.0) or near(seen, SAME, 12.0),
        ),
        Mistake(
            "twice-the-step",
            (
                "Twice the batch takes less than twice the time. Which part of the step does not grow with it?",
                "The pipeline is filled and drained once, whatever m is: m+p-1 = 11 slots of 3 seconds, not 2 × 7.",
            ),
            [("33.0", "42.0")],
            when=lambda seen: near(seen, TWICE, 42.0) or near(seen, TWICE, 24.0),
        ),
        Mistake(
            "1f1b-grows-with-m",
            (
                "When can 1F1B's first rank let go of its first micro-batch?",
                "GPipe holds all m of them, since all forwards come first. 1F1B begins its backwards after p "
                "forwards at the latest: it holds p, however many there are.",
            ),
            [('live micro-batches, 1F1B": 4', 'live micro-batches, 1F1B": 8')],
            when=lambda seen: given(seen, ONE) == 8 or given(seen, GPIPE) == 4,
        ),
        Mistake(
            "the-more-the-better",
            (
                "Write down the seconds of a step for m = 8, 16 and 32, each with its price.",
                "A step takes (m + 3) × 3 × (0.2 + 3.2/m). More micro-batches make the bubble smaller, and every one "
                "of them costs its 0.2 s: at some m it is too many.",
            ),
            [('best m": 8', 'best m": 64')],
            when=lambda seen: isinstance(given(seen, PRICE), int),
        ),
    ),
    otherwise=(
        "Draw `print(now())`, and count slots: how many forwards fit side by side from the first to the last?",
    ),
)
