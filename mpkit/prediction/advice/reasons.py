"""Reasons: an advice in words, what each further part of a plan gains, and what stands against another plan.

Families are plans with the same parts:

    parts      ZeRO, recomputation, tensor, context and pipeline parallelism, groups of ZeRO, offload
    best       of each set of parts, the fastest plan that fits
    ladder     those that are faster than every family with fewer parts, the simplest first

A plan is not the best because of one of these, in sentences whose numbers come from `mk.estimate`:

    cannot      the model or the machine does not divide as the plan says
    memory      it does not fit: by how much, and what is largest
    cost        it costs more, or takes more devices, where these are what counts
    time        it takes longer, and by the cause that adds most to the step
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpkit.common.units import percent, seconds, wrapped
from mpkit.devices.placement_notes import out_of_memory
from mpkit.plan.formats.write import unsaid
from mpkit.plan.plan import Plan
from mpkit.prediction.advice.search import HEADROOM, FoundLayout, handicap_of, plan_under
from mpkit.prediction.cost_model.check import check_plan
from mpkit.prediction.cost_model.layout import Layout
from mpkit.prediction.cost_model.workload import Workload

if TYPE_CHECKING:
    from mpkit.prediction.advice.advice import Advice


SIMPLER = 0.05
"""How much longer a step of the simplest plan may take than one of the best."""

RUNNING = ("megatron", "torchtitan", "fsdp", "accelerate", "deepspeed")
"""The frameworks that an advice asks whether they can run its best plan."""

PARTS: dict[str, Callable[[Layout], bool]] = {
    "ZeRO": lambda layout: layout.zero > 0 and layout.replicas > 1,
    "recomputation": lambda layout: layout.recompute != "none",
    "tensor parallelism": lambda layout: layout.tp > 1,
    "a pipeline": lambda layout: layout.pp > 1,
    "context parallelism": lambda layout: layout.cp > 1,
    "expert parallelism": lambda layout: layout.ep > 1,
    "groups of ZeRO": lambda layout: layout.sharded > 0,
    "offload": lambda layout: layout.offload != "none",
}


@dataclass(frozen=True)
class Family:
    """The best plan of those with the same parts.

    Attributes:
        parts: what it has beside data parallelism.
        plan: the plan.
        seconds: per step.
        longer: how much longer that takes than a step of the best of all, as a share of it.
        memory: bytes of the fullest rank, fragmentation included.
    """

    parts: tuple[str, ...]
    plan: Plan
    seconds: float
    longer: float
    memory: float

    @property
    def words(self) -> str:
        """Its parts in words."""
        first, last = ", ".join(self.parts[:-1]), self.parts[-1:]
        return f"with {' and '.join(filter(None, (first, *last))) or 'data parallelism alone'}"

    def __str__(self) -> str:
        return f"{self.words}: {seconds(self.seconds)}, {percent(self.longer)} longer, {self.plan!r}"


def families_of(asked: Workload, found: Sequence[FoundLayout]) -> list[Family]:
    """Return the ladder of families, of layouts that are ordered with the best first."""
    best: dict[tuple[str, ...], FoundLayout] = {}
    for each in found:
        best.setdefault(tuple(part for part, has in PARTS.items() if has(each.layout)), each)
    ladder: list[Family] = []
    for parts, each in sorted(best.items(), key=lambda item: (len(item[0]), item[1].seconds)):
        if not ladder or each.seconds < min(family.seconds for family in ladder):
            longer = each.seconds / found[0].seconds - 1
            ladder.append(Family(parts, plan_under(asked, each.layout), each.seconds, longer, each.memory))
    return ladder


def why_not(advice: Advice, plan: Plan) -> str:
    """Say why a plan is not the best of an advice; `Advice.why_not` shows it."""
    check_plan(plan)
    try:
        this = advice.estimate(plan)
    except ValueError as error:
        return f"{plan!r} cannot work: {error}"
    needed, room = this.needed, this.available
    if needed > room:
        stage = max(this.stage_memory, key=lambda memory: sum(memory.values()))
        largest = max(stage, key=stage.__getitem__)
        return f"{plan!r} does not fit: {out_of_memory(needed, room, largest)}."
    if needed > HEADROOM * room:
        free = percent(1 - needed / room)
        return f"{plan!r} fits and leaves {free} of the memory free: less than the 8 % that predictions may be off."
    handicap = handicap_of(advice.asked, plan.offload)
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
        software = advice.asked.stack.name
        if faster and software in RUNNING and (missing := unsaid(plan, software)):
            return f"{plan!r} is faster, {seconds(this.step_time)} per step, but {software} cannot say it: {missing}."
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


UNEVEN = {
    "megatron": "--pipeline-model-parallel-layout",
    "torchtitan": "module_fqns_per_model_part",
    "torchtitan-compile": "module_fqns_per_model_part",
}
"""How a stack is told the layers of each stage, by its name."""


def summary_of(advice: Advice) -> str:
    """Return the best plan with its reasons, a sentence per line."""
    asked, hardware = advice.asked, advice.asked.hardware
    name = asked.model.name or "the model"
    what = f"{name} on {hardware.name}, {asked.global_batch} samples of {asked.sequence} tokens"
    counted = f"{advice.considered:,} plans considered, {len(advice.found):,} fit"
    if advice.best is None:
        lines = [f"{what}: no plan fits; {counted}."]
    else:
        best = advice.estimate(advice.best)
        low, high = best.band
        lines = [
            f"{what}: {advice.best!r}",
            f"  {seconds(best.step_time)} per step ({seconds(low)} to {seconds(high)}), "
            f"{best.tokens_per_second:,.0f} tokens/s, MFU {percent(best.mfu)}, "
            f"{best.share_words.removesuffix(',')}; {counted}",
        ]
        if advice.objective.by != "time":
            lines.append(f"  {advice.objective.words(advice.found[0], hardware.devices)}")
        lines += _families(advice)
        lines.append(_frameworks(advice))
        if uneven := _uneven(advice):
            lines.append(uneven)
        lines += [f"  {what}: {words}." for what, words in best.assumptions.items()]
        within = int((advice.found.seconds <= high).sum())
        lines.append(f"  {within:,} plans are within the band: measure the best few before you choose.")
        lines += _memory_left(advice)
    lines += [f"- {rule}" for rule in advice.rules]
    return "\n".join(wrapped(line) for line in "\n".join(lines).splitlines())


def _memory_left(advice: Advice) -> list[str]:
    """Say which plans fill the memory, or that only such plans fit."""
    free = percent(1 - advice.found[0].memory / advice.asked.available)
    if advice.found[0].memory > HEADROOM * advice.asked.available:
        return [f"  It leaves {free} of the memory free, and no plan leaves more than 8 %: measure it first."]
    if not advice.tight or advice.tight[0].seconds >= advice.found[0].seconds:
        return []
    first = advice.tight[0]
    return [
        f"  {len(advice.tight):,} more leave less than 8 % of the memory free; the fastest of them takes "
        f"{seconds(first.seconds)}: {plan_under(advice.asked, first.layout)!r}"
    ]


def _families(advice: Advice) -> list[str]:
    """Say what each further part of the best plan gains: the best plan of each family, the simplest first."""
    rows = [(seconds(each.seconds), percent(each.longer), each) for each in advice.families]
    lines = ["  The best plan of each family, the simplest first:"]
    for took, longer, family in rows:
        simplest = ", the simplest within 5 %" if family.plan == advice.simplest else ""
        more = f"{longer} longer" if family.longer > 0 else "the best"
        lines.append(f"    {took:>9}  {more:>14}  {family.words}{simplest}\n{' ' * 15}{family.plan!r}")
    return lines


def _uneven(advice: Advice) -> str:
    """Say which switch of the framework cuts stages of unlike numbers of layers; "" if they are alike."""
    best, layers = advice.found[0].layout, advice.asked.model.layers
    stages = best.pp * best.virtual_stages
    if best.pp == 1 or layers % stages == 0:
        return ""
    switch = UNEVEN.get(advice.asked.stack.name, "the model's cut")
    return f"  {layers} layers are not a multiple of {stages} stages: {switch} says which stage has how many."


def _frameworks(advice: Advice) -> str:
    """Say which frameworks can run the best plan, or why not."""
    able = [name for name, reason in advice.runs_in.items() if not reason]
    if able:
        return f"  Files for it: {', '.join(f'best.to({name!r})' for name in able)}."
    name, reason = min(advice.runs_in.items(), key=lambda item: len(item[1]))
    return f"  mpkit runs it; no other framework's file says all of it ({name}: {reason})."
