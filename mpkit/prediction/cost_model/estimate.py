"""Estimate: a step's time and memory of any plan on any hardware, with the band that the prediction keeps within.

read        the architecture, the layout of the plan, the machine, the stack and its preset
check       what cannot be: too few devices, heads that do not divide, more stages than layers
time        layers priced once and composed (`mpkit.prediction.cost_model.step`)
memory      by rank and category (`mpkit.prediction.cost_model.memory`)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from mpkit.common.calls import answers
from mpkit.common.display import DrawnResult
from mpkit.common.tracebacks import public
from mpkit.common.units import memory_share, memory_text, percent, seconds
from mpkit.devices.catalogue import hardware as machine_of
from mpkit.devices.hardware import Hardware
from mpkit.plan.checks import call_of
from mpkit.plan.plan import Plan
from mpkit.plan.tensor_checks import BY_DOCUMENT
from mpkit.prediction.cost_model.architecture import Architecture
from mpkit.prediction.cost_model.calibrate import Observation
from mpkit.prediction.cost_model.check import check_plan, check_products, checked_layout
from mpkit.prediction.cost_model.kernels import peak_of
from mpkit.prediction.cost_model.known_models import architecture_of
from mpkit.prediction.cost_model.layout import Layout
from mpkit.prediction.cost_model.memory import CATEGORIES, FRAGMENTATION, MARGIN_WORD, stage_memory
from mpkit.prediction.cost_model.preset import Preset, preset_of
from mpkit.prediction.cost_model.shares import ParameterShares, model_under
from mpkit.prediction.cost_model.stack import Stack, stack_of
from mpkit.prediction.cost_model.step import StepTime, step_time
from mpkit.prediction.workload.documents import describe_documents
from mpkit.prediction.workload.routed_load import placed_load
from mpkit.timeline.answer import Answer, Basis
from mpkit.trace import Kind

if TYPE_CHECKING:
    from mpkit.timeline.timeline import Timeline

__all__ = ["Estimate", "estimate", "estimate_checked"]


@dataclass(frozen=True)
class Estimate(DrawnResult, Answer):
    """The prediction of a step, with its band and where the time goes; it prints, and is a picture in a notebook.

    Attributes:
        model, plan, hardware, sequence: what was asked for.
        layout: the plan's degrees, with the samples of a micro-batch.
        stack, preset: what the software does, and the constants with what they were fitted on.
        shares: the parameters of the ranks.
        step: seconds by stage and by cause.
    """

    model: Architecture
    plan: Plan
    hardware: Hardware
    sequence: int
    layout: Layout
    stack: Stack
    preset: Preset
    shares: ParameterShares = field(repr=False)
    step: StepTime = field(repr=False)

    # ---- time

    @property
    def step_time(self) -> float:
        """Seconds per step."""
        return self.step.seconds

    @property
    def band(self) -> tuple[float, float]:
        """The seconds between which nine of ten such steps should lie: the preset's band."""
        return self.step_time * (1 - self.preset.band), self.step_time * (1 + self.preset.band)

    @property
    def because(self) -> dict[str, float]:
        """Where the time goes: seconds by cause on the slowest stage's rank, in descending order."""
        return self.step.because

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all ranks together."""
        return self.layout.global_batch * self.sequence / self.step_time

    @property
    def tflops_per_gpu(self) -> float:
        """Model TFLOP/s per device: three forwards, attention counted as if not causal, nothing for recomputation.

        That is the convention of Chowdhery et al., "PaLM", 2022, appendix B. Megatron's published figures count a
        fourth forward where everything is recomputed. Packed documents attend within themselves alone.
        """
        forward = self.model.forward_flops(self.sequence, causal=False, documents=self.layout.documents)
        flops = 3 * self.layout.global_batch * forward
        return flops / self.step_time / self.layout.ranks / 1e12

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: `tflops_per_gpu` as a share of the device's published peak in the compute dtype."""
        dtype = "bfloat16" if self.stack.element == 2 else "float32"
        return self.tflops_per_gpu * 1e12 / peak_of(self.hardware.device, dtype)

    # ---- memory

    @cached_property
    def stage_memory(self) -> list[dict[str, float]]:
        """Bytes by category for a rank of each stage."""
        return stage_memory(
            self.model, self.layout, self.sequence, self.stack, self.shares, device=self.hardware.device
        )

    @property
    def memory(self) -> Sequence[dict[str, float]]:
        """Bytes at the peak by rank and category; ranks of one stage hold the same."""
        per_stage = self.layout.ranks // self.layout.pp
        return [memory for memory in self.stage_memory for _ in range(per_stage)]

    @property
    def peak_memory(self) -> float:
        """Bytes at the peak of the rank with most."""
        return max(sum(memory.values()) for memory in self.stage_memory)

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
        from mpkit.timeline.played_schedule import followed_by
        from mpkit.timeline.simulation import simulate

        plan = Plan(
            pp=self.plan.pp, schedule=self.plan.schedule, microbatches=self.plan.microbatches,
            virtual_stages=self.plan.virtual_stages,
        )  # fmt: skip
        forward, backward, beside, hop = self.step.played_times
        halves = [time / 2 for time in backward]
        reduces = Kind.REDUCE_SCATTER if self.plan.zero else Kind.ALL_REDUCE
        kinds = {"replicas": reduces, "optimizer": Kind.OPTIMIZER, "stragglers": Kind.BARRIER}
        after = [(phase, kinds[phase], time) for phase, time in self.step.after.items() if time]
        return replace(
            followed_by(simulate(plan, forward, halves, halves, hop, beside=beside), after), basis=self.basis
        )

    def measured(self, seconds: float, memory: float = 0.0) -> Observation:
        """Return this step with its measured time, for `mk.calibrate`."""
        name, e = self.model.name or "a step", self
        return Observation(name, e.model, e.layout, e.sequence, e.hardware, e.stack, seconds, memory)

    def __str__(self) -> str:
        low, high = self.band
        shares = ", ".join(f"{cause} {percent(part / self.step_time)}" for cause, part in self._first(5))
        most = max(self.stage_memory, key=lambda memory: sum(memory.values()))
        needed = self.peak_memory * (1 + FRAGMENTATION)
        held = ", ".join(
            f"{name} {memory_text(most[name], needed)}" for name in CATEGORIES if most[name] >= 1 << 20
        )
        name = self.model.name or "the model"
        origin = "the band of its preset" if self.preset.rows else "nothing was fitted here"
        lines = [
            f"{name} ({self.model.parameters / 1e9:.3g} B parameters), {self.plan!r}",
            f"on {self.hardware.name} in {8 * self.stack.element} bits, {self.layout.global_batch} samples of "
            f"{self.sequence} tokens per step",
            f"step        {seconds(self.step_time)}, {seconds(low)} to {seconds(high)} ({origin})",
            f"            {self.tokens_per_second:,.0f} tokens/s, {self.tflops_per_gpu:.0f} TFLOP/s per device, "
            f"MFU {percent(self.mfu)}",
            f"because     {shares}",
            f"memory      {memory_share(needed, self.hardware.device.memory)}: {held}, {MARGIN_WORD} "
            f"{memory_text(FRAGMENTATION * self.peak_memory, needed)}",
            f"preset      {self.preset}",
        ]
        lines += [f"{what:<12}{words}" for what, words in self.assumptions.items()]
        return "\n".join(lines)

    @property
    def assumptions(self) -> dict[str, str]:
        """What the data is taken to be, in words: of "documents" and "experts", where there are any."""
        layout, part = self.layout, self.sequence // 4
        found = {}
        if layout.documents:
            found["documents"] = describe_documents(layout.documents, layout.ring, layout.cp_order)
        elif self.plan.cp > 1 and self.plan.cp_order in BY_DOCUMENT:
            found["documents"] = (
                "attention is that of one document per sequence. Packed ones attend to less, and the rank with most "
                f"work sets the pace: documents=[{part}, {self.sequence - part}]"
            )
        if self.model.experts:
            found["experts"] = layout.load.describe(layout.ep) if layout.load else "uniform routing"
        return found

    def _first(self, n: int) -> list[tuple[str, float]]:
        return list(self.because.items())[:n]


@public
@answers('mk.estimate("llama3-8b", mk.Plan.zero(3, 8), "8x-a100-nvlink", global_batch=8, sequence=4096)')
def estimate(
    model: object, plan: Plan, hardware: Hardware | str, *, global_batch: int, sequence: int,
    stack: str | Stack | None = None, preset: Preset | None = None, trainable: float = 1.0,
    documents: Sequence[int] | None = None, expert_load: object = None,
) -> Estimate:  # fmt: skip
    """Predict the time and memory of a step of training with Adam.

    The plan's precision decides: "full" is 32 bits, since an architecture has no dtype; "bf16" and "fp16" compute in 16
    bits, with master weights in 32. A stack that is asked for by name has a precision of its own.

    Each sequence is one document, whose attention all orders but
    "contiguous" divide equally, or the `documents` that are packed in it: sum l^2 instead of s^2, in kernels that leave
    out the rest, as FlashAttention's do for sequences of variable length. Of ranks that share sequences (cp) the one
    with most attention under the plan's `cp_order` sets the pace.

    Stages have equal numbers of layers, as frameworks cut them; of stack="mpkit" they are balanced by FLOPs, the head
    included, as those of `Cluster.train` are.

    Args:
        model: a model of transformers or mpkit's GPT, a config, the path of a config.json, a known name such as
            "llama3-8b" (`mpkit.prediction.cost_model.known_models`), or numbers: {"layers": 32, "hidden": 4096,
            "heads": 32, ...}.
        plan: how training is divided.
        hardware: a machine, or its name.
        global_batch: samples per step, over all replicas.
        sequence: tokens per sample.
        stack: the software: a name of `mpkit.prediction.cost_model.stack.STACKS`, or a Stack; None: PyTorch.
        preset: constants of one's own, from `mk.calibrate`; None: those that ship for the device and the stack.
        trainable: the share of the parameters that is trained, less than 1 for LoRA or frozen layers.
        documents: the lengths in tokens, in order, of the documents that are packed in each sequence; they add up to
            `sequence`. None: each sequence is one document.
        expert_load: how busy experts are: rows of the busiest of ep ranks divided by the mean, rows per expert, [E] or
            [layers, E], a run's `expert_load`, or its `.balance(...)`, with copies. None: uniform routing. Copies of a
            model that `mk.models.place_experts` has placed count, too.

    Raises:
        ValueError: the plan cannot work for this model on this machine, or one of the arguments is unknown.

    >>> plan = Plan(dp=8, zero=3, precision="bf16")
    >>> found = estimate("llama3-8b", plan, "8x-h100-nvlink", global_batch=16, sequence=4096, stack="llm-foundry")
    >>> 0.3 < found.mfu < 0.6 and found.peak_memory < 80e9
    True
    >>> long = {"global_batch": 8, "sequence": 65_536, "documents": [4096] * 4 + [49_152]}
    >>> for order in ("contiguous", "zigzag", "balanced"):
    ...     plan = Plan(cp=8, zero=3, cp_order=order, precision="bf16")
    ...     print(order, round(estimate("llama3-8b", plan, "8x-h100-nvlink", **long).because["attention"], 1))
    contiguous 14.1
    zigzag 7.7
    balanced 6.0
    """
    machine = machine_of(hardware)
    check_plan(plan)
    chosen, plan = stack_for(plan, stack, machine.device.half)
    sizes = architecture_of(model, trainable=trainable)
    load = placed_load(expert_load, model, sizes.layers - sizes.dense)
    return estimate_checked(
        sizes, plan, machine, global_batch, sequence, chosen, preset, trainable, documents, load
    )


def stack_for(plan: Plan, stack: str | Stack | None = None, half: str = "bf16") -> tuple[Stack, Plan]:
    """Return the software that runs a plan, and the plan in its precision.

    Args:
        plan: the plan.
        stack: what is asked for; None: PyTorch, in the plan's precision and with its buckets.
        half: the precision of 16 bits that the device has.

    Raises:
        ValueError: there is no such stack, or the plan computes in 16 bits and the stack does not.

    >>> [stack_for(Plan(dp=2, precision=how))[0].name for how in ("full", "bf16")]
    ['pytorch-fp32', 'pytorch']
    >>> stack_for(Plan(dp=2), "llm-foundry")[1]
    Plan(dp=2, precision='bf16')
    """
    narrow = plan.precision != "full"
    bucket = plan.bucket_mb * 2**20
    if stack is None:
        return stack_of("pytorch" if narrow else "pytorch-fp32", bucket=bucket), plan
    chosen = stack_of(stack)
    if chosen.name == "mpkit":
        chosen = replace(chosen, bucket=bucket)
        if narrow:
            chosen = replace(chosen, element=2, gradient=2, reduced=2, states=12, logits=10)
        return chosen, plan
    if narrow and chosen.element == 4:
        raise ValueError(
            f"stack={chosen.name!r} computes in 32 bits, and the plan in {plan.precision!r}: leave stack= out, or ask "
            f"for {call_of(plan, {'precision': 'full'})}"
        )
    return chosen, plan if narrow or chosen.element == 4 else replace(plan, precision=half)


def estimate_checked(
    model: Architecture, plan: Plan, hardware: Hardware, global_batch: int, sequence: int, stack: Stack,
    preset: Preset | None = None, trainable: float = 1.0, documents: Sequence[int] | None = None,
    expert_load: object = None,
) -> Estimate:  # fmt: skip
    """Return the estimate of what `estimate` has read.

    Raises:
        ValueError: the plan cannot work.
    """
    check_products(stack, hardware.device)
    model = model_under(stack, model)
    layout = checked_layout(model, plan, hardware, global_batch, sequence, trainable, documents, expert_load)
    if model.whole_experts and layout.ep == 1:
        layout = replace(layout, etp=1, alike=True)
    if stack.by_weight:
        layout = replace(layout, head=model.head_in_layers)
    if stack.by_flops:
        layout = replace(layout, head=model.head_in_flops(sequence), balanced=True)
    chosen = preset or preset_of(hardware.device, stack)
    shares = ParameterShares(model, layout, stack)
    step = step_time(model, layout, sequence, hardware, stack, chosen.constants, shares)
    return Estimate(model, plan, hardware, sequence, layout, stack, chosen, shares, step)
