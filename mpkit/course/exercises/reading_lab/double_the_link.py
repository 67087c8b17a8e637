"""A faster link.

Three runs on four GPUs each. Predict how many seconds a step would take if the link between the GPUs had {FACTOR}
times the bandwidth, everything else as it is:

    {PCIE}    DDP over PCIe            {NVLINK}    DDP over NVLink            {PIPELINE}    a pipeline over NVLink

Latency stays as it is, and so does all that is computed. Read the timelines first: how long does communication take,
from when to when, and how much of it is hidden behind the backward? `run("A")` is a timeline: `.step_time`,
`.comm_time`, `.exposed_comm` (seconds by rank), and `print` or `.show()` it. A prediction may be off by 3 %.

The replay decides. When you are done, see it:
`mpkit.course.lab.puzzle("double-the-link", "A", SHEET, link=FACTOR).show()`.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import permutations

import mpkit as mk
from mpkit.course.framework.exercise import Mistake
from mpkit.course.framework.questions import Questions
from mpkit.course.framework.room import Room
from mpkit.course.lab import is_near, puzzle

# %% given
SHEET = "ABC"  # which run has which letter
FACTOR = 2  # times the bandwidth


def run(letter: str) -> mk.Timeline:
    """Return the timeline of run A, B or C."""
    from mpkit.course.lab import puzzle

    return puzzle("double-the-link", letter, SHEET)


# %% answer
seconds_of_a_step = {
    ### BEGIN SOLUTION
    # instead: "A": ...,
    # instead: "B": ...,
    # instead: "C": ...,
    # The all-reduces, 15.5 ms, begin when they began and take less; 4.5 ms are hidden as before, the rest is exposed.
    SHEET[0]: 0.0233 - 0.0110 + (0.0155 / FACTOR - 0.0045),
    # Only the last bucket is exposed, 0.5 ms: that gets shorter.
    SHEET[1]: 0.0928 - 0.0005 * (1 - 1 / FACTOR),
    # Messages are short: what ranks wait for is other ranks.
    SHEET[2]: 0.288,
    ### END SOLUTION
}


# %% checks
VARIES = {"SHEET": tuple(map("".join, permutations("ABC"))), "FACTOR": (1.5, 1.75, 2)}
PCIE, NVLINK, PIPELINE = tuple(SHEET)
SAVED = 1 - 1 / FACTOR  # share of a message's time


def truth(room: Room) -> Mapping[str, float]:
    """Return the right values, by replaying the run."""
    return {
        letter: puzzle("double-the-link", letter, SHEET, link=FACTOR, room=room).step_time for letter in "ABC"
    }


EXERCISE = Questions(
    solution=seconds_of_a_step,
    called="seconds_of_a_step",
    truth=truth,
    within=dict.fromkeys("ABC", 0.03),
    after="02-data-parallel",
    place=20,
    start="Read `.step_time`, `.comm_time[0]` and `.exposed_comm[0]` of each run. Which of these three would a "
    "faster link change, and by how much?",
    mistakes=(
        Mistake(
            "halves-the-step",
            (
                "Does a faster link make the matrix products faster?",
                "Only communication gets shorter. Forward, backward and optimizer take what they took.",
            ),
            [
                ("0.0233 - 0.0110 + (0.0155 / FACTOR - 0.0045)", "0.0233 / FACTOR"),
                ("0.0928 - 0.0005 * (1 - 1 / FACTOR)", "0.0928 / FACTOR"),
                ("0.288", "0.288 / FACTOR"),
            ],
            when=lambda seen: any(is_near(seen, letter, run(letter).step_time / FACTOR) for letter in "ABC"),
        ),
        Mistake(
            "halves-what-is-exposed",
            (
                f"In {PCIE}, communication gets {FACTOR} times as fast. Does what is exposed of it, too?",
                "The backward hides as many seconds as before, if there are as many to hide. So what is exposed "
                "shrinks by what *all* communication saves, not by its own share of that.",
                f"comm_time/{FACTOR} is left, of which comm_time - exposed_comm is hidden as before; the rest is "
                "exposed.",
            ),
            [("0.0233 - 0.0110 + (0.0155 / FACTOR - 0.0045)", "0.0233 - 0.0110 * (1 - 1 / FACTOR)")],
            when=lambda seen: is_near(seen, PCIE, run(PCIE).step_time - run(PCIE).exposed_comm[0] * SAVED),
        ),
        Mistake(
            "all-communication-goes",
            (
                f"{FACTOR} times the bandwidth is not an endless one. How long do {PCIE}'s all-reduces take "
                "then, and how long its backward?",
                f"15 ms / {FACTOR} are still longer than the 4 ms that the backward hides.",
            ),
            [(" + (0.0155 / FACTOR - 0.0045)", "")],
            when=lambda seen: is_near(seen, PCIE, run(PCIE).step_time - run(PCIE).exposed_comm[0]),
        ),
        Mistake(
            "a-pipeline-waits-for-its-link",
            (
                f"In {PIPELINE} the GPUs wait half of the time. Is it for messages that are on their way?",
                "They wait for other ranks to compute. Messages take 1.5 of the step's 288 milliseconds: a faster "
                "link does nothing for a bubble.",
                f"{PIPELINE} stays as it is.",
            ),
            [("0.288", "0.288 - 0.146 * (1 - 1 / FACTOR)")],
            when=lambda seen: is_near(
                seen, PIPELINE, run(PIPELINE).step_time * (1 - run(PIPELINE).bubble * SAVED), 0.05
            ),
        ),
        Mistake(
            "nothing-changes",
            (
                "In which of the three does something wait for the link?",
                f"{PCIE} waits for its all-reduces for about half of the step: `.exposed_comm[0]`. That does get "
                "shorter.",
            ),
            [("0.0233 - 0.0110 + (0.0155 / FACTOR - 0.0045)", "0.0233")],
            when=lambda seen: is_near(seen, PCIE, run(PCIE).step_time),
        ),
    ),
    otherwise=(
        "Answer with seconds, as `.step_time` has them. For each run: what is the step made of, and what of it is "
        "the link's?",
    ),
)
