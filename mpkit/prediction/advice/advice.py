"""Advice: the best plan for a model on a machine, with reasons that can be checked.

Every sentence of it comes from `mk.estimate` of a plan that it names, so it replays in one call. A family is the best
plan of those with the same parts; the ladder has those that are faster than every family with fewer parts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from numpy import minimum

from mpkit.common.calls import answers
from mpkit.common.display import ChartedResult, draw
from mpkit.common.tracebacks import public
from mpkit.common.units import percent, seconds, wrapped
from mpkit.devices.hardware import Hardware
from mpkit.devices.placement_notes import out_of_memory
from mpkit.plan.formats.write import unsaid
from mpkit.plan.kinds import whole
from mpkit.plan.plan import Plan
from mpkit.prediction.advice import search
from mpkit.prediction.advice.rules import Rule, rules_of
from mpkit.prediction.advice.search import HEADROOM, TIME, FoundLayout, FoundLayouts, Objective, plan_under
from mpkit.prediction.cost_model.estimate import Estimate, estimate_of
from mpkit.prediction.cost_model.layout import Layout
from mpkit.prediction.cost_model.preset import Preset
from mpkit.prediction.cost_model.stack import Stack, stack_of
from mpkit.prediction.cost_model.workload import Workload, check_length, check_plan, workload_of
from mpkit.timeline.answer import Answer, Basis

SHOWN = 20  # the plans of an advice
SIMPLER = 0.05  # how much longer a step of the simplest plan may take than one of the best

RUNNING = "megatron", "torchtitan", "fsdp", "accelerate", "deepspeed"  # can they run the best plan?

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
    """The best plan of those with the same parts."""

    parts: tuple[str, ...]  # beside data parallelism
    plan: Plan
    seconds: float  # per step
    longer: float  # than a step of the best of all, as a share of it
    memory: float  # bytes of the fullest rank, fragmentation included

    @property
    def words(self) -> str:
        """Its parts in words."""
        first, last = ", ".join(self.parts[:-1]), self.parts[-1:]
        return f"with {' and '.join(filter(None, (first, *last))) or 'data parallelism alone'}"

    def __str__(self) -> str:
        return f"{self.words}: {seconds(self.seconds)}, {percent(self.longer)} longer, {self.plan!r}"


def families_of(asked: Workload, found: Sequence[FoundLayout]) -> list[Family]:
    """Return the ladder of families of some layouts, which are ordered with the best first."""
    best: dict[tuple[str, ...], FoundLayout] = {}
    for each in found:
        best.setdefault(tuple(part for part, has in PARTS.items() if has(each.layout)), each)
    ladder: list[Family] = []
    for parts, each in sorted(best.items(), key=lambda item: (len(item[0]), item[1].seconds)):
        if not ladder or each.seconds < min(family.seconds for family in ladder):
            longer = each.seconds / found[0].seconds - 1
            ladder.append(Family(parts, plan_under(asked, each.layout), each.seconds, longer, each.memory))
    return ladder


@dataclass(frozen=True)
class Advice(ChartedResult, Answer):
    """The plans that fit, the best first; it prints the best of them with reasons.

    A notebook shows a table of the best plan of each family as well, and a chart of step time against memory with the
    frontier marked (`figure`).
    """

    asked: Workload = field(repr=False)  # the model, the machine, the stack and the batch
    found: FoundLayouts = field(repr=False)  # that leave 8 % of the memory free; if none does, that fit
    tight: FoundLayouts = field(repr=False)  # that fit and leave less than that free
    considered: int  # plans, including those that do not fit
    objective: Objective = TIME  # what is best

    @property
    def best(self) -> Plan | None:
        """The best plan that fits; None if none does."""
        return self.plans[0] if self.found else None

    @cached_property
    def plans(self) -> list[Plan]:
        """The 20 best plans that fit, each the best of those that differ only in the samples of a micro-batch."""
        return [plan_under(self.asked, each.layout) for each in self.found.kinds[:SHOWN]]

    @cached_property
    def frontier(self) -> list[Plan]:
        """The plans than which no other is both faster and smaller, the fastest first.

        Plans that recompute or offload more than they need are not among them.
        """
        took, memory = self.found.seconds, self.found.memory
        order = took.argsort(kind="stable")
        least = minimum.accumulate(memory[order])
        kept = [place for i, place in enumerate(order.tolist()) if not i or memory[place] < least[i - 1]]
        return [plan_under(self.asked, self.found[place].layout) for place in kept]

    @cached_property
    def families(self) -> list[Family]:
        """The best plan of each family, the simplest family first."""
        return families_of(self.asked, self.found.kinds)

    @property
    def simplest(self) -> Plan | None:
        """The plan with the fewest parts within 5 % of the best one's time; None if none fits."""
        return next((each.plan for each in self.families if each.longer <= SIMPLER), None)

    @cached_property
    def runs_in(self) -> dict[str, str]:
        """What each framework's file cannot say of the best plan, by framework; "" if it says everything."""
        return {} if self.best is None else {name: unsaid(self.best, name) for name in RUNNING}

    @cached_property
    def rules(self) -> list[Rule]:
        """The guides' rules with this model's numbers, and whether the search agrees."""
        return rules_of(self.asked, self.found.kinds)

    def estimate(self, plan: Plan) -> Estimate:
        """Return the estimate of a plan, as `mk.estimate` would."""
        return estimate_of(self.asked, plan)

    @property
    def band(self) -> tuple[float, float] | None:
        """The seconds between which such steps were in comparisons with real runs."""
        return self.answer.band

    @cached_property
    def answer(self) -> Estimate:
        """The best plan's estimate.

        Raises:
            ValueError: no plan fits.
        """
        if self.best is None:
            raise ValueError(
                f"none of the {self.considered:,} plans considered fits {self.asked.hardware.name}, so there is none "
                "to estimate. print(advice) says what is missing"
            )
        return self.estimate(self.best)

    @property
    def basis(self) -> Basis:
        """What was measured, and what is assumed."""
        assumed = "what `mk.estimate` assumes, for training with Adam in 16 bits"
        return Basis(self.answer.basis.measured, assumed)

    def _ipython_display_(self) -> None:
        from IPython.display import display

        for part in draw(self, "parts"):
            display(part)  # type: ignore[no-untyped-call]

    def why_not(self, plan: Plan) -> str:
        """Say why a plan is not the best: it cannot work, does not fit, or takes longer, and because of what.

        >>> advice = advise("llama3-8b", "8x-a100-nvlink", global_batch=64, sequence=4096)
        >>> print(advice.why_not(Plan.ddp(8)))
        Plan(dp=8) does not fit: it needs 341.2 of 79.1 GiB, out by 262.1 GiB; the largest part is activations.
        """
        check_plan(plan)
        try:
            this = self.estimate(plan)
        except ValueError as error:
            return f"{plan!r} cannot work: {error}"
        needed, room = this.needed, this.available
        if needed > room:
            return f"{plan!r} does not fit: {out_of_memory(needed, room, this.largest)}."
        if needed > HEADROOM * room:
            free = percent(1 - needed / room)
            return f"{plan!r} fits and leaves {free} of the memory free: less than the 8 % that predictions may be off."
        handicap = search.handicap_of(self.asked, plan.offload)
        if self.best is not None and this.step_time < self.found[0].seconds <= this.step_time * handicap:
            gained = percent(1 - this.step_time / self.found[0].seconds)
            return (
                f"{plan!r} fits and is {gained} faster than {self.best!r}, by offload alone: less than the "
                f"{percent(handicap - 1)} by which predictions may be off."
            )
        value = self.objective.value_of(this.step_time, plan.ranks)
        if self.best is None or value <= self.objective.value_of(self.found[0].seconds, self.best.ranks):
            faster = self.best is not None and this.step_time < (1 - 1e-9) * self.found[0].seconds
            software, took = self.asked.stack.name, f"{seconds(this.step_time)} per step"
            if faster and software in RUNNING and (missing := unsaid(plan, software)):
                return f"{plan!r} is faster, {took}, but {software} cannot say it: {missing}."
            than = ", and faster than what was searched: take it" if faster else ""
            return f"{plan!r} is as good as any{than}: {took}."
        if self.objective.by != "time":
            against = self.objective.explain_rejection(this.step_time, plan.ranks, self.found[0])
            return f"{plan!r} fits, but {against}, beside {self.best!r}."
        best = self.estimate(self.best)
        more = {name: part - best.because.get(name, 0.0) for name, part in this.because.items()}
        cause = max(more, key=more.__getitem__)
        longer, spent = this.step_time / best.step_time - 1, this.because[cause]
        return (
            f"{plan!r} fits and takes {seconds(this.step_time)} per step, {percent(longer)} longer than {self.best!r}: "
            f"{cause} takes {seconds(spent)} of its step, {percent(spent / this.step_time)}, where the best has "
            f"{seconds(best.because.get(cause, 0.0))}."
        )

    def __str__(self) -> str:
        asked, hardware = self.asked, self.asked.hardware
        name = asked.model.name or "the model"
        what = f"{name} on {hardware.name}, {asked.global_batch} samples of {asked.sequence} tokens"
        counted = f"{self.considered:,} plans considered, {len(self.found):,} fit"
        if self.best is None:
            lines = [f"{what}: no plan fits; {counted}."]
        else:
            best = self.estimate(self.best)
            low, high = best.band
            lines = [
                f"{what}: {self.best!r}",
                f"  {seconds(best.step_time)} per step ({seconds(low)} to {seconds(high)}), "
                f"{best.tokens_per_second:,.0f} tokens/s, MFU {percent(best.mfu)}, "
                f"{best.share_words.removesuffix(',')}; {counted}",
            ]
            if self.objective.by != "time":
                lines.append(f"  {self.objective.words(self.found[0], hardware.devices)}")
            lines += _families(self)
            lines.append(_frameworks(self))
            if uneven := _uneven(self):
                lines.append(uneven)
            lines += [f"  {what}: {words}." for what, words in best.assumptions.items()]
            within = int((self.found.seconds <= high).sum())
            lines.append(f"  {within:,} plans are within the band: measure the best few before you choose.")
            lines += _memory_left(self)
        lines += [f"- {rule}" for rule in self.rules]
        return "\n".join(wrapped(line) for line in "\n".join(lines).splitlines())


UNEVEN = {  # how a stack is told the layers of each stage
    "megatron": "--pipeline-model-parallel-layout",
    "torchtitan": "module_fqns_per_model_part",
    "torchtitan-compile": "module_fqns_per_model_part",
}


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
    lines = ["  The best plan of each family, the simplest first:"]
    for family in advice.families:
        took, longer = seconds(family.seconds), percent(family.longer)
        simplest = ", the simplest within 5 %" if family.plan == advice.simplest else ""
        more = f"{longer} longer" if family.longer > 0 else "the best"
        lines.append(f"    {took:>9}  {more:>14}  {family.words}{simplest}\n{' ' * 15}{family.plan!r}")
    return lines


def _uneven(advice: Advice) -> str:
    """Name the framework's switch that cuts stages of unequal numbers of layers; "" if they are equal."""
    best, layers = advice.found[0].layout, advice.asked.model.layers
    stages = best.pp * best.virtual_stages
    if best.pp == 1 or layers % stages == 0:
        return ""
    switch = UNEVEN.get(advice.asked.stack.name, "the model's cut")
    return f"  {layers} layers are not a multiple of {stages} stages: {switch} says which stage has how many."


def _frameworks(advice: Advice) -> str:
    """Say which frameworks can run the best plan, or why none can."""
    able = [name for name, reason in advice.runs_in.items() if not reason]
    if able:
        return f"  Files for it: {', '.join(f'best.to({name!r})' for name in able)}."
    name, reason = min(advice.runs_in.items(), key=lambda item: len(item[1]))
    return f"  mpkit runs it; no other framework's file says all of it ({name}: {reason})."


@public
@answers('mk.advise("llama3-8b", "8x-a100-nvlink", global_batch=64, sequence=4096)')
def advise(
    model: object, hardware: Hardware | str, *, global_batch: int, sequence: int, by: str = "time",
    price: float | None = None, stack: str | Stack | None = None, preset: Preset | None = None,
    trainable: float = 1.0, expert_load: float | None = None,
) -> Advice:  # fmt: skip
    """Return the plans for a model on a machine that fit, the best first, with reasons.

    Every mesh, that of experts folded over tp included, stage of ZeRO, also within groups of nodes, micro-batch,
    recomputation (also of one of k layers) and offload is considered, with the schedules that can be the best and any
    number of layers per stage, in 16 bits with Adam. A plan leaves 8 % of the memory free, and offload has to gain more
    than the estimate's band. With `stack=`, the framework of that name can run every plan.

    Args:
        model: as for `mk.estimate`.
        hardware: a machine, or its name.
        global_batch: samples per step.
        sequence: tokens per sample.
        by: what is best: "time": the fastest step on all devices. "cost": the cheapest step, on as many devices of the
            machine as that takes. "devices": the fewest devices, and on these the fastest step.
        price: of an hour of a GPU, in any currency, for by="cost".
        stack, preset, trainable, expert_load: as for `mk.estimate`; the load is that of every ep.

    Raises:
        ValueError: the model or the machine is not known, or a number is none.

    >>> advice = advise("llama3-8b", "8x-a100-nvlink", global_batch=64, sequence=4096)
    >>> advice.best is not None and advice.estimate(advice.best).peak_memory < 80e9
    True
    """
    for name, value in (("global_batch", global_batch), ("sequence", sequence)):
        if (whole(value) or 0) < 1:
            raise ValueError(f"advise({name}={value!r}): a whole number, 1 or more")
    chosen = stack if isinstance(stack, Stack) else stack_of(stack)
    asked = workload_of(model, hardware, chosen, preset, global_batch, sequence, trainable, expert_load)
    check_length(asked.model, sequence)
    objective = Objective(by, price)
    found, tight, considered = search.find_best(asked, objective)
    return Advice(asked, *((found, tight) if found else (tight, found)), considered, objective)
