"""Double the micro-batches.

GPipe, {P} stages, {M} micro-batches; a forward takes 1 second, a backward 2. `now()` is its timeline. Predict, before
you simulate:

- *the same batch, cut into {TWICE}*: each action takes half as long. Its bubble, and the seconds of a step?
- *twice the batch, in {TWICE} micro-batches of the old size*: the seconds of a step? How many micro-batches'
  activations does the fullest rank hold, with GPipe, and with 1F1B?
- *an action has a price*: in fact an action on a GPU takes {PRICE} s however small it is, and the rest of its time goes
  by its size. So with the batch cut into m, a forward takes {PRICE} + {REST} × {M}/m seconds, a backward twice that.
  Which m of 2, 4, 8, 16, 32 and 64 has the shortest step?

Then see: `mk.simulate(mk.Plan.gpipe({P}, {TWICE}), forward=0.5, input_grad=0.5, weight_grad=0.5)`.
"""

from __future__ import annotations

from collections.abc import Mapping

import mpkit as mk
from mpkit.course.framework.exercise import Mistake
from mpkit.course.framework.questions import Questions
from mpkit.course.framework.room import Room
from mpkit.course.lab import is_near, read_answer

# %% given
P = 4  # stages
M = 4  # micro-batches
PRICE = 0.2  # seconds


def now() -> mk.Timeline:
    """Simulate GPipe as it is now."""
    return mk.simulate(mk.Plan.gpipe(P, M))


# %% answer
predictions = {
    ### BEGIN SOLUTION
    # instead: "the same batch: bubble": ...,
    # instead: "the same batch: seconds of a step": ...,
    # instead: "twice the batch: seconds of a step": ...,
    # instead: "twice the batch: live micro-batches, GPipe": ...,
    # instead: "twice the batch: live micro-batches, 1F1B": ...,
    # instead: "an action has a price: best m": ...,
    "the same batch: bubble": (P - 1) / (2 * M + P - 1),
    "the same batch: seconds of a step": 1.5 * (2 * M + P - 1),
    "twice the batch: seconds of a step": 3.0 * (2 * M + P - 1),
    "twice the batch: live micro-batches, GPipe": 2 * M,
    "twice the batch: live micro-batches, 1F1B": P,
    "an action has a price: best m": min(
        (2, 4, 8, 16, 32, 64), key=lambda m: (m + P - 1) * (PRICE + (1 - PRICE) * M / m)
    ),
    ### END SOLUTION
}


# %% checks
VARIES = {"P": (3, 4, 5, 6), "M": (4, 5, 6, 7), "PRICE": (0.1, 0.2, 0.3)}
TWICE, REST = 2 * M, round(1 - PRICE, 1)
BEFORE, AFTER = M + P - 1, 2 * M + P - 1  # slots of a forward and a backward


def step(m: int, forward: float) -> mk.Timeline:
    """Simulate GPipe with m micro-batches."""
    return mk.simulate(mk.Plan.gpipe(P, m), forward=forward, input_grad=forward, weight_grad=forward)


def live(schedule: str) -> int:
    """Return how many micro-batches the fullest rank holds."""
    t = mk.simulate(mk.Plan.pipeline(schedule, P, TWICE))
    return max(held["activations"] for held in t.peak_memory)


def truth(room: Room) -> Mapping[str, float | int]:
    """Return the right values, by simulation."""
    priced = {m: step(m, PRICE + REST * M / m).makespan for m in (2, 4, 8, 16, 32, 64)}
    right = (
        step(TWICE, 0.5).bubble,
        step(TWICE, 0.5).makespan,
        step(TWICE, 1.0).makespan,
        live("gpipe"),
        live("1f1b"),
        min(priced, key=priced.__getitem__),
    )
    return dict(zip(predictions, right, strict=True))


BUBBLE, SAME, LONGER, GPIPE, ONE, BEST = predictions

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
                f"{P - 1}/{BEFORE} becomes {P - 1}/{AFTER}, and not {P - 1}/{2 * BEFORE}.",
            ),
            [("(P - 1) / (2 * M + P - 1)", "(P - 1) / (2 * (M + P - 1))")],
            when=lambda seen: is_near(seen, BUBBLE, (P - 1) / (2 * BEFORE)),
        ),
        Mistake(
            "megatron-s-bubble",
            (
                "By what do you divide the idle time: by the work, or by the whole step?",
                "(p-1)/m is Megatron's definition, idle time over work. Here the bubble is the idle share of the "
                "span, as GPipe has it: (p-1)/(m+p-1).",
            ),
            [("(P - 1) / (2 * M + P - 1)", "(P - 1) / (2 * M)")],
            when=lambda seen: is_near(seen, BUBBLE, (P - 1) / TWICE),
        ),
        Mistake(
            "half-the-step",
            (
                "An action takes half as long. How many of them are one after the other, on the way from the first "
                "to the last?",
                f"There are m+p-1 slots of a forward and a backward: {BEFORE} before, {AFTER} now, each 1.5 s "
                "instead of 3 s.",
            ),
            [("1.5 * (2 * M + P - 1)", "1.5 * (M + P - 1)")],
            when=lambda seen: any(
                is_near(seen, SAME, wrong) for wrong in (1.5 * BEFORE, 3.0 * BEFORE, 1.5 * TWICE)
            ),
        ),
        Mistake(
            "twice-the-step",
            (
                "Twice the batch takes less than twice the time. Which part of the step does not grow with it?",
                "The pipeline is filled and drained once, whatever m is: "
                f"m+p-1 = {AFTER} slots of 3 seconds, not 2 × {BEFORE}.",
            ),
            [("3.0 * (2 * M + P - 1)", "6.0 * (M + P - 1)")],
            when=lambda seen: is_near(seen, LONGER, 6.0 * BEFORE) or is_near(seen, LONGER, 3.0 * TWICE),
        ),
        Mistake(
            "1f1b-grows-with-m",
            (
                "When can 1F1B's first rank let go of its first micro-batch?",
                "GPipe holds all m of them, since all forwards come first. 1F1B begins its backwards after p "
                "forwards at the latest: it holds p, however many there are.",
            ),
            [('1F1B": P', '1F1B": 2 * M')],
            when=lambda seen: read_answer(seen, ONE) == TWICE or read_answer(seen, GPIPE) == P,
        ),
        Mistake(
            "the-more-the-better",
            (
                "Write down the seconds of a step for m = 8, 16 and 32, each with its price.",
                f"A step takes (m + {P - 1}) × 3 × ({PRICE} + {REST * M:g}/m). More micro-batches make the bubble "
                f"smaller, and every one of them costs its {PRICE} s: at some m it is too many.",
            ),
            [("(m + P - 1) * (PRICE + (1 - PRICE) * M / m)", "-m")],
            when=lambda seen: isinstance(read_answer(seen, BEST), int),
        ),
    ),
    otherwise=(
        "Draw `print(now())`, and count slots: how many forwards fit side by side from the first to the last?",
    ),
)
