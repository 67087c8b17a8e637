"""Name the cause."""

from collections.abc import Mapping

from mpkit.course.author import *
from mpkit.course.lab import puzzle

# %% given


def run(letter: str) -> mk.Timeline:
    """Return the timeline of run A, B, C, D or E."""
    from mpkit.course.lab import puzzle

    return puzzle("name-the-cause", letter)


# %% answer
causes = {
    ### BEGIN SOLUTION
    # instead: "A": ...,
    # instead: "B": ...,
    # instead: "C": ...,
    # instead: "D": ...,
    # instead: "E": ...,
    "A": "bubble",
    "B": "exposed communication",
    "C": "nothing",
    "D": "host copy",
    "E": "imbalance",
    ### END SOLUTION
}


# %% checks


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
        "bubble": seconds["warm-up"] + seconds["cool-down"] + seconds["dependency"] - sum(t.exposed_comm),
        "host copy": float((copies["end"] - copies["start"]).sum()),
    }
    return max(seconds_by_cause, key=seconds_by_cause.__getitem__)


def truth(room: Room) -> Mapping[str, str]:
    """Return each run's cause, computed from its timeline."""
    return {letter: cause(puzzle("name-the-cause", letter, room=room)) for letter in "ABCDE"}


EXERCISE = Questions()
