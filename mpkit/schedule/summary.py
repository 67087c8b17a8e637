"""A schedule in three answers, for plans by the thousand: its bubble, what its ranks hold, and where the loss is.

Once a pipeline is full its ranks repeat themselves every p micro-batches. So a schedule of many micro-batches holds as
much as one of few, and need not be built.
"""

from __future__ import annotations

from functools import lru_cache

from mpkit.schedule.catalogue import LOOPED, V_SHAPED, named
from mpkit.schedule.core import Schedule
from mpkit.schedule.play import play
from mpkit.schedule.theory import bubble_in_theory

__all__ = ["bubble", "last_rank", "peak_live"]

HOLDS_ALL = ("gpipe", "looped_bfs")


def bubble(schedule: str | Schedule, p: int, m: int, v: int = 1) -> float:
    """Return the idle fraction of a step with equal stages, F = I = W and no time for messages.

    >>> bubble("1f1b", 4, 8), bubble("interleaved_1f1b", 4, 2, 2)  # too few micro-batches for the papers' formula
    (0.2727272727272727, 0.5555555555555556)
    """
    theory = None if isinstance(schedule, Schedule) else bubble_in_theory(schedule, p, m, v)
    return float(theory) if theory is not None else _played_bubble(schedule, p, m, v)


@lru_cache(4096)
def _played_bubble(schedule: str | Schedule, p: int, m: int, v: int) -> float:
    built = named(schedule, p, m, v) if isinstance(schedule, str) else schedule
    placed = play(built).placed
    busy = sum(one.end - one.start for one in placed)
    return 1 - busy / (built.ranks * (max(one.end for one in placed) - placed[0].start))


def peak_live(schedule: str | Schedule, p: int, m: int, v: int = 1) -> tuple[float, ...]:
    """Return, by rank, the most micro-batches whose activations are held at once; of v stages each counts as 1 / v.

    Args:
        schedule: a name in the catalogue, or a schedule, which has p and m of its own.
        p, m, v: ranks, micro-batches, stages per rank.

    >>> peak_live("1f1b", 4, 8), peak_live("zb_h1", 4, 8), peak_live("zbv", 2, 8, 2)
    ((4.0, 3.0, 2.0, 1.0), (4.0, 4.0, 4.0, 4.0), (2.0, 2.0))
    """
    if isinstance(schedule, Schedule):
        return tuple(
            held / max(1, len(schedule.stages_of(rank))) for rank, held in enumerate(schedule.peak_live)
        )
    if schedule in V_SHAPED:
        v = 2
    if p * v == 1:
        return (1.0,)  # gradients are accumulated: one micro-batch after the other
    if schedule in HOLDS_ALL:
        return (float(m),) * p
    full = 3 * p
    if m > full and (m % p == 0 or schedule not in LOOPED):
        m = full + m % p
    return _peak_live(schedule, p, m, v)


@lru_cache(4096)
def _peak_live(name: str, p: int, m: int, v: int) -> tuple[float, ...]:
    return tuple(held / v for held in named(name, p, m, v).peak_live)


def last_rank(schedule: str | Schedule, p: int) -> int:
    """Return the rank that holds the last stage, and so the head and the loss.

    >>> last_rank("1f1b", 4), last_rank("zbv", 4)
    (3, 0)
    """
    if isinstance(schedule, Schedule):
        return schedule.stage_to_rank[-1]
    return 0 if schedule in V_SHAPED else p - 1
