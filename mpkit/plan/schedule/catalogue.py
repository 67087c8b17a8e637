"""The schedules by name: how each is built, and all that is known of it. No other module spells their names.

An entry is all that a new schedule needs: it runs, and is drawn, predicted, exported and advised.

>>> SCHEDULES["zbv"].title, SCHEDULES["zbv"].elsewhere["torchtitan"]
('ZB-V', 'ZBVZeroBubble')
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from mpkit.plan.schedule import schedules
from mpkit.plan.schedule.core import Schedule

__all__ = [
    "GPIPE",
    "INTERLEAVED_1F1B",
    "NAIVE",
    "NAMES",
    "ONE_F_ONE_B",
    "OVERLAPPED_1F1B",
    "SCHEDULES",
    "ZB_H1",
    "ScheduleEntry",
    "build_schedule",
    "has_pairs",
    "names_in",
]

NAIVE, GPIPE, ONE_F_ONE_B, INTERLEAVED_1F1B, ZB_H1 = "naive", "gpipe", "1f1b", "interleaved_1f1b", "zb_h1"
"""The names of schedules that others are compared with or that Plans have by default."""
OVERLAPPED_1F1B = "overlapped_1f1b"
"""The name of the schedule of pairs that a model in one stage has too."""

ANY = 0
"""In an entry: a rank can have any number of stages."""


@dataclass(frozen=True)
class ScheduleEntry:
    """A schedule of the catalogue.

    Attributes:
        build: a function of p ranks, m micro-batches and v stages per rank.
        title: the name that its paper has for it.
        words: what there is to be seen.
        per_rank: stages per rank, v; ANY if it can have any number.
        holds_all: whether ranks hold the activations of all m micro-batches.
        idle: a function of p and m: how long a rank is idle in theory, in forwards of a stage, with F = I = W and
            messages that take no time; None if no paper says so.
        filled: a function of p and m: whether there are enough micro-batches for this theory.
        pairs: whether forwards run as one with backwards (F & B), so that each hides the other's all-to-alls.
        advised: the stages per rank for which `mk.advise` tries it; () where another one is never worse. One with pairs
            is tried where experts are divided.
        elsewhere: the names that other frameworks have for it.
    """

    build: Callable[[int, int, int], Schedule]
    title: str
    words: str
    per_rank: int = 1
    holds_all: bool = False
    idle: Callable[[int, int], int] | None = None
    filled: Callable[[int, int], bool] = lambda p, m: m >= p
    pairs: bool = False
    advised: tuple[int, ...] = ()
    elsewhere: Mapping[str, str] = field(default_factory=dict)

    def stages_per_rank(self, v: int) -> int:
        """Return the stages per rank if v are asked for."""
        return self.per_rank or v

    def can_have(self, v: int) -> bool:
        """Return whether a rank can have v stages; a schedule with any number is another one if they are 1."""
        return v > 1 if self.per_rank == ANY else v == self.per_rank


SCHEDULES: dict[str, ScheduleEntry] = {
    NAIVE: ScheduleEntry(
        lambda p, m, v: schedules.naive(p, m),
        "naive",
        "One micro-batch at a time: while one stage works, all others wait.",
        idle=lambda p, m: 3 * (p - 1) * m,
        filled=lambda p, m: True,
    ),
    GPIPE: ScheduleEntry(
        lambda p, m, v: schedules.gpipe(p, m),
        "GPipe",
        "All forwards, then all backwards. A rank holds the activations of all micro-batches.",
        holds_all=True,
        idle=lambda p, m: 3 * (p - 1),  # (p-1)(F+I+W)
        filled=lambda p, m: True,
        elsewhere={"torchtitan": "GPipe"},
    ),
    ONE_F_ONE_B: ScheduleEntry(
        lambda p, m, v: schedules.one_f_one_b(p, m),
        "1F1B",
        "After a warm-up each rank alternates between one forward and one backward. The bubble is GPipe's, but a rank "
        "holds the activations of at most p micro-batches.",
        idle=lambda p, m: 3 * (p - 1),
        filled=lambda p, m: True,
        advised=(1,),
        elsewhere={"torchtitan": "1F1B", "megatron": "1F1B"},
    ),
    "looped_bfs": ScheduleEntry(
        schedules.looped_bfs,
        "looped BFS",
        "GPipe with two stages per rank: all micro-batches pass a stage before the rank turns to its next one.",
        per_rank=ANY,
        holds_all=True,
        idle=lambda p, m: 3 * (p - 1),
        elsewhere={"torchtitan": "LoopedBFS"},
    ),
    INTERLEAVED_1F1B: ScheduleEntry(
        schedules.interleaved_1f1b,
        "interleaved 1F1B",
        "1F1B with two stages per rank: warm-up and cool-down take half as long, for more than twice as many messages.",
        per_rank=ANY,
        idle=lambda p, m: 3 * (p - 1),
        advised=(2, 4),
        elsewhere={"torchtitan": "Interleaved1F1B", "megatron": "interleaved 1F1B"},
    ),
    OVERLAPPED_1F1B: ScheduleEntry(
        schedules.overlapped_1f1b,
        "1F1B with overlapped pairs",
        "Interleaved 1F1B whose forwards and backwards run in pairs: each computes while the other's tokens travel to "
        "their experts. Each rank holds one activation more.",
        per_rank=ANY,
        idle=lambda p, m: 3 * (p - 1),
        pairs=True,
        advised=(1, 2, 4),
        elsewhere={"megatron": "interleaved 1F1B with --overlap-moe-expert-parallel-comm"},
    ),
    ZB_H1: ScheduleEntry(
        lambda p, m, v: schedules.zb_h1(p, m),
        "ZB-H1",
        "Backwards are split: the stage before waits for the input gradients only, and the weight gradients fill what "
        "would be bubble. No rank holds more activations than 1F1B's first one.",
        idle=lambda p, m: p - 1,  # (p-1)(F+I-W)
        advised=(1,),
    ),
    "zb_h2": ScheduleEntry(
        lambda p, m, v: schedules.zb_h2(p, m),
        "ZB-H2",
        "Split backwards and a longer warm-up: with equal times and free messages no rank waits between its first "
        "action and its last, at almost twice 1F1B's activations. The idle ends of the rows would close up if each "
        "rank went on with the next step at once.",
        idle=lambda p, m: p - 1,  # at the beginning and the end, and 0 in between
    ),
    "zbv": ScheduleEntry(
        lambda p, m, v: schedules.zbv(p, m),
        "ZB-V",
        "Split backwards, and stages in a V: the first rank holds the first stage and the last one, so that it begins "
        "with backwards early.",
        per_rank=2,
        idle=lambda p, m: p - 1,
        filled=lambda p, m: 2 * m >= 3 * p,
        advised=(2,),
        elsewhere={"torchtitan": "ZBVZeroBubble"},
    ),
    "interleaved_zb": ScheduleEntry(
        schedules.interleaved_zb,
        "interleaved zero bubble",
        "Interleaved 1F1B with split backwards, whose weight gradients fill what would be bubble.",
        per_rank=ANY,
        idle=lambda p, m: p - 1,
        elsewhere={"torchtitan": "InterleavedZeroBubble"},
    ),
    "dualpipev": ScheduleEntry(
        lambda p, m, v: schedules.dualpipev(p, m),
        "DualPipe-V",
        "Stages in a V. In the middle of the step, the forward of one micro-batch and the backward of another run as a "
        "pair, and their results leave together when both are done.",
        per_rank=2,
        idle=lambda p, m: 2 * (p - 1),  # (p-1)(F+2B-3W)
        filled=lambda p, m: m >= 2 * p,
        pairs=True,
        advised=(2,),
        elsewhere={"torchtitan": "DualPipeV"},
    ),
}
"""By the name for `Plan(schedule=...)`."""

NAMES = tuple(SCHEDULES)
"""The names of the literature's schedules."""


def names_in(framework: str) -> dict[str, str]:
    """Return what another framework calls the schedules that it has, by their names here.

    >>> names_in("nanotron"), [*names_in("megatron")]
    ({}, ['1f1b', 'interleaved_1f1b', 'overlapped_1f1b'])
    """
    return {
        name: entry.elsewhere[framework] for name, entry in SCHEDULES.items() if framework in entry.elsewhere
    }


def has_pairs(schedule: str | Schedule) -> bool:
    """Return whether a schedule has forwards that run as one with a backward.

    >>> has_pairs("dualpipev"), has_pairs(Schedule(["F0&B1", "F0"])), has_pairs("1f1b")
    (True, True, False)
    """
    return bool(schedule.together) if isinstance(schedule, Schedule) else SCHEDULES[schedule].pairs


def build_schedule(name: str, p: int, m: int, v: int = 1) -> Schedule:
    """Build the schedule with this name, for p ranks with v stages each and m micro-batches.

    >>> print(build_schedule("1f1b", 2, 3))
    rank 0 | F0 F1  .  . B0 -- F2 B1 --  . B2 --
    rank 1 |  . F0 B0 -- F1 B1 -- F2 B2 --  .  .
    """
    return SCHEDULES[name].build(p, m, v)
