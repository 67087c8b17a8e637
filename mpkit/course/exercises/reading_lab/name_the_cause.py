"""Name the cause.

Five runs on four GPUs each, A to E. For each say what costs most of the time in which a GPU does not compute:

    "imbalance"               one rank has more work than the others, and they wait for it
    "exposed communication"   a collective is under way, and nobody computes meanwhile
    "bubble"                  the pipeline fills and drains: ranks wait for work that is not there yet, or no more
    "host copy"               something goes between the GPU's memory and the host's
    "nothing"                 the GPUs compute nearly all the time

`run("A")` is a timeline: `print` it, or `.show()` it in a notebook, where messages and copies have lanes of their own.
`.busy` and `.idle` are seconds by rank, `.comm_time` and `.exposed_comm` those of communication, all of it and what no
compute hides.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import permutations

import mpkit as mk
from mpkit.course.framework.exercise import Mistake
from mpkit.course.framework.questions import Questions
from mpkit.course.framework.room import Room
from mpkit.course.lab import puzzle, read_answer
from mpkit.trace import Lane

# %% given
SHEET = "ABCDE"  # which run has which letter


def run(letter: str) -> mk.Timeline:
    """Return the timeline of run A, B, C, D or E."""
    from mpkit.course.lab import puzzle

    return puzzle("name-the-cause", letter, SHEET)


# %% answer
causes = {
    ### BEGIN SOLUTION
    # instead: "A": ...,
    # instead: "B": ...,
    # instead: "C": ...,
    # instead: "D": ...,
    # instead: "E": ...,
    SHEET[0]: "bubble",
    SHEET[1]: "exposed communication",
    SHEET[2]: "nothing",
    SHEET[3]: "host copy",
    SHEET[4]: "imbalance",
    ### END SOLUTION
}


# %% checks
VARIES = {"SHEET": tuple(map("".join, permutations("ABCDE")))}
BUBBLE, EXPOSED, NOTHING, COPY, UNEVEN = tuple(SHEET)


def cause(t: mk.Timeline) -> str:
    """Return the largest part of the idle time, as the kit counts it."""
    from mpkit.timeline.idleness import CAUSES, idle_by_cause

    if t.bubble < 0.05:
        return "nothing"
    copies = t.spans[t.spans["lane"] == Lane.HOST]
    seconds = dict(zip(CAUSES, idle_by_cause(t).sum(axis=0).tolist(), strict=True))
    seconds_by_cause = {
        "imbalance": seconds["imbalance"],
        "exposed communication": sum(t.exposed_comm),
        "bubble": seconds["warm-up"] + seconds["cool-down"] + seconds["message"] - sum(t.exposed_comm),
        "host copy": float((copies["end"] - copies["start"]).sum()),
    }
    return max(seconds_by_cause, key=seconds_by_cause.__getitem__)


def truth(room: Room) -> Mapping[str, str]:
    """Return each run's cause, computed from its timeline."""
    return {letter: cause(puzzle("name-the-cause", letter, SHEET, room=room)) for letter in "ABCDE"}


EXERCISE = Questions(
    solution=causes,
    called="causes",
    truth=truth,
    after="04-schedules",
    place=10,
    start="Print the five timelines, one after the other. Where is a rank idle: at the ends, in the middle, on all "
    "ranks alike?",
    mistakes=(
        Mistake(
            "every-gap-is-a-bubble",
            (
                "All five have gaps, but not every gap is a bubble. In which is one rank never idle, while the "
                "others are?",
                "A bubble is there with stages that are equal, too: the pipeline fills and drains. Where one rank "
                "works all the time and its neighbours wait for it in every micro-batch, the work is not cut evenly.",
                f"Compare `.busy` of {BUBBLE} and of {UNEVEN}, rank by rank.",
            ),
            [('"imbalance"', '"bubble"')],
        ),
        Mistake(
            "imbalance-for-a-bubble",
            (
                f"How much do the ranks of {BUBBLE} work, each of them? Look at `.busy`.",
                "They work about as long as each other, and yet each is idle about half of the time: there are few "
                "micro-batches to fill the pipeline with. That is the bubble.",
            ),
            [('"bubble"', '"imbalance"')],
        ),
        Mistake(
            "all-communication-costs",
            (
                f"In {NOTHING} there is communication during the backward. What does the compute lane do meanwhile?",
                "Communication that is hidden behind compute costs nothing. Only what is exposed does: compare "
                "`.comm_time` and `.exposed_comm`, and both with `.step_time`.",
            ),
            [('"nothing"', '"exposed communication"')],
        ),
        Mistake(
            "copies-are-not-communication",
            (
                f"In which lane is what {COPY} waits for? Between which two memories does it go?",
                f"{COPY}'s gap before and after the optimizer's step is no collective: its communication is short. It "
                "is a copy between the GPU and its host, where the optimizer's states are kept.",
                '`t.to_dataframe()` has the lane of each span: "compute", "comm" or "host".',
            ),
            [('"host copy"', '"exposed communication"')],
        ),
        Mistake(
            "waiting-for-the-all-reduce",
            (
                f"In {EXPOSED} all GPUs wait together, after the backward. Would other micro-batches help? There is no "
                "pipeline.",
                f"What {EXPOSED} waits for is the all-reduce of its gradients, most of which is still to do when the "
                "backward ends.",
            ),
            [('"exposed communication"', '"bubble"')],
            when=lambda seen: read_answer(seen, EXPOSED) in ("bubble", "imbalance", "host copy", "nothing"),
        ),
    ),
    otherwise=(
        'The answers are words: "imbalance", "exposed communication", "bubble", "host copy", "nothing", '
        "each once.",
        "First sort out the pipelines: in which runs do the GPUs do different things at the same time?",
    ),
)
