"""Why not: what stands against a plan, in one sentence whose numbers come from `mk.estimate`.

cannot      the model or the machine does not divide as the plan says, or the software has not what it asks for
memory      it does not fit: by how much, and what is largest
cost        it costs more, or takes more devices, where these are what counts
time        it takes longer, and by the cause that adds most to the step
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpkit.common.units import percent, seconds
from mpkit.devices.placement_notes import out_of_memory
from mpkit.plan.plan import Plan
from mpkit.prediction.advice.offers import missing_feature
from mpkit.prediction.cost_model.check import check_plan

if TYPE_CHECKING:
    from mpkit.prediction.advice.advice import Advice

__all__ = ["why_not"]


def why_not(advice: Advice, plan: Plan) -> str:
    """Say why a plan is not the best of an advice; `Advice.why_not` shows it."""
    check_plan(plan)
    try:
        this = advice.estimate(plan)
    except ValueError as error:
        return f"{plan!r} cannot work: {error}"
    missing = missing_feature(advice.priced.stack.name, this.layout)
    if missing:
        return f"{plan!r} cannot work: {missing}."
    needed, room = advice.fullest_bytes(this), advice.priced.whole
    if needed > room:
        stage = max(this.stage_memory, key=lambda memory: sum(memory.values()))
        largest = max(stage, key=stage.__getitem__)
        return f"{plan!r} does not fit: {out_of_memory(needed, room, largest)}."
    if needed > advice.priced.room:
        free = percent(1 - needed / room)
        return f"{plan!r} fits and leaves {free} of the memory free: less than the 8 % that predictions may be off."
    handicap = advice.priced.handicap(this.layout)
    if advice.best is not None and this.step_time < advice.found[0].seconds <= this.step_time * handicap:
        gained = percent(1 - this.step_time / advice.found[0].seconds)
        return (
            f"{plan!r} fits and is {gained} faster than {advice.best!r}, by offload alone: less than the "
            f"{percent(handicap - 1)} by which predictions may be off."
        )
    if advice.best is None or advice.objective.value_of(
        this.step_time, plan.ranks
    ) <= advice.objective.value_of(advice.found[0].seconds, advice.best.ranks):
        faster = advice.best is not None and this.step_time < (1 - 1e-9) * advice.found[0].seconds
        than = ", and faster than what was searched: take it" if faster else ""
        return f"{plan!r} is as good as any{than}: {seconds(this.step_time)} per step."
    if advice.objective.by != "time":
        against = advice.objective.explain_rejection(this.step_time, plan.ranks, advice.found[0])
        return f"{plan!r} fits, but {against}, beside {advice.best!r}."
    best = advice.estimate(advice.best)
    more = {name: part - best.because.get(name, 0.0) for name, part in this.because.items()}
    cause = max(more, key=more.__getitem__)
    longer, took, least = (
        this.step_time / best.step_time - 1,
        this.because[cause],
        best.because.get(cause, 0.0),
    )
    return (
        f"{plan!r} fits and takes {seconds(this.step_time)} per step, {percent(longer)} longer than {advice.best!r}: "
        f"{cause} takes {seconds(took)} of its step, {percent(took / this.step_time)}, where the best has "
        f"{seconds(least)}."
    )
