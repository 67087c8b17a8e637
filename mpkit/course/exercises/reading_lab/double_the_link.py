"""A faster link."""

from collections.abc import Mapping

from mpkit.course.author import *
from mpkit.course.lab import puzzle

# %% given
FACTOR = 2  # times the bandwidth


def run(letter: str) -> mk.Timeline:
    """Return the timeline of run A, B or C."""
    from mpkit.course.lab import puzzle

    return puzzle("double-the-link", letter)


# %% answer
seconds_of_a_step = {
    ### BEGIN SOLUTION
    # instead: "A": ...,
    # instead: "B": ...,
    # instead: "C": ...,
    # The all-reduces, 15.5 ms, begin when they began and take less; 4.5 ms are hidden as before, the rest is exposed.
    "A": 0.0233 - 0.0110 + (0.0155 / FACTOR - 0.0045),
    # Only the last bucket is exposed, 0.5 ms: that gets shorter.
    "B": 0.0928 - 0.0005 * (1 - 1 / FACTOR),
    # Messages are short: what ranks wait for is other ranks.
    "C": 0.288,
    ### END SOLUTION
}


# %% checks


def truth(room: Room) -> Mapping[str, float]:
    """Return the right values, by replaying the run."""
    return {letter: puzzle("double-the-link", letter, link=FACTOR, room=room).step_time for letter in "ABC"}


EXERCISE = Questions(within=dict.fromkeys("ABC", 0.03))
