"""Exercises whose answer is a pipeline schedule: a function of (p, m, ...), or anything `mk.Schedule` can be made from.

For each case:

    read       evaluate the answer on a rank, and take its rows
    validate   check that it does every forward and backward, in an order that can finish
    shape      check that it is the schedule that the text names, where that is asked for
    budgets    check the budgets on the simulated clock
    train      train a model with it on real ranks; the losses must equal those of serial training
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mpkit.course.framework.equal import difference, spell
from mpkit.course.framework.exercise import Budget, Case, CheckRow, Exercise, Seen
from mpkit.course.framework.room import PackedAnswer, Room
from mpkit.errors import RankFailed
from mpkit.plan.plan import Plan
from mpkit.plan.schedule import Schedule
from mpkit.timeline.simulation import simulate

if TYPE_CHECKING:
    from mpkit.strategies.rank_context import Context


STEPS = 2
SHAPE = "the order of the schedule"
"""What `Seen.budget` says of a schedule that could run, and is not the one that is asked for."""
ONE_ROW = "you returned text, which is one row: return a list with a row for each of the"


def bubble(seen: Seen) -> float:
    """Return the idle share of the step."""
    return seen.timeline.bubble


def live(seen: Seen) -> float:
    """Return the largest number of micro-batches whose activations one rank holds."""
    assert seen.schedule is not None
    return max(seen.schedule.peak_live)


def in_turns(schedule: Schedule, case: Case) -> str:
    """Return which rank does not hold every p-th stage, beginning with its own number, or whether backwards are split;
    "" if neither is so.
    """
    if schedule.splits_backward:
        return "backwards are split into I and W"
    p = case.ranks
    for rank in range(p):
        held = [stage for stage, holder in enumerate(schedule.stage_to_rank) if holder == rank]
        if held != (asked := list(range(rank, schedule.stages, p))):
            return f"rank {rank} holds the stages {held}, not {asked}"
    return ""


@dataclass(frozen=True, kw_only=True)
class Schedules(Exercise):
    """An exercise whose answer is a schedule.

    Attributes:
        cases: the cases. Each has the size "microbatches"; its ranks are p, the ranks that hold stages. The size
            "virtual_stages" is the number of stages per rank.
        also: the sizes that the answer, if it is a function, takes after p and m, such as ("virtual_stages",).
        budgets: limits on `bubble`, `live` or `measures.makespan`.
        shape: shape(schedule, case) returns what keeps a schedule from being the one that the text asks for, in words;
            "" if nothing does. None: any schedule within the budgets is right.
    """

    cases: Sequence[Case]
    also: Sequence[str] = ()
    budgets: Sequence[Budget] = ()
    shape: Callable[[Schedule, Case], str] | None = None

    def examine(self, answer: PackedAnswer, room: Room) -> Iterator[CheckRow]:
        """Try the answer case by case."""
        for case in self.cases:
            # ---- read, validate
            seen = self._try_case(answer, case, room)
            what = f"a schedule that can run, on {case}"
            if seen.schedule is None:
                yield CheckRow(
                    what,
                    "rows for every rank",
                    seen.error.partition("\n")[0] or "the answer hangs",
                    False,
                    seen,
                )
                return
            yield CheckRow(
                what, "every F and B, once", f"{sum(map(len, seen.schedule.rows))} actions", True, seen
            )
            # ---- shape
            if self.shape is not None and (odd := self.shape(seen.schedule, case)):
                yield CheckRow(
                    f"the order, on {case}", "as the text has it", odd, False, replace(seen, budget=SHAPE)
                )
                return
            # ---- budgets
            rows = [budget.row(seen) for budget in self.budgets]
            yield from rows
            if not all(row.ok for row in rows):
                return
            # ---- train
            row = _train_with(seen, room)
            yield row
            if not row.ok:
                return

    def try_again(self, answer: PackedAnswer, seen: Seen, room: Room) -> Seen:
        """Try another answer on the same case."""
        return replace(self._try_case(answer, seen.case, room), budget=seen.budget)

    def _try_case(self, answer: PackedAnswer, case: Case, room: Room) -> Seen:
        asked = {**case.sizes, "stages": case.ranks, "more": [case[name] for name in self.also]}
        read = room.play(_rows, answer, replace(case, ranks=1, sizes=asked))
        read = replace(read, case=case, expected=[None])
        if read.got is None:
            return read
        try:
            schedule = Schedule(read.got[0], name="yours")
            _right_size(schedule, case)
            schedule.validate()
        except ValueError as error:
            return replace(read, error=str(error), got=None)
        return replace(read, schedule=schedule, simulated=simulate(schedule))


def _right_size(schedule: Schedule, case: Case) -> None:
    if (schedule.ranks, schedule.microbatches) != (case.ranks, case["microbatches"]):
        is_for, asked = (
            str(Case(ranks, sizes={"microbatches": microbatches})).replace(", ", " and ")
            for ranks, microbatches in (
                (schedule.ranks, schedule.microbatches),
                (case.ranks, case["microbatches"]),
            )
        )
        raise ValueError(f"the schedule is for {is_for}, and asked for were {asked}")
    stages = case.ranks * case.sizes.get("virtual_stages", 1)
    if schedule.stages != stages:
        raise ValueError(f"the schedule has {schedule.stages} stages, and asked for were {stages}")


def _rows(ctx: Context, answer: Any, case: Case) -> list[str]:
    """Return the answer's schedule as text, one line per rank."""
    if callable(answer):

        def rows(p: int, m: int) -> Any:
            made = answer(p, m, *case["more"])
            if isinstance(made, str):
                raise TypeError(f"{ONE_ROW} {p} ranks")
            return made

        schedule = Schedule(rows, p=case["stages"], m=case["microbatches"])
    else:
        schedule = Schedule(answer)
    return [" ".join(map(str, row)) for row in schedule.rows]


def _train_with(seen: Seen, room: Room) -> CheckRow:
    """Train a small model with the schedule, and compare the losses with those of serial training."""
    import torch

    from mpkit.course.framework.serial import mlp, mse, sgd, train

    schedule = seen.schedule
    assert schedule is not None
    model = mlp(schedule.stages, seen.case.seed)
    x, y = torch.randn(2, 2 * schedule.microbatches, 6, generator=seen.case.generator(), dtype=torch.float64)
    expected = train(model, [(x, y)] * STEPS)["losses"]
    what = f"losses of {STEPS} steps on {seen.case}"
    try:
        run = room.cluster(seen.case.ranks).train(
            model, [(x, y)], Plan.from_schedule(schedule), loss=mse, optimizer=sgd, steps=STEPS,
            show=False,
        )  # fmt: skip
        losses = run.wait().losses
    except (RankFailed, ValueError) as error:
        return CheckRow(what, spell(expected), str(error), False, replace(seen, error=str(error)))
    wrong = difference(expected, losses)
    return CheckRow(what, spell(expected), wrong or "equal to serial training's", wrong is None, seen)
