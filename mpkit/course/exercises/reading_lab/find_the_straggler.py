"""Find the straggler.

A DDP training on eight GPUs in two nodes, recorded by torch.profiler: a file per rank, four steps, three all-reduces
per step. `trace()` opens the files as `mk.open` does yours. All eight GPUs seem to spend a third of their time in all-
reduce, and that says nothing about the network: NCCL's kernel begins when *its* rank comes to the all-reduce, and ends
when all have come and the bytes have been sent. So a rank waits, in an all-reduce, from its own start until the last
rank's start. Charge all of that waiting to the rank that came last.

- Which rank do the others wait for most, over all steps?
- How many seconds do the others wait for it, all together, in all all-reduces in which it came last?
- Which share is that of all waiting of all ranks? (0.5 for a half)
- One other rank made everybody wait as well, in a single step: which rank? It is no straggler, it loaded one batch
  late.

`trace().timeline().to_dataframe()` has a row for each span: rank, lane, kind, start and end in seconds, step. The k-th
all-reduce of one rank in a step is the k-th of all others. Seconds and share may be off by 2 %.

Source: Lin et al., "Understanding Stragglers in Large Model Training Using What-if Analysis", OSDI 2025.
"""

from __future__ import annotations

from collections.abc import Mapping

import mpkit as mk
from mpkit.course.framework.exercise import Mistake
from mpkit.course.framework.questions import Questions
from mpkit.course.framework.room import Room
from mpkit.course.lab import is_near, read_answer
from mpkit.course.lab.profiled import arrivals

# %% given
SHEET = 0  # which trace


def trace() -> mk.Trace:
    """Return the trace of eight ranks, opened from torch.profiler's files."""
    from mpkit.course.lab.profiled import open_profiles

    return open_profiles(SHEET)


# %% answer
### BEGIN SOLUTION
# instead: straggler = {
# instead:     "rank": ...,
# instead:     "seconds waited for it": ...,
# instead:     "share of all waiting": ...,
# instead:     "rank that was late once": ...,
# instead: }
# spans = trace().timeline().to_dataframe()
# rows = spans[spans["kind"] == "all_reduce"].sort_values("start")
# starts = [rows[rows["rank"] == r]["start"].tolist() for r in range(8)], and for each of the twelve all-reduces
# the last start, its rank, and how long the other seven have been there: this is what the traces show
shown = (
    (5, 0.0853, 0.751, 2),
    (3, 0.0671, 0.692, 6),
    (6, 0.0777, 0.727, 1),
    (1, 0.0827, 0.738, 4),
    (4, 0.0722, 0.710, 7),
    (2, 0.0789, 0.728, 5),
    (7, 0.0852, 0.750, 3),
    (0, 0.0760, 0.721, 6),
)
rank, seconds, share, late = shown[SHEET]
straggler = {
    "rank": rank,
    "seconds waited for it": seconds,
    "share of all waiting": share,
    "rank that was late once": late,
}
### END SOLUTION


# %% checks
VARIES = {"SHEET": tuple(range(8))}
SENDING = 0.0007  # seconds of an all-reduce, once all ranks have come
RANK, WAITED, SHARE, LATE = straggler


def charged() -> list[float]:
    """Return, by rank, the seconds that the others waited for it, from when the ranks came to the all-reduces."""
    waited = [0.0] * 8
    for arrival in arrivals(SHEET):
        last = max(arrival.at)
        waited[arrival.at.index(last)] += sum(last - at for at in arrival.at) * 1e-6
    return waited


def truth(room: Room) -> Mapping[str, float | int]:
    """Return the right values."""
    waited = charged()
    first, second = sorted(range(8), key=lambda rank: -waited[rank])[:2]
    return dict(zip(straggler, (first, waited[first], waited[first] / sum(waited), second), strict=True))


EXERCISE = Questions(
    solution=straggler,
    called="straggler",
    truth=truth,
    within={WAITED: 0.02, SHARE: 0.02},
    after="11-your-gpu-trace",
    place=70,
    start="`rows = trace().timeline().to_dataframe()`, and of these the ones with kind 'all_reduce'. For the "
    "first all-reduce of "
    "step 0, print the start on each rank: which is the last?",
    mistakes=(
        Mistake(
            "who-waits-most-is-the-victim",
            (
                "Your rank spends much time in all-reduce. What does it do there?",
                "It waits. The rank that all wait for comes last, and has the *shortest* all-reduces of all.",
                "Per all-reduce, find the rank with the last start.",
            ),
            [('"rank": rank', '"rank": next(r for r in range(8) if r not in (rank, late))')],
            when=lambda seen: (
                isinstance(read_answer(seen, RANK), int) and read_answer(seen, RANK) not in (rank, late)
            ),
        ),
        Mistake(
            "once-is-no-straggler",
            (
                "In how many steps do the others wait for your rank?",
                "In one. The straggler makes them wait in all the others, each time for less, and for more in the end.",
            ),
            [('"rank": rank', '"rank": late'), ('late once": late', 'late once": rank')],
            when=lambda seen: read_answer(seen, RANK) == late,
        ),
        Mistake(
            "the-straggler-twice",
            (
                "In step 1 the ranks wait for somebody else. Whose forward begins late there?",
                "The straggler comes last in three of four steps. In the other one look at the last starts once more.",
            ),
            [('late once": late', 'late once": rank')],
            when=lambda seen: read_answer(seen, LATE) == rank,
        ),
        Mistake(
            "sending-is-no-waiting",
            (
                "When all ranks have come, what is an all-reduce doing?",
                "It sends, for 0.7 ms each time, and that is not the straggler's fault. Count from a rank's "
                "start to the last "
                "start, not to the end.",
            ),
            [('waited for it": seconds', 'waited for it": seconds + 9 * 7 * 0.0007')],
            when=lambda seen: is_near(seen, WAITED, seconds + 9 * 7 * SENDING),
        ),
        Mistake(
            "seven-ranks-wait",
            (
                "How many ranks wait while the last one is under way?",
                "Seven, and the question is about all of them together.",
            ),
            [('waited for it": seconds', 'waited for it": seconds / 7')],
            when=lambda seen: is_near(seen, WAITED, seconds / 7),
        ),
        Mistake(
            "one-step-only",
            (
                "Of how many steps is the waiting that you have added up?",
                "There are four, and the straggler comes last in three of them: add up all twelve all-reduces.",
            ),
            [('waited for it": seconds', 'waited for it": seconds / 3')],
            when=lambda seen: is_near(seen, WAITED, seconds / 3, 0.05),
        ),
        Mistake(
            "percent",
            ("Is 0.5 or 50 a half?", "The question is about a share: between 0 and 1."),
            [('waiting": share', 'waiting": 100 * share')],
            when=lambda seen: is_near(seen, SHARE, 100 * share) or read_answer(seen, SHARE) > 1,
        ),
        Mistake(
            "share-of-the-all-reduces",
            (
                "What is your number a share of?",
                "Of the time in all-reduce, sending included. The question is about all *waiting*: what you "
                "charge to the "
                "straggler over what you charge to anybody.",
            ),
            [('waiting": share', 'waiting": seconds / (seconds / share + 12 * 8 * 0.0007)')],
            when=lambda seen: is_near(seen, SHARE, seconds / (seconds / share + 12 * 8 * SENDING), 0.03),
        ),
    ),
    otherwise=(
        "For each of the twelve all-reduces, write down the rank that starts last, and by how much the others "
        "were earlier.",
        "`trace().timeline().diagnose()` names the rank, and gives its share for one step.",
    ),
)
