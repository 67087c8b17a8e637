"""Advice: the best plan for a model on a machine, with reasons that can be checked.

Every sentence of it comes from `mk.estimate` of a plan that it names, so it replays in one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from mpkit.advice.rules import Rule, rules_of
from mpkit.advice.search import Found, Priced, search
from mpkit.advice.space import Question
from mpkit.cost_model.check import check_plan
from mpkit.cost_model.estimate import Estimate, estimated
from mpkit.cost_model.fits import FRAGMENTATION
from mpkit.cost_model.known_models import architecture_of
from mpkit.cost_model.layout import Layout
from mpkit.cost_model.preset import Preset, preset_for
from mpkit.cost_model.stack import Stack, stack_of
from mpkit.devices.catalogue import hardware as find
from mpkit.devices.hardware import Hardware
from mpkit.plan.checks import whole
from mpkit.plan.plan import Plan
from mpkit.support.display import HasChart, data_frame
from mpkit.support.tracebacks import public
from mpkit.support.units import percent, seconds

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Advice", "advise"]

GIB = 2**30


@dataclass(frozen=True)
class Advice(HasChart):
    """The plans that fit, the fastest first; it prints the best of them with reasons, and is a chart in a notebook.

    The chart (`figure`) shows step time against memory, with the frontier marked.

    Attributes:
        priced: what was asked, the machine and the stack.
        found: every layout that fits.
        considered: the number of plans that were considered, those that do not fit included.
    """

    priced: Priced = field(repr=False)
    found: Sequence[Found] = field(repr=False)
    considered: int

    @property
    def best(self) -> Plan | None:
        """The fastest plan that fits; None if none does."""
        return self.plans[0] if self.found else None

    @cached_property
    def plans(self) -> list[Plan]:
        """The 20 fastest plans that fit."""
        return [plan_of(each.layout) for each in self.found[:20]]

    @cached_property
    def frontier(self) -> list[Plan]:
        """Of the plans found, those than which none is both faster and smaller, the fastest first.

        A plan that recomputes or offloads more than it needs to fit is not among those found.
        """
        kept: list[Found] = []
        for each in self.found:  # by time
            if not kept or each.memory < kept[-1].memory:
                kept.append(each)
        return [plan_of(each.layout) for each in kept]

    @cached_property
    def because(self) -> list[Rule]:
        """The guides' rules with this model's numbers, and whether the search agrees."""
        return rules_of(self.priced, self.found)

    def estimate(self, plan: Plan) -> Estimate:
        """Return the estimate of a plan, as `mk.estimate` would."""
        asked = self.priced.asked
        return estimated(
            asked.model, plan, self.priced.hardware, asked.global_batch, asked.sequence, self.priced.stack,
            self.priced.preset,
        )  # fmt: skip

    def held(self, guess: Estimate) -> float:
        """Return the bytes of an estimate's fullest rank, with what fragmentation takes."""
        return guess.peak_memory * (1 + FRAGMENTATION)

    def why_not(self, plan: Plan) -> str:
        """Say why a plan is not the best: it cannot work, does not fit, or takes longer, and because of what.

        >>> advice = advise("llama3-8b", "8x-a100-nvlink", global_batch=64, sequence=4096)
        >>> print(advice.why_not(Plan.ddp(8)))
        Plan(dp=8) does not fit: it needs 340.7 GiB of 74.5, out by 266.2 GiB; the largest part is activations.
        """
        check_plan(plan)
        try:
            this = self.estimate(plan)
        except ValueError as error:
            return f"{plan!r} cannot work: {error}"
        needed, room = self.held(this), float(self.priced.hardware.device.memory)
        if needed > room:
            stage = max(this.stage_memory, key=lambda memory: sum(memory.values()))
            largest = max(stage, key=stage.__getitem__)
            return (
                f"{plan!r} does not fit: it needs {needed / GIB:.1f} GiB of {room / GIB:.1f}, out by "
                f"{(needed - room) / GIB:.1f} GiB; the largest part is {largest}."
            )
        if self.best is None or this.step_time <= self.found[0].seconds:
            return f"{plan!r} is as good as any: {seconds(this.step_time)} per step."
        best = self.estimate(self.best)
        more = {name: part - best.because.get(name, 0.0) for name, part in this.because.items()}
        cause = max(more, key=more.__getitem__)
        longer, took, least = (
            this.step_time / best.step_time - 1,
            this.because[cause],
            best.because.get(cause, 0.0),
        )
        return (
            f"{plan!r} fits and takes {seconds(this.step_time)} per step, {percent(longer)} longer than {self.best!r}: "
            f"{cause} takes {seconds(took)} of its step, {percent(took / this.step_time)}, where the best has "
            f"{seconds(least)}."
        )

    def again(self, *, hardware: Hardware | str) -> Advice:
        """Return the advice for the same training on other hardware.

        Raises:
            ValueError: there is no machine of that name.
        """
        asked = self.priced.asked
        return advised(asked, find(hardware), self.priced.stack)

    def to_dataframe(self) -> pd.DataFrame:
        """Return a row per plan of `plans`: step time, memory, tokens per second and utilization."""
        rows = []
        for plan, found in zip(self.plans, self.found, strict=False):
            this = self.estimate(plan)
            rows.append(
                {
                    "plan": repr(plan), "step_time": this.step_time, "memory": found.memory,
                    "tokens_per_second": this.tokens_per_second, "mfu": this.mfu, "because": next(iter(this.because)),
                }
            )  # fmt: skip
        return data_frame(rows)

    def __str__(self) -> str:
        asked, hardware = self.priced.asked, self.priced.hardware
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
                f"{self.found[0].memory / GIB:.1f} of {hardware.device.memory / GIB:.1f} GiB; {counted}",
            ]
            within = sum(each.seconds <= high for each in self.found)
            lines.append(f"  {within:,} plans are within the band: measure the best few before you choose.")
        lines += [f"- {rule}" for rule in self.because]
        return "\n".join(lines)


@public
def advise(
    model: object, hardware: Hardware | str, *, global_batch: int, sequence: int, stack: str | Stack | None = None,
    preset: Preset | None = None,
) -> Advice:  # fmt: skip
    """Return the plans for a model on all devices of a machine that fit, the fastest first, with reasons.

    Every mesh, stage of ZeRO, schedule, micro-batch, recomputation and offload is considered, in 16 bits with Adam.

    Args:
        model: as for `mk.estimate`.
        hardware: a machine, or its name.
        global_batch: samples per step.
        sequence: tokens per sample.
        stack, preset: as for `mk.estimate`.

    Raises:
        ValueError: the model or the machine is not known, or a number is none.

    >>> advice = advise("llama3-8b", "8x-a100-nvlink", global_batch=64, sequence=4096)
    >>> advice.best is not None and advice.estimate(advice.best).peak_memory < 80e9
    True
    """
    for name, value in (("global_batch", global_batch), ("sequence", sequence)):
        if (whole(value) or 0) < 1:
            raise ValueError(f"advise({name}={value!r}): a whole number, 1 or more")
    asked = Question(architecture_of(model), global_batch, sequence)
    chosen = stack if isinstance(stack, Stack) else stack_of(stack)
    return advised(asked, find(hardware), chosen, preset)


def advised(asked: Question, machine: Hardware, stack: Stack, preset: Preset | None = None) -> Advice:
    """Return the advice for what `advise` has read."""
    priced = Priced(asked, machine, stack, preset or preset_for(machine.device.name, stack.name))
    found, considered = search(priced, machine.devices)
    return Advice(priced, found, considered)


def plan_of(layout: Layout) -> Plan:
    """Return the plan of a layout, in 16 bits."""
    return Plan(
        pp=layout.pp, dp=layout.dp, tp=layout.tp, cp=layout.cp, zero=layout.zero, schedule=layout.schedule,
        microbatches=layout.microbatches, virtual_stages=layout.virtual_stages, recompute=layout.recompute,
        sequence_parallel=layout.sequence_parallel, offload=layout.offload, precision="bf16",
    )  # fmt: skip
