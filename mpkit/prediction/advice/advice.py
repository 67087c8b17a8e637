"""Advice: the best plan for a model on a machine, with reasons that can be checked.

Every sentence of it comes from `mk.estimate` of a plan that it names, so it replays in one call.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from numpy import minimum

from mpkit.common.calls import answers
from mpkit.common.display import ChartedResult, draw
from mpkit.common.tracebacks import public
from mpkit.devices.hardware import Hardware
from mpkit.plan.formats.write import unsaid
from mpkit.plan.kinds import whole
from mpkit.plan.plan import Plan
from mpkit.prediction.advice.reasons import RUNNING, SIMPLER, Family, families_of, summary_of, why_not
from mpkit.prediction.advice.rules import Rule, rules_of
from mpkit.prediction.advice.search import TIME, FoundLayouts, Objective, find_best, plan_under
from mpkit.prediction.cost_model.check import check_length
from mpkit.prediction.cost_model.estimate import Estimate, estimate_of
from mpkit.prediction.cost_model.preset import Preset
from mpkit.prediction.cost_model.stack import Stack, stack_of
from mpkit.prediction.cost_model.workload import Workload, workload_of
from mpkit.timeline.answer import Answer, Basis

SHOWN = 20
"""The plans of an advice."""


@dataclass(frozen=True)
class Advice(ChartedResult, Answer):
    """The plans that fit, the best first; it prints the best of them with reasons.

    A notebook shows a table of the best plan of each family as well, and a chart of step time against memory with the
    frontier marked (`figure`).

    Attributes:
        asked: what is to be trained, the machine and the stack.
        found: every layout that fits with 8 % of the memory to spare; where none does, those that fit at all.
        tight: those that fit and leave less than that free.
        considered: the number of plans that were considered, those that do not fit included.
        objective: what is best.
    """

    asked: Workload = field(repr=False)
    found: FoundLayouts = field(repr=False)
    tight: FoundLayouts = field(repr=False)
    considered: int
    objective: Objective = TIME

    @property
    def best(self) -> Plan | None:
        """The best plan that fits; None if none does."""
        return self.plans[0] if self.found else None

    @cached_property
    def plans(self) -> list[Plan]:
        """The 20 best plans that fit; of those that differ in the samples of a micro-batch only, the best."""
        return [plan_under(self.asked, each.layout) for each in self.found.kinds[:SHOWN]]

    @cached_property
    def frontier(self) -> list[Plan]:
        """Of the plans found, those than which none is both faster and smaller, the fastest first.

        A plan that recomputes or offloads more than it needs to fit is not among those found.
        """
        took, memory = self.found.seconds, self.found.memory
        order = took.argsort(kind="stable")
        least = minimum.accumulate(memory[order])
        kept = [place for i, place in enumerate(order.tolist()) if not i or memory[place] < least[i - 1]]
        return [plan_under(self.asked, self.found[place].layout) for place in kept]

    @cached_property
    def families(self) -> list[Family]:
        """The best plan of each family, the simplest family first: what every further part gains."""
        return families_of(self.asked, self.found.kinds)

    @property
    def simplest(self) -> Plan | None:
        """The plan with the fewest parts within 5 % of the best one's time; None if none fits."""
        near = (each.plan for each in self.families if each.longer <= SIMPLER)
        return next(near, None)

    @cached_property
    def runs_in(self) -> dict[str, str]:
        """Which frameworks can run the best plan: by name, what their file cannot say; "" if it says everything."""
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
        best: Estimate = self.answer
        return best.band

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
        return Basis(
            self.answer.basis.measured, "what `mk.estimate` assumes, for training with Adam in 16 bits"
        )

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
        return why_not(self, plan)

    def __str__(self) -> str:
        return summary_of(self)


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
    found, tight, considered = find_best(asked, objective)
    return Advice(asked, *((found, tight) if found else (tight, found)), considered, objective)
