"""Checks whether a schedule finishes, is complete, does everything once, and fits into memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, NoReturn

from mpkit.plan.schedule.play import COMPUTE, Action, draw_rows, live

if TYPE_CHECKING:
    from mpkit.plan.schedule.core import Schedule


Spot = tuple[int, int]  # rank, position in its row


def validate(schedule: Schedule, *, max_live: float | Sequence[float] | None = None) -> None:
    """Check a schedule of compute before anything runs.

    1. Each row holds actions of its own rank's stages, each of them once.
    2. Nothing is missing: each stage and micro-batch has an F, and a B or both I and W.
    3. It finishes: no action comes before what it needs, and no ranks wait for each other in a cycle.
    4. No rank holds more activations than `max_live`.

    Args:
        schedule: a schedule of compute only; `lower` adds the messages.
        max_live: the most activations that a rank may hold at once: one number for all ranks, or one per rank.

    Raises:
        ValueError: it cannot run; the message says why, and draws the schedule with an arrow at the action.

    >>> from mpkit.plan.schedule import Schedule
    >>> validate(Schedule(["F0 F1 B0 B1", "F0 F1 B0 B1"]), max_live=1)
    Traceback (most recent call last):
    ValueError: Schedule 'own' cannot run: at 0F1 rank 0 would hold 2 activations, and max_live is 1. A backward (B, or
    W where it is split) before it frees one.
    rank 0 | 0F0 0F1 0B0 0B1
                 ^^^
    rank 1 | 1F0 1F1 1B0 1B1
    """
    _check_rows(schedule)
    _check_complete(schedule)
    _check_finishes(schedule)
    if max_live is not None:
        _check_memory(schedule, max_live)


def _check_rows(schedule: Schedule) -> None:
    seen: dict[Action, Spot] = {}
    for rank, row in enumerate(schedule.rows):
        for position, action in enumerate(row):
            here = (rank, position)
            if action.kind not in COMPUTE:
                _fail(schedule, f"{action} is a message. Write compute only ({', '.join(COMPUTE)}): mpkit adds "
                      "sends and receives where they are needed", here)  # fmt: skip
            holder = schedule.stage_to_rank[action.stage]
            if holder != rank:
                _fail(schedule, f"{action} is in rank {rank}'s row, but stage {action.stage} is on rank {holder}, "
                      "and its weights with it", here)  # fmt: skip
            if action in seen:
                reason = f"{action} is there twice: each action is done once per step"
                _fail(schedule, reason, here, seen[action])
            other = Action("B", action.stage, action.microbatch)
            if action.kind in ("I", "W") and other in schedule:
                _fail(schedule, f"{action} and {other} would do the same work twice: a backward is either whole "
                      "(B) or split into I and W", here)  # fmt: skip
            seen[action] = here


def _check_complete(schedule: Schedule) -> None:
    for stage, m in product(range(schedule.stages), range(schedule.microbatches)):
        forward, backward, *halves = (Action(kind, stage, m) for kind in "FBIW")
        lacking = [half for half in halves if half not in schedule]
        if forward not in schedule:
            missing, why = forward, f"stage {stage} never sees micro-batch {m}"
        elif not lacking or backward in schedule:
            continue
        elif len(lacking) == 1:
            missing, why = lacking[0], "a split backward needs both I and W"
        else:
            missing, why = backward, f"micro-batch {m} leaves no gradient on stage {stage}"
        holder = schedule.stage_to_rank[stage]
        end = [(holder, len(schedule.rows[holder]) - 1)] if schedule.rows[holder] else []
        _fail(schedule, f"{missing} is missing: {why}", *end)


def _check_finishes(schedule: Schedule) -> None:
    stuck = schedule.order.stuck
    if not stuck:
        return
    # Follow each stuck rank to the rank that it waits for: the path must come back to itself.
    ring: list[int] = []
    rank = min(stuck)
    while rank not in ring:
        ring.append(rank)
        rank = schedule.stage_to_rank[stuck[rank][1].stage]
    ring = ring[ring.index(rank) :]
    spots = {r: (r, schedule.rows[r].index(stuck[r][0])) for r in ring}
    action, need = stuck[rank]
    if len(ring) == 1:
        _fail(schedule, f"{action} comes before {need}, which it needs ({_why(action, need)})", spots[rank])
    waits = [
        f"rank {r} is at {a} and waits for {n} of rank {schedule.stage_to_rank[n.stage]}{_pairing_note(schedule, n)}"
        for r, (a, n) in ((r, stuck[r]) for r in ring)
    ]
    _fail(schedule, "the ranks wait for each other for ever: " + "; ".join(waits), *spots.values())


def _pairing_note(schedule: Schedule, action: Action) -> str:
    """Return which backward a forward leaves together with; "" if it is not paired."""
    row = schedule.rows[schedule.stage_to_rank[action.stage]]
    partner = row[row.index(action) + 1 :][:1] if action in schedule.together else ()
    return f", which leaves together with {partner[0]}" if partner else ""


def _why(action: Action, need: Action) -> str:
    if action.kind == "F":
        made = f"stage {need.stage} makes of micro-batch {need.microbatch}"
        return f"stage {action.stage} computes on what {made}"
    if need.kind == "F":
        return "a backward needs what its forward kept"
    if action.kind == "W":
        return "the gradient of the weights follows from that of the inputs"
    return f"the gradient comes from stage {need.stage}, which is after stage {action.stage}"


def _check_memory(schedule: Schedule, max_live: float | Sequence[float]) -> None:
    caps = each("max_live", max_live, schedule.ranks, "rank")
    for rank, row in enumerate(schedule.rows):
        for position, held in enumerate(live(row)):
            if held > caps[rank]:
                cap = "is" if isinstance(max_live, int | float) else f"of rank {rank} is"
                _fail(schedule, f"at {row[position]} rank {rank} would hold {held:g} activations, and max_live {cap} "
                      f"{caps[rank]:g}. A backward (B, or W where it is split) before it frees one",
                      (rank, position))  # fmt: skip


def each(name: str, value: float | Sequence[float], count: int, what: str) -> list[float]:
    """Return one number for each rank or stage."""
    given: list[Any] = [*value] if isinstance(value, Iterable) else [value] * count
    if len(given) != count or not all(isinstance(number, int | float) and number > 0 for number in given):
        raise ValueError(
            f"{name}={value!r}: a number above 0, or {count} of them, one per {what}, such as {name}={[4] * count}"
        )
    return [float(number) for number in given]


def _fail(schedule: Schedule, reason: str, *arrows: Spot) -> NoReturn:
    raise ValueError(f"Schedule {schedule.name!r} cannot run: {reason}.\n{draw_rows(schedule, *arrows)}")
