"""Would a schedule finish, and do all that it should, once each?"""

from __future__ import annotations

from mpkit.schedule.action import COMPUTE, Action
from mpkit.schedule.core import Schedule
from mpkit.schedule.grid import draw_rows
from mpkit.schedule.play import play

__all__ = ["validate"]


def validate(schedule: Schedule, stages: int, microbatches: int) -> None:
    """Check a schedule of compute before anything runs.

    1. Each row holds actions of its own rank's stages, of micro-batches that there are, none of them twice.
    2. Nothing is missing: for each stage and micro-batch an F, and a B or both I and W.
    3. It finishes: no action stands before what it needs, and no ranks wait for each other in a ring.

    Args:
        schedule: compute only; `lower` adds the messages.
        stages: how many the model is cut into.
        microbatches: m, counted from 0.

    Raises:
        ValueError: with the schedule drawn, an arrow at the step that cannot be, and why.
    """
    if schedule.stages > stages:
        rank, position = next(
            (r, i) for r, row in enumerate(schedule.rows) for i, a in enumerate(row) if a.stage >= stages
        )
        _fail(schedule, f"there is no stage {schedule.rows[rank][position].stage}: the stages are "
              f"{_range(stages)}", (rank, position))  # fmt: skip
    _check_rows(schedule, microbatches)
    _check_complete(schedule, stages, microbatches)
    _check_finishes(schedule)


def _check_rows(schedule: Schedule, microbatches: int) -> None:
    seen: dict[Action, int] = {}
    for rank, row in enumerate(schedule.rows):
        for position, action in enumerate(row):
            here = (rank, position)
            if action.kind not in COMPUTE:
                _fail(schedule, f"{action} is a message. Write compute only ({', '.join(COMPUTE)}): mpkit adds "
                      "sends and receives where they are needed", here)  # fmt: skip
            if action.microbatch >= microbatches:
                _fail(schedule, f"there is no micro-batch {action.microbatch}: they are "
                      f"{_range(microbatches)}", here)  # fmt: skip
            holder = schedule.stage_to_rank[action.stage]
            if holder != rank:
                _fail(schedule, f"{action} is in rank {rank}'s row, but stage {action.stage} is on rank {holder}, "
                      "and its weights with it", here)  # fmt: skip
            if action in seen:
                _fail(schedule, f"{action} is there twice: each action is done once a step", here)
            other = Action("B", action.stage, action.microbatch)
            if action.kind in ("I", "W") and other in schedule:
                _fail(schedule, f"{action} and {other} would do the same work twice: a backward is either whole "
                      "(B) or split into I and W", here)  # fmt: skip
            seen[action] = position


def _check_complete(schedule: Schedule, stages: int, microbatches: int) -> None:
    for stage in range(stages):
        for m in range(microbatches):
            forward, backward = Action("F", stage, m), Action("B", stage, m)
            halves = Action("I", stage, m), Action("W", stage, m)
            if forward not in schedule:
                _fail(schedule, f"{forward} is missing: stage {stage} never sees micro-batch {m}")
            if backward in schedule or all(half in schedule for half in halves):
                continue
            if any(half in schedule for half in halves):
                lacking = next(half for half in halves if half not in schedule)
                _fail(schedule, f"{lacking} is missing: a split backward needs both I and W")
            _fail(schedule, f"{backward} is missing: micro-batch {m} leaves no gradient on stage {stage}")


def _check_finishes(schedule: Schedule) -> None:
    stuck = play(schedule).stuck
    if not stuck:
        return
    # From a rank that is stuck to the rank that it waits for, and so on: it must come back.
    ring: list[int] = []
    rank = min(stuck)
    while rank not in ring:
        ring.append(rank)
        rank = schedule.stage_to_rank[stuck[rank][1].stage]
    ring = ring[ring.index(rank) :]
    action, need = stuck[rank]
    here = (rank, schedule.rows[rank].index(action))
    if len(ring) == 1:
        _fail(schedule, f"{action} comes before {need}, which it needs ({_why(action, need)})", here)
    waits = [
        f"rank {r} is at {a} and waits for {n} of rank {schedule.stage_to_rank[n.stage]}"
        for r, (a, n) in ((r, stuck[r]) for r in ring)
    ]
    _fail(schedule, "the ranks wait for each other for ever: " + "; ".join(waits), here)


def _why(action: Action, need: Action) -> str:
    if action.kind == "F":
        return (
            f"stage {action.stage} computes on what stage {need.stage} makes of micro-batch {need.microbatch}"
        )
    if need.kind == "F":
        return "a backward needs what its forward kept"
    if action.kind == "W":
        return "the gradient of the weights follows from that of the inputs"
    return f"the gradient comes from stage {need.stage}, which is after stage {action.stage}"


def _range(count: int) -> str:
    return "0 only" if count == 1 else f"0 to {count - 1}"


def _fail(schedule: Schedule, reason: str, arrow: tuple[int, int] | None = None) -> None:
    raise ValueError(f"Schedule {schedule.name!r} cannot run: {reason}.\n{draw_rows(schedule, arrow)}")
