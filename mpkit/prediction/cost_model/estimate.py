"""Estimate: a step's time and memory of any plan on any hardware, with the band that the prediction keeps within."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING, Any

from numpy import quantile

from mpkit.common.calls import answers
from mpkit.common.display import DrawnResult
from mpkit.common.tracebacks import public
from mpkit.common.units import memory_share, memory_text, percent, seconds, wrapped
from mpkit.devices.catalogue import hardware as machine_of
from mpkit.devices.hardware import Hardware
from mpkit.plan.kinds import real
from mpkit.plan.plan import Plan
from mpkit.plan.rules import change_plan
from mpkit.prediction.cost_model.layer import peak_of
from mpkit.prediction.cost_model.layout import Layout
from mpkit.prediction.cost_model.memory import CATEGORIES, FRAGMENTATION, MARGIN_WORD, MEANING
from mpkit.prediction.cost_model.preset import FEW, Observation, Preset, preset_for, presets
from mpkit.prediction.cost_model.stack import Stack, stack_for
from mpkit.prediction.cost_model.step import StepTime
from mpkit.prediction.cost_model.workload import Workload, changes, check_plan, checked_layout, workload_of
from mpkit.timeline.answer import Answer, Basis
from mpkit.trace import Kind

if TYPE_CHECKING:
    from mpkit.timeline.timeline import Timeline


MOST_SAMPLES = 1 << 20  # the most samples per micro-batch that `Estimate.largest_microbatch` tries
FOLLOW = "pytorch", "pytorch-fp32"  # the stacks whose precision is the plan's, by name


@dataclass(frozen=True)
class Remedy:
    """A change that makes a plan fit."""

    plan: Plan
    change: str  # in words
    estimate: Estimate


@dataclass(frozen=True, kw_only=True)
class Estimate(Workload, DrawnResult, Answer):
    """The prediction of a step: whether it fits, how long it takes, with its band, and where time and memory go.

    It is true if the plan fits. It prints, and is a picture in a notebook. Its fields include those of a `Workload`.
    """

    plan: Plan
    layout: Layout  # the plan's degrees, with the samples of a micro-batch
    tokens: float = 0.0  # how many are trained on in all; 0: not asked for

    def __bool__(self) -> bool:
        return self.needed <= self.available

    # ---- time

    @cached_property
    def step(self) -> StepTime:
        """Seconds by stage and by cause."""
        return self.time_model.step(self.layout)

    @property
    def step_time(self) -> float:
        """Seconds per step."""
        return self.step.seconds

    @property
    def band(self) -> tuple[float, float]:
        """The seconds between which nine of ten such steps should lie."""
        return self.step_time * (1 - self.relative_band), self.step_time * (1 + self.relative_band)

    @cached_property
    def relative_band(self) -> float:
        """The band as a share of the step: the preset's.

        Constants from few steps can be as wrong as another stack's would be. So a preset of fewer than `FEW` rows
        claims no less than how far the step would be off under the constants of nine of ten other presets.
        """
        own = self.preset
        if not 0 < own.rows < FEW:
            return own.band
        others = [each.constants for each in presets().values() if each.rows >= FEW]
        took = [replace(self.time_model, constants=each).step(self.layout).seconds for each in others]
        return max(own.band, float(quantile([abs(each / self.step_time - 1) for each in took], 0.9)))

    @property
    def because(self) -> dict[str, float]:
        """Where the time goes: seconds by cause on the slowest stage's rank, in descending order."""
        return self.step.because

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all ranks together."""
        return self.global_batch * self.sequence / self.step_time

    @property
    def tflops_per_gpu(self) -> float:
        """Model TFLOP/s per device: three forwards, attention counted as if not causal, nothing for recomputation.

        That is the convention of Chowdhery et al., "PaLM", 2022, appendix B. Megatron's published figures count a
        fourth forward where everything is recomputed.
        """
        flops = 3 * self.global_batch * self.model.forward_flops(self.sequence, causal=False)
        return flops / self.step_time / self.layout.ranks / 1e12

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: `tflops_per_gpu` as a share of the device's published peak in the compute dtype."""
        dtype = "bfloat16" if self.stack.element == 2 else "float32"
        return self.tflops_per_gpu * 1e12 / peak_of(self.hardware.device, dtype)

    @property
    def training_seconds(self) -> float:
        """Seconds in which `tokens` are trained on, step after step; 0 if no tokens were asked for."""
        return self.tokens / self.tokens_per_second

    @property
    def gpu_hours(self) -> float:
        """Hours of all devices together in which `tokens` are trained on."""
        return self.training_seconds * self.layout.ranks / 3600

    # ---- memory

    @cached_property
    def stage_memory(self) -> list[dict[str, float]]:
        """Bytes by category for a rank of each stage."""
        return self.memory_model.stages(self.layout)

    @property
    def memory(self) -> Sequence[dict[str, float]]:
        """Bytes at the peak by rank and category; ranks of one stage hold the same."""
        per_stage = self.layout.ranks // self.layout.pp
        return [memory for memory in self.stage_memory for _ in range(per_stage)]

    @cached_property
    def _peaks(self) -> list[float]:
        """Bytes at the peak of a rank of each stage."""
        ranks = self.memory_model.ranks(self.layout)
        return [rank.peak(self.layout.recompute, self.layout.offload) for rank in ranks]

    @property
    def peak_memory(self) -> float:
        """Bytes at the peak of the rank with most."""
        return max(self._peaks)

    @property
    def needed(self) -> float:
        """Bytes that the rank with most needs, with what fragmentation takes."""
        return self.peak_memory * (1 + FRAGMENTATION)

    @property
    def fullest(self) -> int:
        """The first rank of the stage that needs most."""
        return self._peaks.index(max(self._peaks)) * (self.layout.ranks // self.layout.pp)

    @property
    def largest(self) -> str:
        """The category that takes most on the fullest rank."""
        return max(CATEGORIES, key=self.memory[self.fullest].__getitem__)

    @property
    def largest_batch(self) -> int:
        """The largest number of samples per step that fits with the same plan; 0 if not even the smallest does."""
        return self.largest_microbatch * self.layout.dp * self.layout.microbatches

    @cached_property
    def largest_microbatch(self) -> int:
        """The most samples per micro-batch that fit with the same plan; 0 if not even one does."""
        parts = self.layout.dp * self.layout.microbatches
        low, high = 0, 1
        while high <= MOST_SAMPLES and self._changed(self.plan, high * parts):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._changed(self.plan, middle * parts) else (low, middle)
        return low

    @cached_property
    def remedy(self) -> Remedy | None:
        """The change, or the two, that make the plan fit at the least cost in time; None if it fits, or none do."""
        if self:
            return None
        single = list(self._changed_plans(self.plan))
        working = [remedy for remedy in single if remedy.estimate]
        if not working:
            pairs = ((first, second) for first in single for second in self._changed_plans(first.plan))
            fitting = ((first, second) for first, second in pairs if second.estimate)
            working = [replace(two, change=f"{one.change}, {two.change}") for one, two in fitting]
        return min(working, key=lambda remedy: remedy.estimate.step_time, default=None)

    def margin(self, memory: Mapping[str, float]) -> float:
        """Return the bytes that fragmentation takes beside this memory."""
        return FRAGMENTATION * sum(memory.values())

    def _changed_plans(self, plan: Plan) -> Iterator[Remedy]:
        """Yield the plans that differ from one in one thing."""
        for values in changes(plan, self.layout.microbatch, self.hardware.device.half):
            if "precision" in values and self.stack.name not in FOLLOW:
                continue
            with suppress(ValueError):  # this plan or batch cannot be changed so
                changed = change_plan(plan, **values)
                words = (f'{k}="{v}"' if isinstance(v, str) else f"{k}={v}" for k, v in values.items())
                yield Remedy(changed, ", ".join(words), self._changed(changed, self.global_batch))

    def _changed(self, plan: Plan, batch: int) -> Estimate:
        """Return the estimate of another plan or batch, otherwise as this one."""
        asked: Workload = replace(self, global_batch=batch)
        if plan.precision != self.plan.precision:
            stack = stack_for(plan)[0]
            asked = replace(asked, stack=stack, preset=preset_for(self.hardware.device.name, stack.name))
        return estimate_of(asked, plan)

    # ---- pictures

    @property
    def basis(self) -> Basis:
        """What was measured, and what is assumed."""
        fitted = f"; constants are fitted to {self.preset.rows} published steps" if self.preset.rows else ""
        return Basis(f"nothing{fitted}", "the rest; the result prints its error band")

    def timeline(self) -> Timeline:
        """Return the step as a simulated Timeline, one row per rank of a pipeline; it takes `step_time`.

        What nothing hides of the reduction of gradients, the optimizer and the wait for the slowest node come last.
        """
        from mpkit.timeline.simulation import followed_by, simulate

        names = "pp", "schedule", "microbatches", "virtual_stages"
        shape = {name: getattr(self.plan, name) for name in names}
        forward, backward, beside, hop = self.step.played[4:]
        halves = [time / 2 for time in backward]
        reduces = Kind.REDUCE_SCATTER if self.plan.zero else Kind.ALL_REDUCE
        kinds = {"replicas": reduces, "optimizer": Kind.OPTIMIZER, "stragglers": Kind.BARRIER}
        after = [(phase, kinds[phase], time) for phase, time in self.step.after.items() if time]
        pipeline = simulate(Plan(**shape), forward, halves, halves, hop, beside=beside)
        return replace(followed_by(pipeline, after), basis=self.basis)

    def measured(self, seconds: float, memory: float = 0.0) -> Observation:
        """Return this step with its measured time, for `mk.calibrate`."""
        name, e = self.model.name or "a step", self
        return Observation(name, e.model, e.layout, e.sequence, e.hardware, e.stack, seconds, memory)

    @property
    def share_words(self) -> str:
        """What the fullest rank needs of its device's memory, in words."""
        if self.available == inf:
            unknown = f"and the memory of one {self.hardware.device.name} is not known,"
            return f"{memory_text(self.needed)}, {unknown}"
        return memory_share(self.needed, self.available)

    @property
    def verdict(self) -> str:
        """Whether it fits, in words."""
        return "would run on" if self.available == inf else "fits" if self else "does not fit"

    @property
    def remedy_words(self) -> str:
        """What to change of a plan that does not fit; of one that does, the largest batch that still does; in words."""
        if self.available == inf:
            return ""
        if self:
            most, each = self.largest_batch, self.largest_microbatch
            return f"The largest batch that fits: {most} samples, {each} per micro-batch."
        if self.remedy is None:
            trained = (self.stack.gradient + self.stack.states) * self.trainable
            states = self.model.parameters * (self.stack.element + trained)
            return (
                f"Neither one change nor two make it fit. The states alone are {memory_text(states)} over all ranks, "
                f"which need {-(-states // self.available):.0f} such devices or more."
            )
        took = self.remedy.estimate.step_time
        return (
            f"What would fit, at the least cost: {self.remedy.change} ({memory_text(self.remedy.estimate.needed)}; "
            f"{seconds(took)} per step, {took / self.step_time - 1:+.0%}):\n  {self.remedy.plan!r}"
        )

    @property
    def origin(self) -> str:
        """What the band rests on, in words."""
        if not self.preset.rows:
            return f"nothing was fitted here; band {self.relative_band:.0%}"
        if self.relative_band > self.preset.band:
            return f"the spread of all presets, since this one has {self.preset.rows} measured steps"
        return f"the band of its preset, {self.preset.rows} measured steps"

    def __str__(self) -> str:
        low, high = self.band
        name, memory = self.model.name or "the model", self.memory[self.fullest]
        causes = list(self.because.items())[:5]
        shares = ", ".join(f"{cause} {percent(part / self.step_time)}" for cause, part in causes)
        unless = "" if self else ", if it had the memory"
        lines = [
            f"{name} with {self.plan!r} {self.verdict} {self.hardware.name}: {self.share_words} on rank {self.fullest}"
        ]
        lines += [self.remedy_words] if not self else []
        lines += [
            f"{self.model.parameters / 1e9:.3g} B parameters in {8 * self.stack.element} bits, "
            f"{self.global_batch} samples of {self.sequence} tokens per step",
            f"step        {seconds(self.step_time)}, {seconds(low)} to {seconds(high)} ({self.origin}){unless}",
            f"            {self.tokens_per_second:,.0f} tokens/s, {self.tflops_per_gpu:.0f} TFLOP/s per device, "
            f"MFU {percent(self.mfu)}",
        ]
        if self.tokens:
            days = self.training_seconds / 86_400
            lines.append(
                f"training    {self.tokens:.3g} tokens take {days:,.3g} days, {self.gpu_hours:,.0f} GPU hours{unless}"
            )
        lines += [f"because     {shares}", f"memory      of rank {self.fullest}:"]
        for category in sorted(CATEGORIES, key=lambda each: -memory[each]):
            if memory[category] >= 1 << 20:
                size = memory_text(memory[category], self.needed)
                lines.append(f"  {size:>12}  {category}: {MEANING[category]}")
        spare = f"{FRAGMENTATION:.0%} of all that, which an allocator reserves beside it"
        lines.append(f"  {memory_text(self.margin(memory), self.needed):>12}  {MARGIN_WORD}: {spare}")
        lines.append(f"preset      {self.preset}")
        lines += [f"{what:<12}{words}" for what, words in self.assumptions.items()]
        lines += [self.remedy_words] if self and self.remedy_words else []
        return "\n".join(wrapped(line, 12 * (line[:1].islower() and line[11:12] == " ")) for line in lines)

    @property
    def assumptions(self) -> dict[str, str]:
        """What the data is taken to be, in words: of "experts", where there are any."""
        if not self.model.experts:
            return {}
        ep, even = self.layout.ep, "uniform routing"
        if self.load > 1:
            even = f"the busiest of ep={ep} ranks has {self.layout.busiest:.2f} times the mean rows"
            if ep == 1:
                even = "uneven routing, which is the same work for ranks that hold all experts (ep=1)"
        return {"experts": even}


@public
@answers('mk.estimate("llama3-8b", mk.Plan.zero(3, 8), "8x-a100-nvlink", global_batch=8, sequence=4096)')
def estimate(
    model: object, plan: Plan, hardware: Hardware | str, *, global_batch: int, sequence: int,
    stack: str | Stack | None = None, preset: Preset | None = None, trainable: float = 1.0,
    expert_load: float | None = None, tokens: float = 0.0,
) -> Estimate:  # fmt: skip
    """Predict the time and memory of a step of training with Adam.

    The plan's precision decides: "full" is 32 bits, since an architecture has no dtype; "bf16" and "fp16" compute in 16
    bits, with master weights in 32. A stack that is asked for by name has a precision of its own.

    Each sequence is one document. Stages have equal numbers of layers, as frameworks cut them.

    Args:
        model: a model of transformers or mpkit's GPT, a config, the path of a config.json, a known name such as
            "llama3-8b" (`mpkit.prediction.cost_model.known_models`), or numbers: {"layers": 32, "hidden": 4096,
            "heads": 32, ...}.
        plan: how training is divided.
        hardware: a machine, or its name.
        global_batch: samples per step, over all replicas.
        sequence: tokens per sample.
        stack: the software: a name of `mpkit/prediction/cost_model/stacks.toml`, or a Stack; None: PyTorch.
        preset: constants of one's own, from `mk.calibrate`; None: those that ship for the device and the stack.
        trainable: the share of the parameters that is trained, less than 1 for LoRA or frozen layers.
        expert_load: how busy experts are: rows of the busiest of ep ranks divided by the mean. None: uniform routing.
        tokens: how many are trained on in all, such as 1e12: the answer says how many days and GPU hours that takes.

    Raises:
        ValueError: the plan cannot work for this model on this machine, or one of the arguments is unknown.

    >>> plan = Plan(dp=8, zero=3, precision="bf16")
    >>> found = estimate("llama3-8b", plan, "8x-h100-nvlink", global_batch=16, sequence=4096, stack="llm-foundry")
    >>> 0.3 < found.mfu < 0.6 and found.peak_memory < 80e9
    True
    """
    check_plan(plan)
    total = real(tokens)
    if total is None or not 0 <= total < inf:
        raise ValueError(
            f"estimate(tokens={tokens!r}): how many tokens are trained on in all, such as tokens=1e12"
        )
    machine = machine_of(hardware)
    chosen, plan = stack_for(plan, stack, machine.device.half)
    asked = workload_of(model, machine, chosen, preset, global_batch, sequence, trainable, expert_load)
    return estimate_of(asked, plan, total)


@public
@answers('mk.fits("llama3-8b", mk.Plan.zero(3, 8), "8x-a100-nvlink", global_batch=8, sequence=4096)')
def fits(
    model: object, plan: Plan, hardware: Hardware | str, *, global_batch: int | None = None, sequence: int,
    **asked: Any,
) -> Estimate:  # fmt: skip
    """Say whether a plan fits a machine: its estimate, which is true if it does, and prints why.

    Args:
        model, plan, hardware, sequence, asked: as for `mk.estimate`.
        global_batch: samples per step, over all replicas; None: one per replica and micro-batch.

    Raises:
        ValueError: as for `mk.estimate`.

    >>> bool(fits("llama3-8b", Plan(dp=8, zero=3), "8x-a100-nvlink", global_batch=8, sequence=4096))
    True
    >>> bool(fits("llama3-8b", Plan(dp=2), "2x-rtx-4090", global_batch=2, sequence=4096))
    False
    """
    check_plan(plan)
    if global_batch is None:
        global_batch = plan.dp * plan.microbatches
    return estimate(model, plan, hardware, global_batch=global_batch, sequence=sequence, **asked)


def estimate_of(asked: Workload, plan: Plan, tokens: float = 0.0) -> Estimate:
    """Return the estimate of a plan; raise ValueError if it cannot work."""
    sizes = {each.name: getattr(asked, each.name) for each in fields(Workload)}
    return Estimate(**sizes, plan=plan, layout=checked_layout(asked, plan), tokens=tokens)
