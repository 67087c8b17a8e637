"""Does it fit? The peak of each rank beside the device's memory, and what to change where it is too much.

    peak       the estimate's memory by rank and category, with a margin for fragmentation
    batch      the largest one that fits, by bisection over samples per micro-batch
    remedy     of the changes that make the plan fit, the one whose step is fastest

Fragmentation: what an allocator reserves beyond what is allocated at the peak; a few per cent of it as a rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from mpkit.common.calls import answers
from mpkit.common.display import DrawnResult
from mpkit.common.tracebacks import public
from mpkit.common.units import memory_share, memory_text, seconds
from mpkit.devices.catalogue import hardware as machine_of
from mpkit.devices.hardware import Hardware
from mpkit.plan.hybrid import change_plan
from mpkit.plan.plan import Plan
from mpkit.prediction.cost_model.estimate import Estimate, estimate, estimate_checked, stack_for
from mpkit.prediction.cost_model.memory import CATEGORIES, FRAGMENTATION, MARGIN_WORD
from mpkit.prediction.cost_model.preset import Preset
from mpkit.prediction.cost_model.stack import Stack
from mpkit.timeline.answer import Basis, DelegatedAnswer

__all__ = ["MEANING", "Fits", "Remedy", "fits"]

GIB = 2**30

MEANING = {
    "params": "the weights that a rank computes with",
    "grads": "the gradients",
    "optimizer": "the optimizer's states and master weights",
    "activations": "what forwards keep for their backwards",
    "logits": "the logits, their copy in 32 bits and its gradient",
    "gathered": "the whole layers that ZeRO-3 gathers",
    "buffers": "what the framework and libraries keep",
    "context": "the CUDA context and NCCL",
}


@dataclass(frozen=True)
class Remedy:
    """A change that makes a plan fit.

    Attributes:
        plan: the changed plan.
        change: the change in words.
        estimate: what it is predicted to take.
    """

    plan: Plan
    change: str
    estimate: Estimate


FOLLOW: dict[str, str | None] = {"pytorch": None, "pytorch-fp32": None, "mpkit": "mpkit"}
"""The stacks whose precision is the plan's, by name, with what to ask for in another precision."""


@dataclass(frozen=True)
class Fits(DrawnResult, DelegatedAnswer):
    """Whether a plan fits; true if it does. It prints, and is a picture in a notebook.

    Attributes:
        estimate: the plan's estimate.
    """

    estimate: Estimate = field(repr=False)

    def __bool__(self) -> bool:
        return self.needed <= self.available

    @property
    def available(self) -> float:
        """Bytes of a device's memory."""
        return float(self.estimate.hardware.device.memory)

    @property
    def needed(self) -> float:
        """Bytes that the rank with most needs, with what fragmentation takes."""
        return self.estimate.peak_memory * (1 + FRAGMENTATION)

    @property
    def answer(self) -> Estimate:
        """The estimate."""
        return self.estimate

    @property
    def basis(self) -> Basis:
        """What was measured, and what is assumed."""
        measured, _ = self.estimate.basis
        return Basis(
            measured, f"activations by formula, {100 * FRAGMENTATION:.0f} % fragmentation, the CUDA context"
        )

    @property
    def fullest(self) -> int:
        """The first rank of the stage that needs most."""
        stages = self.estimate.stage_memory
        worst = max(range(len(stages)), key=lambda stage: sum(stages[stage].values()))
        return worst * (self.estimate.layout.ranks // self.estimate.layout.pp)

    @property
    def largest(self) -> str:
        """The category that takes most on the fullest rank."""
        memory = self.memory[self.fullest]
        return max(CATEGORIES, key=memory.__getitem__)

    @cached_property
    def largest_batch(self) -> int:
        """The largest number of samples per step that fits with the same plan; 0 if not even the smallest does."""
        parts = self.estimate.layout.dp * self.estimate.layout.microbatches
        if not self._with_batch(parts):
            return 0
        low, high = 1, 2
        while high < 1 << 20 and self._with_batch(high * parts):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._with_batch(middle * parts) else (low, middle)
        return low * parts

    @cached_property
    def remedy(self) -> Remedy | None:
        """The change, or the two, that make the plan fit at the least cost in time; None if it fits, or none do."""
        if self:
            return None
        single = list(self._changed_plans(self.estimate.plan))
        working = [remedy for remedy in single if Fits(remedy.estimate)]
        if not working:
            working = [
                replace(second, change=f"{first.change}, {second.change}")
                for first in single
                for second in self._changed_plans(first.plan)
                if Fits(second.estimate)
            ]
        return min(working, key=lambda remedy: remedy.estimate.step_time, default=None)

    def against(self, other: Plan) -> str:
        """Say why this plan needs more or less than another one, by category, on the fullest rank of each.

        Args:
            other: the other plan.

        >>> gpt2 = {"layers": 12, "hidden": 768, "heads": 12, "vocabulary": 50257}
        >>> mine = fits(gpt2, Plan(dp=8, zero=3), "8x-a100-nvlink", global_batch=8, sequence=1024, stack="deepspeed")
        >>> print(mine.against(Plan(dp=8, zero=2)).splitlines()[0])
        Plan(dp=8, zero=3, precision='bf16') needs 79.2 MiB more than Plan(dp=8, zero=2, precision='bf16')
        """
        theirs = Fits(self._estimate(other, self.estimate.layout.global_batch))
        mine, their = self.memory[self.fullest], theirs.memory[theirs.fullest]
        more = sum(mine.values()) - sum(their.values())
        lines = [
            f"{self.estimate.plan!r} needs {memory_text(abs(more))} {'more' if more > 0 else 'less'} than "
            f"{theirs.estimate.plan!r}"
        ]
        changes = sorted(CATEGORIES, key=lambda name: -abs(mine[name] - their[name]))
        for name in changes:
            change = (mine[name] - their[name]) / GIB
            if abs(change) >= 0.005:
                lines.append(f"  {change:+8.2f} GiB  {name}: {MEANING[name]}")
        return "\n".join(lines)

    def _changed_plans(self, plan: Plan) -> Iterator[Remedy]:
        """Yield the plans that differ from one in one thing."""
        layout = self.estimate.layout
        for change, values in changes(plan, layout.microbatch, self.estimate.hardware.device.half):
            if "precision" in values and self.estimate.stack.name not in FOLLOW:
                continue
            with suppress(ValueError):  # this plan or batch cannot be changed so
                changed = change_plan(plan, **values)
                yield Remedy(changed, change, self._estimate(changed, layout.global_batch))

    def _with_batch(self, batch: int) -> bool:
        return bool(Fits(self._estimate(self.estimate.plan, batch)))

    def _estimate(self, plan: Plan, batch: int) -> Estimate:
        e = self.estimate
        stack: Stack = e.stack
        preset: Preset | None = e.preset
        if stack.name not in FOLLOW:
            plan = replace(plan, precision=e.plan.precision)
        elif plan.precision != e.plan.precision:
            stack, preset = stack_for(plan, FOLLOW[stack.name])[0], None
        return estimate_checked(
            e.model,
            plan,
            e.hardware,
            batch,
            e.sequence,
            stack,
            preset,
            e.layout.trainable,
            e.layout.documents or None,
            e.layout.load,
        )

    def margin(self, memory: Mapping[str, float]) -> float:
        """Return the bytes that fragmentation takes beside this memory."""
        return FRAGMENTATION * sum(memory.values())

    def describe(self) -> str:
        """Return the answer in words."""
        e, memory = self.estimate, self.memory[self.fullest]
        name = e.model.name or "the model"
        verdict = "fits" if self else "does not fit"
        samples = f"{e.layout.global_batch} samples of {e.sequence} tokens"
        lines = [
            f"{name} with {e.plan!r} {verdict} {e.hardware.name}: "
            f"{memory_share(self.needed, self.available)} on rank {self.fullest}, {samples}"
        ]
        for category in sorted(CATEGORIES, key=lambda each: -memory[each]):
            if memory[category] >= 1 << 20:
                lines.append(
                    f"  {memory_text(memory[category], self.needed):>12}  {category}: {MEANING[category]}"
                )
        spare = f"{FRAGMENTATION:.0%} of all that, which an allocator reserves beside it"
        lines.append(f"  {memory_text(self.margin(memory), self.needed):>12}  {MARGIN_WORD}: {spare}")
        lines += [f"Assumed of {what}: {words}." for what, words in e.assumptions.items()]
        if self:
            lines.append(f"The largest batch that fits: {self.largest_batch} samples.")
        elif self.remedy is not None:
            step = self.remedy.estimate.step_time
            cost = f"{seconds(step)} per step, {step / e.step_time - 1:+.0%}"
            lines.append(
                f"What would fit, at the least cost: {self.remedy.change} "
                f"({memory_text(Fits(self.remedy.estimate).needed)}; {cost}):\n  {self.remedy.plan!r}"
            )
        else:
            lines.append(
                f"Neither one change nor two make it fit. The states alone are {memory_text(self._states())} over all "
                f"ranks, which need {-(-self._states() // self.available):.0f} such devices or more."
            )
        return "\n".join(lines)

    def _states(self) -> float:
        """Return the bytes of parameters, gradients and states of the whole model."""
        stack = self.estimate.stack
        trained = (stack.gradient + stack.states) * self.estimate.layout.trainable
        return self.estimate.model.parameters * (stack.element + trained)


def changes(plan: Plan, microbatch: int, half: str = "bf16") -> list[tuple[str, dict[str, Any]]]:
    """Return what may be changed of a plan to save memory: in words, and as fields of the plan.

    Args:
        plan: the plan.
        microbatch: samples per micro-batch.
        half: the precision of 16 bits that the device has.
    """
    options: list[tuple[str, dict[str, Any]]] = []
    for k in (2, 4, microbatch):
        if 1 < k <= microbatch and microbatch % k == 0:
            parts = plan.microbatches * k
            options.append((f"microbatches={parts}", {"microbatches": parts}))
    if plan.recompute == "none":
        options += [(f'recompute="{how}"', {"recompute": how}) for how in ("selective", "every=2", "full")]
    elif plan.recompute != "full":
        options.append(('recompute="full"', {"recompute": "full"}))
    if plan.precision == "full":
        options.append((f'precision="{half}"', {"precision": half}))
    if plan.dp * plan.cp > 1:
        options += [(f"zero={stage}", {"zero": stage}) for stage in range(plan.zero + 1, 4)]
    if plan.dp_shard:
        options.append(("dp_shard=None", {"dp_shard": None}))
    if plan.dp_secondary:
        options.append(("dp_secondary=None", {"dp_secondary": None}))
    if plan.tp > 1 and not plan.sequence_parallel:
        options.append(("sequence_parallel=True", {"sequence_parallel": True}))
    if plan.dp % 2 == 0:
        fewer = {"dp": plan.dp // 2}
        options += [
            (f"tp={2 * plan.tp}, dp={plan.dp // 2}", {"tp": 2 * plan.tp, **fewer}),
            (f"pp={2 * plan.pp}, dp={plan.dp // 2}", {"pp": 2 * plan.pp, **fewer}),
        ]
    if plan.offload == "none":
        options.append(('offload="optimizer"', {"offload": "optimizer"}))
    return options


@public
@answers('mk.fits("llama3-8b", mk.Plan.zero(3, 8), "8x-a100-nvlink", global_batch=8, sequence=4096)')
def fits(
    model: object, plan: Plan, hardware: Hardware | str, *, global_batch: int | None = None,
    sequence: int, stack: str | Stack | None = None, trainable: float = 1.0, documents: Sequence[int] | None = None,
    expert_load: object = None,
) -> Fits:  # fmt: skip
    """Say whether a plan fits a machine: true if it does, and prints why.

    Args:
        model, plan, hardware, sequence, stack, trainable, documents, expert_load: as for `mk.estimate`.
        global_batch: samples per step, over all replicas; None: one per replica and micro-batch.

    Raises:
        ValueError: as for `mk.estimate`.

    >>> bool(fits("llama3-8b", Plan(dp=8, zero=3), "8x-a100-nvlink", global_batch=8, sequence=4096))
    True
    >>> bool(fits("llama3-8b", Plan(dp=2), "2x-rtx-4090", global_batch=2, sequence=4096))
    False
    """
    machine = machine_of(hardware)
    if global_batch is None:
        # what is not a plan is rejected below
        global_batch = plan.dp * plan.microbatches if hasattr(plan, "microbatches") else 1
    return Fits(
        estimate(
            model,
            plan,
            machine,
            global_batch=global_batch,
            sequence=sequence,
            stack=stack,
            trainable=trainable,
            documents=documents,
            expert_load=expert_load,
        )
    )
