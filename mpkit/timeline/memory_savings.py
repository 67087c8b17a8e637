"""Which changes of a plan would save a rank the most memory, and how much: predicted, not measured.

Model states (parameters, gradients, optimizer) follow the ZeRO paper's formulas for the parameters that the rank has.
Activations follow from what the rank held: of one micro-batch times the most micro-batches that its schedule keeps at
once (`mpkit.plan.schedule.activations.live`). Recomputation keeps the inputs of repeated blocks, here taken as the
boundary between stages where that is known, and the activations of the one block that is being computed again.

What is no formula: that the parts of a micro-batch take memory in proportion to their samples, that stages are equal,
and that 16 bits halve activations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mpkit.plan.hybrid import change_plan
from mpkit.plan.model_states import formula
from mpkit.plan.plan import Plan
from mpkit.plan.schedule.activations import live
from mpkit.plan.schedule.catalogue import GPIPE, ONE_F_ONE_B, SCHEDULES
from mpkit.timeline.formula_inputs import FormulaInputs

__all__ = ["MemorySaving", "Situation", "savings"]

ADAM = 2.0
"""Numbers that the optimizer keeps per parameter where that is not known yet."""


@dataclass(frozen=True)
class MemorySaving:
    """A change of the plan.

    Attributes:
        plan: the changed plan.
        nbytes: how many bytes less the rank would hold at once, predicted.
        why: what is saved.
        price: what it costs.
    """

    plan: Plan
    nbytes: float
    why: str
    price: str


@dataclass(frozen=True)
class Situation:
    """A rank that needs memory.

    Attributes:
        plan: the plan of the run.
        rank: the rank.
        held: the bytes that it held, by category.
        psi: the number of parameters that it has a replica of.
        itemsize: bytes per parameter in the precision of the computation.
        states: the numbers that the optimizer keeps per parameter.
        states_known: whether that follows from what was held; otherwise it is Adam's.
        batch: samples per batch; 0 if it is not known.
        blocks: the repeated blocks of the model; 0 if there are none.
        stream: bytes of one micro-batch between two layers; 0 if it is not known.
        on_host: whether the ranks are CPU processes, where there is no other memory to offload to.
    """

    plan: Plan
    rank: int
    held: Mapping[str, int]
    psi: float
    itemsize: int
    states: float
    states_known: bool
    batch: int = 0
    blocks: int = 0
    stream: float = 0.0
    on_host: bool = False

    @classmethod
    def from_meta(
        cls, meta: Mapping[str, Any], ranks: int, rank: int, held: Mapping[str, int]
    ) -> Situation | None:
        """Read it from a trace's meta; None if that has no plan or no number of parameters."""
        known = FormulaInputs.from_meta(meta, ranks)
        if known is None or not known.params or not known.element:
            return None
        plan, psi = Plan.from_json(meta["plan"]), known.value_at(known.params, rank)
        one = sum(formula(plan, 1, 1.0, rank, known.element).values())
        none = sum(formula(plan, 1, 0.0, rank, known.element).values())
        masters = formula(plan, 1, 0.0, rank, known.element)["optimizer"]
        counted = held.get("optimizer", 0) / psi - masters if psi and one > none else 0.0
        states = counted / (one - none) if counted > 0 else ADAM
        blocks = int((meta.get("blocks") or (0, 0))[1])
        return cls(
            plan, rank, held, psi, known.element, states, counted > 0, int(meta.get("batch_size") or 0), blocks,
            known.stream, meta.get("device") == "cpu",
        )  # fmt: skip

    def model_states(self, plan: Plan) -> float:
        """Return the bytes of parameters, gradients and optimizer states that the rank holds under a plan."""
        psi = self.psi * (self.plan.pp * self.plan.tp) / (plan.pp * plan.tp)
        element = 2 if plan.precision != "full" and self.plan.precision == "full" else self.itemsize
        return sum(formula(plan, 1, self.states, self.rank, element).values()) * psi

    def in_flight(self, plan: Plan) -> float:
        """Return the bytes that ZeRO-2 and 3 have in flight: a bucket of gradients, or blocks gathered ahead."""
        if plan.zero < 2:
            return 0.0
        psi = self.psi * (self.plan.pp * self.plan.tp) / (plan.pp * plan.tp)
        blocks = max(1.0, self.blocks / plan.pp)
        ahead = psi * min(1.0, (2 + plan.prefetch) / blocks) * self.itemsize if plan.zero == 3 else 0.0
        return max(ahead, min(plan.bucket_mb * 2**20, psi * self.itemsize))

    def needs(self, plan: Plan) -> float:
        """Return the bytes that the rank would hold at once under a plan."""
        return self.model_states(plan) + self.activations(plan) + self.in_flight(plan)

    def activations(self, plan: Plan) -> float:
        """Return the bytes of activations under a plan, from those that were held under the present one."""
        held = (
            self.held.get("activations", 0) * _kept_share(plan, self.rank) / _kept_share(self.plan, self.rank)
        )
        held *= self.plan.pp * self.plan.dp * self.plan.cp / (plan.pp * plan.dp * plan.cp)
        if plan.precision != "full" and self.plan.precision == "full":
            held /= 2
        if plan.recompute == "full" and self.plan.recompute != "full":
            at_once = _at_once(plan, self.rank)
            blocks = max(1.0, self.blocks / plan.pp)
            if not self.blocks:
                return held / at_once  # whole stages: all but the micro-batch that is computed again
            return min(held, held / (blocks * at_once) + self.stream * blocks * at_once)
        return held


def savings(now: Situation) -> list[MemorySaving]:
    """Return the changes that would save memory, the best of each kind, those that save most first."""
    before = now.needs(now.plan)
    best: dict[str, MemorySaving] = {}
    for kind, change, why, price in _changes(now):
        plan = _try_change(change)
        if plan is None or plan == now.plan:
            continue
        saved = before - now.needs(plan)
        if saved > 0 and (kind not in best or saved > best[kind].nbytes):
            best[kind] = MemorySaving(plan, saved, why, price)
    return sorted(best.values(), key=lambda saving: -saving.nbytes)


Change = tuple[str, Callable[[], Plan], str, str]


def _changes(now: Situation) -> Iterator[Change]:
    """Yield candidates: their kind, the changed plan, what is saved, and what that costs."""
    plan, m = now.plan, now.plan.microbatches
    shards = plan.shards
    traffic = {1: "as much traffic as DDP", 2: "as much traffic as DDP", 3: "1.5 times the traffic of DDP"}
    what = {
        1: "optimizer states",
        2: "gradients and optimizer states",
        3: "parameters, gradients and optimizer states",
    }
    for stage in range(plan.zero + 1, 4) if shards > 1 else ():
        ddp = {"data_parallel": "ddp"} if plan.data_parallel == "dp" else {}
        sharded = _change_plan(plan, zero=stage, **ddp)
        yield "zero", sharded, f"{what[stage]} divided by {shards}", traffic[stage]
    for more in (2 * m, 4 * m):
        if not now.batch or more * plan.dp <= now.batch:
            smaller = _change_plan(plan, microbatches=more)
            yield "microbatches", smaller, "activations of fewer samples", "smaller kernels"
    if plan.recompute != "full":
        again = _change_plan(plan, recompute="full")
        yield "recompute", again, "activations inside blocks", "one more forward per step"
    if plan.pp > 1 and isinstance(plan.schedule, str) and SCHEDULES[plan.schedule].holds_all:
        lean = _change_plan(plan, schedule=ONE_F_ONE_B, virtual_stages=1)
        yield "schedule", lean, "activations of p micro-batches, not of m", "nothing"
    if plan.precision == "full" and now.itemsize > 2:
        narrow = _change_plan(plan, precision="bf16")
        yield "precision", narrow, "activations and gradients in 16 bits", "rounding"
    if plan.offload == "none" and not now.on_host:
        on_host = _change_plan(plan, offload="optimizer")
        yield "offload", on_host, "optimizer states on the host", "copies, and the CPU's step"
    if plan.ranks == 1:
        halves = _change_plan(plan, dp=2, zero=3, schedule=GPIPE)
        yield "zero", halves, "half of the states and of the batch", "a second GPU"
    elif plan.pp == 1 and plan.dp > 1 and not plan.zero:
        more = max(m, 2 * plan.dp)
        if not now.batch or more <= now.batch:
            stages = _change_plan(plan, pp=plan.dp, dp=1, schedule=ONE_F_ONE_B, microbatches=more)
            yield "pipeline", stages, "a stage in place of a replica", "a bubble"


def _change_plan(plan: Plan, **fields: Any) -> Callable[[], Plan]:
    return lambda: change_plan(plan, **fields)


def _try_change(change: Callable[[], Plan]) -> Plan | None:
    """Return the changed plan; None where a Plan refuses the combination."""
    try:
        return change()
    except ValueError:
        return None


def _at_once(plan: Plan, rank: int) -> float:
    """Return the most micro-batches, times stages, whose activations a rank's schedule keeps at once."""
    schedule = plan.build()
    place = plan.mesh.place(rank % plan.ranks).pp
    return max(live(schedule.rows[place]), default=1.0) or 1.0


def _kept_share(plan: Plan, rank: int) -> float:
    """Return the share of a replica's batch whose activations are kept at once, times the stages of a rank."""
    stages = plan.build().stages / plan.pp
    return _at_once(plan, rank) / (plan.microbatches * stages)
