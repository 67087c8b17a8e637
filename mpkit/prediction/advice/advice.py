"""Advice: the best plan for a model on a machine, with reasons that can be checked.

Every sentence of it comes from `mk.estimate` of a plan that it names, so it replays in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from numpy import minimum

from mpkit.common.calls import answers
from mpkit.common.display import HasChart, data_frame, draw
from mpkit.common.tracebacks import public
from mpkit.devices.catalogue import hardware as find
from mpkit.devices.hardware import Hardware
from mpkit.plan.checks import whole
from mpkit.plan.formats.write import unsaid
from mpkit.plan.plan import Plan
from mpkit.prediction.advice.families import RUNNING, SIMPLER, Family, families_of
from mpkit.prediction.advice.near_misses import NearMiss, near_misses
from mpkit.prediction.advice.objective import TIME, Objective, objective_of
from mpkit.prediction.advice.prices import LayoutPrices
from mpkit.prediction.advice.resharding import resharding_bytes
from mpkit.prediction.advice.rules import Rule, rules_of
from mpkit.prediction.advice.search import SHOWN, FoundLayout, figures_of, kinds_of
from mpkit.prediction.advice.space import TrainingQuestion
from mpkit.prediction.advice.summary import change_since, summary_of
from mpkit.prediction.advice.why_not import why_not
from mpkit.prediction.cost_model.check import check_length
from mpkit.prediction.cost_model.estimate import Estimate, estimate_checked, stack_for
from mpkit.prediction.cost_model.known_models import architecture_of
from mpkit.prediction.cost_model.memory import FRAGMENTATION
from mpkit.prediction.cost_model.preset import Preset, preset_of
from mpkit.prediction.cost_model.shares import model_under
from mpkit.prediction.cost_model.stack import Stack, stack_of
from mpkit.prediction.workload.documents import checked_documents
from mpkit.prediction.workload.routed_load import placed_load
from mpkit.timeline.answer import Basis, DelegatedAnswer

if TYPE_CHECKING:
    import pandas as pd
    import torch

    from mpkit.launch.session.cluster import Cluster
    from mpkit.prediction.advice.try_out import PlanTrials
    from mpkit.timeline.timeline import Timeline

__all__ = ["Advice", "advise"]


@dataclass(frozen=True)
class Advice(HasChart, DelegatedAnswer):
    """The plans that fit, the best first; it prints the best of them with reasons.

    A notebook shows a sortable table as well (`table`), a chart of step time against memory with the frontier marked
    (`figure`), and the predicted timelines of the best three.

    Attributes:
        priced: what was asked, the machine and the stack.
        found: every layout that fits with 8 % of the memory to spare; where none does, those that fit at all.
        tight: those that fit and leave less than that free.
        considered: the number of plans that were considered, those that do not fit included.
        objective: what is best.
        before: the advice for other hardware that `again` began from; None: this is the first.
    """

    priced: LayoutPrices = field(repr=False)
    found: Sequence[FoundLayout] = field(repr=False)
    tight: Sequence[FoundLayout] = field(repr=False)
    considered: int
    objective: Objective = TIME
    before: Advice | None = field(default=None, repr=False)

    @property
    def best(self) -> Plan | None:
        """The best plan that fits; None if none does."""
        return self.plans[0] if self.found else None

    @cached_property
    def plans(self) -> list[Plan]:
        """The 20 best plans that fit."""
        return [self.priced.plan_of(each.layout) for each in self.found[:SHOWN]]

    @cached_property
    def frontier(self) -> list[Plan]:
        """Of the plans found, those than which none is both faster and smaller, the fastest first.

        A plan that recomputes or offloads more than it needs to fit is not among those found.
        """
        took, memory = figures_of(self.found)
        order = took.argsort(kind="stable")
        least = minimum.accumulate(memory[order])
        kept = [place for i, place in enumerate(order.tolist()) if not i or memory[place] < least[i - 1]]
        return [self.priced.plan_of(self.found[place].layout) for place in kept]

    @cached_property
    def families(self) -> list[Family]:
        """The best plan of each family, the simplest family first: what every further part gains."""
        return families_of(self.priced, kinds_of(self.found))

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
        return rules_of(self.priced, kinds_of(self.found))

    @cached_property
    def near_misses(self) -> list[NearMiss]:
        """Plans one change away from the best, and what stands against each: those out of memory first."""
        return near_misses(self.priced, self.found[0].layout) if self.found else []

    def estimate(self, plan: Plan) -> Estimate:
        """Return the estimate of a plan, as `mk.estimate` would."""
        asked = self.priced.asked
        return estimate_checked(
            asked.model, plan, self.priced.hardware, asked.global_batch, asked.sequence, self.priced.stack,
            self.priced.preset, documents=asked.documents or None,
            expert_load=asked.load,
        )  # fmt: skip

    @cached_property
    def answer(self) -> Estimate:
        """The best plan's estimate.

        Raises:
            ValueError: no plan fits.
        """
        if self.best is None:
            raise ValueError(
                f"none of the {self.considered:,} plans considered fits {self.priced.hardware.name}, so there is none "
                "to estimate. print(advice) says what is missing"
            )
        return self.estimate(self.best)

    @property
    def basis(self) -> Basis:
        """What was measured, and what is assumed."""
        return Basis(
            self.answer.basis.measured, "what `mk.estimate` assumes, for training with Adam in 16 bits"
        )

    def timelines(self, best: int = 3) -> dict[str, Timeline]:
        """Return the predicted timelines of the best plans, by plan: `mk.compare(**advice.timelines())` draws them."""
        return {repr(plan): self.estimate(plan).timeline() for plan in self.plans[:best]}

    def table(self) -> Any:
        """Return the best plans as a table for a notebook, which its reader sorts by any column.

        Raises:
            ImportError: what notebooks need is not installed.
        """
        return draw(self, "table")

    def _ipython_display_(self) -> None:
        from IPython.display import display

        for part in draw(self, "parts"):
            display(part)  # type: ignore[no-untyped-call]

    def fullest_bytes(self, guess: Estimate) -> float:
        """Return the bytes of an estimate's fullest rank, with what fragmentation takes."""
        return guess.peak_memory * (1 + FRAGMENTATION)

    def why_not(self, plan: Plan) -> str:
        """Say why a plan is not the best: it cannot work, does not fit, or takes longer, and because of what.

        >>> advice = advise("llama3-8b", "8x-a100-nvlink", global_batch=64, sequence=4096)
        >>> print(advice.why_not(Plan.ddp(8)))
        Plan(dp=8) does not fit: it needs 341.2 of 79.1 GiB, out by 262.1 GiB; the largest part is activations.
        """
        return why_not(self, plan)

    def try_out(
        self, best: int, cluster: Cluster, model: torch.nn.Module, data: Any, *,
        loss: Callable[[Any, Any], torch.Tensor], optimizer: Callable[[Any], torch.optim.Optimizer],
        clock: str = "virtual", say: Callable[[str], object] = print,
    ) -> PlanTrials:  # fmt: skip
        """Train the best few plans and a bad one on the ranks at hand, and set predicted beside measured.

        The prediction is that of `mk.profile` on this machine, in full precision: it says how far to trust the order.

        Args:
            best: how many of the best plans to try; the slowest that was found is tried as well.
            cluster: CPU ranks, as many as the advice is for.
            model: what to train: the model of the advice, or a small one that stands for it.
            data, loss, optimizer: as for `mk.profile`; `data` has the samples of a step.
            clock: as in `Profile.predict`.
            say: called with a line as the profile and each training begin, since all of them take a minute or more.

        Raises:
            ValueError: the cluster has another number of ranks than the advice has devices, or no plan fits.
        """
        from mpkit.prediction.advice.try_out import try_plans
        from mpkit.prediction.experiments.profile import profile

        devices = self.found[0].layout.ranks if self.found else self.priced.hardware.devices
        if cluster.ranks != devices:
            raise ValueError(
                f"this advice is for {devices} devices, and the cluster has {cluster.ranks} ranks: "
                f"mk.Cluster(ranks={devices}), or advice for {cluster.ranks}: mk.advise(..., "
                f"mk.hardware('h100', per_node={cluster.ranks}), ...)"
            )
        if (whole(best) or 0) < 1:
            raise ValueError(f"try_out({best!r}): how many of the best plans, a whole number, 1 or more")
        if not self.found:
            raise ValueError("no plan fits, so there is none to try")
        chosen = dict.fromkeys(each.layout for each in [*self.found[:best], self.found[-1]])
        plans = [replace(self.priced.plan_of(layout), precision="full") for layout in chosen]
        say(f"profiling the model on this machine, then training {len(plans)} plans")
        measured = profile(model, data, loss=loss, optimizer=optimizer, cluster=cluster)
        return try_plans(measured, plans, cluster, clock=clock, say=say)

    def again(self, *, hardware: Hardware | str) -> Advice:
        """Return the advice for the same training on other hardware.

        Raises:
            ValueError: there is no machine of that name.
        """
        asked = self.priced.asked
        return replace(
            find_advice(asked, find(hardware), self.priced.stack, objective=self.objective), before=self
        )

    @property
    def moved(self) -> list[float]:
        """After `again`: the bytes that each rank fetches to go on under the best plan of this advice."""
        if self.before is None or not self.found or not self.before.found:
            return []
        old, new = self.before.found[0].layout, self.found[0].layout
        return resharding_bytes(self.priced.asked.model, old, new, self.priced.stack)

    @property
    def change(self) -> str:
        """After `again`: what changed, and what it costs to move weights and states; "" otherwise."""
        return change_since(self)

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
        return summary_of(self)


@public
@answers('mk.advise("llama3-8b", "8x-a100-nvlink", global_batch=64, sequence=4096)')
def advise(
    model: object, hardware: Hardware | str, *, global_batch: int, sequence: int, by: str = "time",
    price: float | None = None, stack: str | Stack | None = None, preset: Preset | None = None,
    documents: Sequence[int] | None = None, expert_load: object = None,
) -> Advice:  # fmt: skip
    """Return the plans for a model on a machine that fit, the best first, with reasons.

    Every mesh, that of experts folded over tp included, stage of ZeRO, also within groups of nodes or with secondary
    shards, micro-batch, recomputation and offload is considered, with the schedules that can be the best, in 16 bits
    with Adam. A plan leaves 8 % of the memory free, and offload has to gain more than the estimate's
    band. With `stack=`, the framework of that name can run every plan.

    Args:
        model: as for `mk.estimate`.
        hardware: a machine, or its name.
        global_batch: samples per step.
        sequence: tokens per sample.
        by: what is best: "time": the fastest step on all devices. "cost": the cheapest step, on as many devices of the
            machine as that takes. "devices": the fewest devices, and on these the fastest step.
        price: of an hour of a GPU, in any currency, for by="cost".
        stack, preset, documents, expert_load: as for `mk.estimate`. Of packed documents, each plan has the `cp_order`
            in which the busiest rank has least attention. A ratio as the load is that of every ep.

    Raises:
        ValueError: the model or the machine is not known, or a number is none.

    >>> advice = advise("llama3-8b", "8x-a100-nvlink", global_batch=64, sequence=4096)
    >>> advice.best is not None and advice.estimate(advice.best).peak_memory < 80e9
    True
    """
    for name, value in (("global_batch", global_batch), ("sequence", sequence)):
        if (whole(value) or 0) < 1:
            raise ValueError(f"advise({name}={value!r}): a whole number, 1 or more")
    sizes, lengths = architecture_of(model), checked_documents(documents, sequence)
    load = placed_load(expert_load, model, sizes.layers - sizes.dense)
    asked = TrainingQuestion(sizes, global_batch, sequence, lengths, load)
    if load:
        load.check(asked.model.experts, 1)
    check_length(asked.model, sequence, lengths)
    machine = find(hardware)
    chosen = stack if isinstance(stack, Stack) else stack_of(stack)
    if chosen.name == "mpkit":  # which runs in 16 bits what a plan says so of
        chosen = stack_for(Plan(precision=machine.device.half), chosen)[0]
    return find_advice(asked, machine, chosen, preset, objective_of(by, price))


def find_advice(
    asked: TrainingQuestion, machine: Hardware, stack: Stack, preset: Preset | None = None,
    objective: Objective = TIME,
) -> Advice:  # fmt: skip
    """Return the advice for what `advise` has read."""
    asked = replace(asked, model=model_under(stack, asked.model))
    priced = LayoutPrices(asked, machine, stack, preset or preset_of(machine.device, stack))
    searched = objective.search(priced)
    found, tight = (searched.found, searched.tight) if searched.found else (searched.tight, [])
    return Advice(priced, found, tight, searched.considered, objective)
