"""One forward, one backward: 1F1B, interleaved 1F1B with several stages per rank, and that of pairs that run as one.

Every rank goes through these phases:

    warm-up      forwards only, until the first gradient can have arrived
    steady       forwards and backwards in turn: as many activations are freed as are made
    cool-down    the remaining backwards
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from mpkit.plan.schedule.action import Action
from mpkit.plan.schedule.core import Schedule
from mpkit.plan.schedule.stage_to_rank import loops

__all__ = ["in_turns", "interleaved_1f1b", "one_f_one_b", "overlapped_1f1b"]


def one_f_one_b(p: int, m: int) -> Schedule:
    """Build 1F1B: a rank's backward runs as soon as it can, so at most p activations are held, whatever m is.

    >>> print(one_f_one_b(3, 4))
    rank 0 | F0 F1 F2  .  .  .  . B0 -- F3 B1 --  . B2 --  . B3 --
    rank 1 |  . F0 F1  .  . B0 -- F2 B1 -- F3 B2 --  . B3 --  .  .
    rank 2 |  .  . F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 --  .  .  .  .

    The bubble is GPipe's, (p-1)/(m+p-1). Rank r holds the activations of p-r micro-batches; in GPipe, of all m.

    Source: Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019, section 3.2;
    with a flush after each batch, as here: Narayanan et al. 2021 (below), section 2.2.1 and figure 4.
    """
    rows = []
    for stage in range(p):
        forwards = [Action("F", stage, i) for i in range(m)]
        backwards = [Action("B", stage, i) for i in range(m)]
        rows.append(list(_one_by_one(forwards, backwards, warm_up=p - 1 - stage)))
    return Schedule(rows, name="1f1b")


def interleaved_1f1b(p: int, m: int, v: int = 2) -> Schedule:
    """Build interleaved 1F1B: v stages per rank, run in turns of p micro-batches.

    >>> print(interleaved_1f1b(2, 4))
    rank 0 | 0F0 0F1 2F0 2F1 0F2   . 2B0 --- 0F3 2B1 --- 2F2 0B0 --- 2F3 0B1 ---   . 2B2 ---   . 2B3 --- 0B2 --- 0B3 ---
    rank 1 |   . 1F0 1F1 3F0 3B0 --- 3F1 3B1 --- 1F2 1B0 --- 1F3 1B1 --- 3F2 3B2 --- 3F3 3B3 --- 1B2 --- 1B3 ---   .   .

    The bubble shrinks to (p-1)/(vm+p-1), at the cost of v times as many messages and 1 + (p-1)/(pv) times 1F1B's
    activations (of stages that are 1/v as large). The paper requires that p divides m. Otherwise turns here are longer
    than p, and as even as possible: the bubble stays the same, and more activations are held.

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
    SC 2021, section 2.2.2 and figure 4.
    """
    rows = []
    for rank in range(p):
        turn, forwards, backwards = in_turns(rank, p, m, v, "B")
        warm_up = (v - 1) * turn + 2 * (p - 1 - rank)
        rows.append(list(_one_by_one(forwards, backwards, warm_up)))
    return Schedule(rows, "interleaved_1f1b", loops(p, v))


def overlapped_1f1b(p: int, m: int, v: int = 1) -> Schedule:
    """Build interleaved 1F1B whose steady phase is of pairs (F & B), so that each hides the other's all-to-alls.

    >>> overlapped_1f1b(1, 4), overlapped_1f1b(2, 2, 2).spelled()[1]
    (Schedule(['0F0 0F1&0B0 0F2&0B1 0F3&0B2 0B3'], name='overlapped_1f1b'), '1F0 1F1 3F0 3F1&3B0 3B1 1B0 1B1')

    The warm-up is one forward longer than interleaved 1F1B's: no forward of a pair makes what its backward needs. A
    rank holds the activations of one more stage and micro-batch for it. One rank of one stage pairs each backward
    with the next micro-batch's forward.

    Source: Megatron-Core (d98e8a6), `pipeline_parallel/combined_1f1b.py` and `get_pp_rank_microbatches`, by
    `--overlap-moe-expert-parallel-comm`; with several ranks it has several stages on each.
    """
    rows = []
    together: list[Action] = []
    for rank in range(p):
        turn, forwards, backwards = in_turns(rank, p, m, v, "B")
        warm_up = (v - 1) * turn + 2 * (p - 1 - rank) + 1
        rows.append(list(_one_by_one(forwards, backwards, warm_up)))
        together += forwards[warm_up:]
    return Schedule(rows, "overlapped_1f1b", loops(p, v), together)


def in_turns(rank: int, p: int, m: int, v: int, backward: str) -> tuple[int, list[Action], list[Action]]:
    """Order a rank's forwards and backwards: a turn of micro-batches runs through one of its stages before the next.

    A turn is p micro-batches. If p does not divide m, there are floor(m / p) turns, as even as possible, with the
    longer ones first: a turn shorter than p would leave ranks waiting.

    Returns:
        the length of the first turn, and the two orders.

    >>> in_turns(0, 2, 5, 2, "B")[:2]
    (3, [0F0, 0F1, 0F2, 2F0, 2F1, 2F2, 0F3, 0F4, 2F3, 2F4])
    """
    stages, count = range(rank, p * v, p), max(1, m // p)
    lengths = [m // count + (number < m % count) for number in range(count)]
    turns = [range(end - length, end) for end, length in zip(accumulate(lengths), lengths, strict=True)]
    forwards = [Action("F", s, i) for turn in turns for s in stages for i in turn]
    backwards = [Action(backward, s, i) for turn in turns for s in reversed(stages) for i in turn]
    return lengths[0], forwards, backwards


def _one_by_one(forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int) -> Iterator[Action]:
    """Yield warm-up, steady phase and cool-down of a rank with these forwards and backwards."""
    warm_up = min(warm_up, len(forwards))
    steady = len(forwards) - warm_up
    yield from forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[steady:]
