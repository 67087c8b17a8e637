"""The schedules by name: how each is built, and all that is known of it. No other module spells their names.

A function in `schedules` and a row of schedules.toml are all that a new schedule needs to run, and to be drawn,
predicted, exported and advised.

The functions below answer for plans by the thousand: a schedule's bubble, its time, what its ranks hold, where its
stages are. Once a pipeline is full, its ranks repeat themselves every p micro-batches. So a schedule of many
micro-batches holds as much as one of few, and need not be built.
"""

import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from mpkit.plan.schedule import schedules
from mpkit.plan.schedule.core import Schedule
from mpkit.plan.schedule.play import Order, end_times, lengths_of, play

NAIVE, GPIPE, ONE_F_ONE_B, INTERLEAVED_1F1B, ZB_H1 = "naive", "gpipe", "1f1b", "interleaved_1f1b", "zb_h1"
OVERLAPPED_1F1B = "overlapped_1f1b"  # the schedule of pairs that a model in one stage has too

ANY = 0  # in an entry: a rank can have any number of stages


@dataclass(frozen=True)
class ScheduleEntry:
    """A row of schedules.toml, which explains the columns, and the function of (p, m, v) that builds the schedule."""

    build: Callable[[int, int, int], Schedule]
    title: str
    words: str
    per_rank: int = 1
    holds_all: bool = False
    idle: int | None = None
    drains: bool = False
    filled: float = 1
    pairs: bool = False
    advised: Sequence[int] = ()
    torchs: str = ""

    def stages_per_rank(self, v: int) -> int:
        """Return the stages per rank of a plan with v of them."""
        return self.per_rank or v

    def can_have(self, v: int) -> bool:
        """Return whether a rank can have v stages; with one stage, a schedule for any number is another schedule."""
        return v > 1 if self.per_rank == ANY else v == self.per_rank


def _entry(name: str, row: dict[str, Any]) -> ScheduleEntry:
    function = getattr(schedules, row.pop("build", name))
    takes_stages = row.get("per_rank") == ANY
    return ScheduleEntry(function if takes_stages else lambda p, m, v: function(p, m), **row)


SCHEDULES: dict[str, ScheduleEntry] = {
    name: _entry(name, row)
    for name, row in tomllib.loads(Path(__file__).with_name("schedules.toml").read_text("utf-8")).items()
}
"""The schedules, by the name that `Plan(schedule=...)` takes."""

NAMES = tuple(SCHEDULES)


def names_in_torch() -> dict[str, str]:
    """Return the names of schedules in torch and torchtitan, by their names here."""
    return {name: entry.torchs for name, entry in SCHEDULES.items() if entry.torchs}


def has_pairs(schedule: str | Schedule) -> bool:
    """Return whether a schedule has forwards that run as one with a backward."""
    return bool(schedule.together) if isinstance(schedule, Schedule) else SCHEDULES[schedule].pairs


def build_schedule(name: str, p: int, m: int, v: int = 1) -> Schedule:
    """Build the schedule with this name, for p ranks with v stages each and m micro-batches.

    >>> print(build_schedule("1f1b", 2, 3))
    rank 0 | F0 F1  .  . B0 -- F2 B1 --  . B2 --
    rank 1 |  . F0 B0 -- F1 B1 -- F2 B2 --  .  .
    """
    return SCHEDULES[name].build(p, m, v)


FULL = 4  # times p micro-batches, after which a pipeline mostly repeats itself
LONG = 2**16  # actions of the longest schedule that is played to its end


@lru_cache(4096)
def bubble(schedule: str | Schedule, p: int, m: int, v: int = 1) -> float:
    """Return the idle fraction of a step with equal stages, F = I = W and no time for messages.

    >>> bubble("1f1b", 4, 8), bubble("interleaved_1f1b", 4, 2, 2)  # too few micro-batches for the papers' formula
    (0.2727272727272727, 0.5555555555555556)
    """
    theory = None if isinstance(schedule, Schedule) else bubble_in_theory(schedule, p, m, v)
    if theory is not None:
        return float(theory)
    built = build_schedule(schedule, p, m, v) if isinstance(schedule, str) else schedule
    placed = play(built)
    busy = sum(one.end - one.start for one in placed)
    return 1 - busy / (built.ranks * (max(one.end for one in placed) - placed[0].start))


def makespan(
    schedule: str | Schedule, p: int, m: int, v: int, slots: Mapping[str, Sequence[float]], hop: float,
    longest: int = LONG,
) -> float:  # fmt: skip
    """Return the seconds from the first action of a schedule to the end of the last.

    `slots` are as for `lengths_of`, and `hop` is the time of a message. A schedule of more actions than `longest` goes
    on at the pace that it has by then, which may be 1 % too fast if one rank is only a little slower than another.

    >>> makespan("gpipe", 2, 3, 1, {"F": [1.0, 1.0], "B": [2.0, 2.0]}, hop=0.5)
    13.0
    """
    lengths = lengths_of(slots, len(slots["F"]))
    lead = [0.0] * len(lengths)
    if isinstance(schedule, Schedule):
        return max(end_times(schedule.order, lengths, hop, lead))
    periods = max(0, m // p - max(FULL, longest // (2 * p * p * v)))
    first = m - periods * p
    took = max(end_times(_order(schedule, p, first, v), lengths, hop, lead))
    if not periods:
        return took
    longer = max(end_times(_order(schedule, p, first + p, v), lengths, hop, lead))
    return took + periods * (longer - took)


@lru_cache(64)
def _order(name: str, p: int, m: int, v: int) -> Order:
    return build_schedule(name, p, m, v).order


class _Shape(NamedTuple):
    peak_live: tuple[float, ...]  # by rank
    pairs: tuple[int, ...]  # by stage
    stage_to_rank: tuple[int, ...]


@lru_cache(4096)
def _shape_of(schedule: str | Schedule, p: int, m: int, v: int) -> _Shape:
    if isinstance(schedule, str):
        schedule = build_schedule(schedule, p, m, SCHEDULES[schedule].stages_per_rank(v))
    count = Counter(action.stage for action in schedule.together)
    held = (live / max(1, len(schedule.stages_of(rank))) for rank, live in enumerate(schedule.peak_live))
    pairs = (count[stage] for stage in range(schedule.stages))
    return _Shape(tuple(held), tuple(pairs), schedule.stage_to_rank)


def pairs_by_stage(schedule: str | Schedule, p: int, m: int, v: int = 1) -> tuple[int, ...]:
    """Return, by stage, how many of its forwards run as one with a backward.

    >>> pairs_by_stage("dualpipev", 2, 4, 2), pairs_by_stage("dualpipev", 2, 64, 2)
    ((1, 1, 2, 2), (61, 61, 62, 62))
    """
    if isinstance(schedule, Schedule):
        return _shape_of(schedule, p, m, v).pairs
    if not has_pairs(schedule):
        return (0,) * (p * SCHEDULES[schedule].stages_per_rank(v))
    later = max(0, m - 3 * p)  # each has a pair on each stage
    return tuple(count + later for count in _shape_of(schedule, p, m - later, v).pairs)


def peak_live(schedule: str | Schedule, p: int, m: int, v: int = 1) -> tuple[float, ...]:
    """Return, by rank, the most micro-batches whose activations it holds at once; each of v stages counts as 1 / v.

    >>> peak_live("1f1b", 4, 8), peak_live("zb_h1", 4, 8), peak_live("zbv", 2, 8, 2)
    ((4.0, 3.0, 2.0, 1.0), (4.0, 4.0, 4.0, 4.0), (2.0, 2.0))
    """
    if isinstance(schedule, Schedule):
        return _shape_of(schedule, p, m, v).peak_live
    entry = SCHEDULES[schedule]
    if p * entry.stages_per_rank(v) == 1 and not entry.pairs:
        return (1.0,)  # gradients accumulate: one micro-batch after the other
    if entry.holds_all:
        return (float(m),) * p
    if m > 3 * p and (m % p == 0 or entry.per_rank != ANY):
        m = 3 * p + m % p
    return _shape_of(schedule, p, m, v).peak_live


def stage_ranks(schedule: str | Schedule, p: int, v: int = 1) -> tuple[int, ...]:
    """Return the rank of each stage; the last one has the head and the loss."""
    return _shape_of(schedule, p, 1, v).stage_to_rank


def bubble_in_theory(name: str, p: int, m: int, v: int = 1, *, recompute: bool = False) -> Fraction | None:
    """Return the idle fraction of a step's span, averaged over ranks, in theory.

    Stages are equal, F = I = W, and messages take no time. The result is None if the papers give no formula, or if
    there are too few micro-batches to fill the pipeline.

    The span is from the first action of any rank to the last action of any rank (GPipe's bubble; Megatron divides by
    the ideal time instead). So a rank that begins later in ZB-H2 counts as idle until then.

    With `recompute` a micro-batch takes 4 forwards' time instead of 3, and ranks are idle for as long as before, since
    they recompute while they wait for the gradient.

    >>> bubble_in_theory("gpipe", 4, 8), bubble_in_theory("interleaved_1f1b", 4, 8, 2)
    (Fraction(3, 11), Fraction(3, 19))
    """
    entry = SCHEDULES[name]
    if entry.idle is None or (m < entry.filled * p and p > 1):
        return None
    idle = entry.idle * (p - 1) * (m if entry.drains else 1)
    busy = (4 if recompute else 3) * m * entry.stages_per_rank(v)  # a rank's work, in forwards of a stage
    return Fraction(idle, idle + busy)
