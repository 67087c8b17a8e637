"""Double the link.

Three runs on four GPUs each. Predict how many seconds a step would take if the link between the GPUs had twice the
bandwidth, everything else as it is:

    A    DDP over PCIe            B    DDP over NVLink            C    a pipeline over NVLink

Latency stays as it is, and so does all that is computed. Read the timelines first: how long does communication take,
from when to when, and how much of it is hidden behind the backward? `run("A")` is a timeline: `.step_time`,
`.comm_time`, `.exposed_comm` (seconds by rank), and `print` or `.show()` it. A prediction may be off by 3 %.

The replay decides. When you are done, see it: `mpkit.classroom.lab.puzzle("double-the-link", "A", link=2).show()`.
"""

from __future__ import annotations

from collections.abc import Mapping

import mpkit as mk
from mpkit.classroom.framework.exercise import Mistake
from mpkit.classroom.framework.questions import Questions
from mpkit.classroom.framework.room import Room
from mpkit.classroom.lab import near, puzzle


# %% given
def run(letter: str) -> mk.Timeline:
    """Return the timeline of run A, B or C."""
    from mpkit.classroom.lab import puzzle

    return puzzle("double-the-link", letter)


# %% answer
seconds_of_a_step = {
    ### BEGIN SOLUTION
    # instead: "A": ...,
    # instead: "B": ...,
    # instead: "C": ...,
    # The all-reduces begin when they began, and take half as long, 7.8 ms; 4.5 ms are hidden as before, 3.3 exposed.
    "A": 0.0233 - 0.0110 + 0.0033,
    # Only the last bucket is exposed, 0.5 ms: half of it is left.
    "B": 0.0928 - 0.0005 / 2,
    # Messages are short: what ranks wait for is other ranks.
    "C": 0.288,
    ### END SOLUTION
}


# %% checks
def truth(room: Room) -> Mapping[str, float]:
    """Return the right values, by replaying the run."""
    return {letter: puzzle("double-the-link", letter, link=2, room=room).step_time for letter in "ABC"}


EXERCISE = Questions(
    solution=seconds_of_a_step,
    called="seconds_of_a_step",
    truth=truth,
    within={"A": 0.03, "B": 0.03, "C": 0.03},
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
                ("0.0233 - 0.0110 + 0.0033", "0.0233 / 2"),
                ("0.0928 - 0.0005 / 2", "0.0928 / 2"),
                ("0.288", "0.288 / 2"),
            ],
            when=lambda seen: any(near(seen, letter, run(letter).step_time / 2) for letter in "ABC"),
        ),
        Mistake(
            "halves-what-is-exposed",
            (
                "In A, communication takes half as long. Which part of it is still exposed then: half of what was?",
                "The backward hides as many seconds as before, if there are as many to hide. So what is exposed "
                "shrinks by half of *all* communication, not by half of what was exposed.",
                "comm_time/2 is left, of which comm_time - exposed_comm is hidden as before; the rest is exposed.",
            ),
            [("0.0233 - 0.0110 + 0.0033", "0.0233 - 0.0110 / 2")],
            when=lambda seen: near(seen, "A", run("A").step_time - run("A").exposed_comm[0] / 2),
        ),
        Mistake(
            "all-communication-goes",
            (
                "Twice the bandwidth is not an endless one. How long do A's all-reduces take then, and how long its "
                "backward?",
                "Half of 15 ms are still longer than the 4 ms that the backward hides.",
            ),
            [("0.0233 - 0.0110 + 0.0033", "0.0233 - 0.0110")],
            when=lambda seen: near(seen, "A", run("A").step_time - run("A").exposed_comm[0]),
        ),
        Mistake(
            "a-pipeline-waits-for-its-link",
            (
                "In C the GPUs wait half of the time. Is it for messages that are on their way?",
                "They wait for other ranks to compute. Messages take 1.5 of C's 288 milliseconds: a faster link does "
                "nothing for a bubble.",
                "C stays as it is.",
            ),
            [("0.288", "0.288 - 0.146 / 2")],
            when=lambda seen: near(seen, "C", run("C").step_time * (1 - run("C").bubble / 2), 0.1),
        ),
        Mistake(
            "nothing-changes",
            (
                "In which of the three does something wait for the link?",
                "A waits for its all-reduces for about half of the step: `.exposed_comm[0]`. That does get shorter.",
            ),
            [("0.0233 - 0.0110 + 0.0033", "0.0233")],
            when=lambda seen: near(seen, "A", run("A").step_time),
        ),
    ),
    otherwise=(
        "Answer with seconds, as `.step_time` has them. For each run: what is the step made of, and what of it is "
        "the link's?",
    ),
)
