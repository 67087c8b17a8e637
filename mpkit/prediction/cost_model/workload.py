"""Workload: what is trained, where, and with which software; an estimate adds a plan, an advice looks for the best.

Plans that cannot work for it are rejected here, and so is listed what may be changed of a plan so that it fits.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from math import inf
from typing import Any

from mpkit.devices.catalogue import hardware as machine_of
from mpkit.devices.catalogue.machines import device_names
from mpkit.devices.hardware import Hardware
from mpkit.plan.kinds import CONTIGUOUS, METHODS, every, real, whole
from mpkit.plan.plan import Plan
from mpkit.plan.rules import call_of
from mpkit.prediction.cost_model.architecture import Architecture
from mpkit.prediction.cost_model.known_models import architecture_of
from mpkit.prediction.cost_model.layout import Layout, layout_of
from mpkit.prediction.cost_model.memory import MemoryModel
from mpkit.prediction.cost_model.preset import Preset, preset_for
from mpkit.prediction.cost_model.stack import Constants, Stack
from mpkit.prediction.cost_model.step import StepModel


@dataclass(frozen=True)
class Workload:
    """What is trained, where, and with which software."""

    model: Architecture  # as the stack runs it
    hardware: Hardware
    stack: Stack
    preset: Preset  # the constants, with what they were fitted on
    global_batch: int  # samples per step
    sequence: int  # tokens per sample
    trainable: float = 1.0  # the share of the parameters that is trained
    load: float = 1.0  # rows of the busiest rank that divides experts, divided by the mean

    @property
    def memory_model(self) -> MemoryModel:
        """The model that prices memory."""
        return self._models[1]

    @property
    def time_model(self) -> StepModel:
        """The model that prices time."""
        return self._models[0]

    @cached_property
    def _models(self) -> tuple[StepModel, MemoryModel]:
        # Where ranks are is not priced. A machine counts as equal to itself though a rate changes: hence `rates`.
        machine, stack = replace(self.hardware, order=()), self.stack
        device, links = machine.device, (link for link in (machine.link, machine.between) if link)
        rates = (*device.peak.items(), *device.flops.items(), *(tuple(link.bus.items()) for link in links))
        return _models(self.model, self.sequence, machine, rates, stack, self.preset.constants)

    def __getstate__(self) -> dict[str, Any]:  # without the models, whose functions cannot be pickled
        return {name: value for name, value in vars(self).items() if name != "_models"}

    @property
    def available(self) -> float:
        """Bytes of a device's memory; infinite where the catalogue does not know it, as of a CPU."""
        return float(self.hardware.device.memory or inf)

    @property
    def head(self) -> float:
        """The head as a number of layers if the software cuts stages by weight; otherwise 0."""
        return self.model.head_in_layers if self.stack.by_weight else 0.0


@lru_cache(64)
def _models(
    model: Architecture, sequence: int, machine: Hardware, rates: object, stack: Stack, constants: Constants
) -> tuple[StepModel, MemoryModel]:
    """Return what prices plans; estimates of one model, machine and stack share it, and what it remembers."""
    time = StepModel(model, sequence, machine, stack, constants)
    return time, MemoryModel(model, sequence, stack, machine.device)


def workload_of(
    model: object, hardware: Hardware | str, stack: Stack, preset: Preset | None, global_batch: int, sequence: int,
    trainable: float = 1.0, expert_load: float | None = None,
) -> Workload:  # fmt: skip
    """Check the arguments of `mk.estimate` and return them as a workload."""
    if not 0 < (real(trainable) or 0) <= 1:
        raise ValueError(
            f"trainable={trainable!r}: the share of the parameters that is trained, such as 0.01 for LoRA"
        )
    if preset is not None and not isinstance(preset, Preset):
        raise ValueError(f"preset={preset!r}: constants of one's own, from mk.calibrate(...), or left out")
    machine, sizes = machine_of(hardware), architecture_of(model, trainable=trainable)
    load = _checked_load(expert_load, sizes)
    if stack.divides_experts and sizes.whole_experts:
        sizes = replace(sizes, whole_experts=False)
    constants = preset or preset_for(machine.device.name, stack.name)
    return Workload(sizes, machine, stack, constants, global_batch, sequence, trainable, load)


def _checked_load(load: object, model: Architecture) -> float:
    """Return the load of the busiest rank, which is at least 1; None stands for uniform routing."""
    if load is None:
        return 1.0
    ratio = real(load)
    if ratio is None or not 1 <= ratio < inf:
        raise ValueError(
            f"expert_load={load!r:.80}: rows of the busiest rank that divides experts, divided by the mean, 1 or more, "
            "such as expert_load=1.4; of a run, run.expert_load has the rows"
        )
    if not model.experts:
        raise ValueError(f"expert_load={load!r} says how busy experts are, and this model has none")
    return ratio


# ---- plans that can work

UNPRICED = {  # fields of a plan that decide what a step takes, and that sizes of a model say nothing about
    "data_parallel": "nn.DataParallel gathers all outputs on one rank and sends it the weights of each step",
    "cut": "cut= names layers of the model that is trained",
    "tensor": "tensor= names layers of the model that is trained",
}
_DEFAULTS = {each.name: each.default for each in fields(Plan)}


def check_plan(plan: object) -> None:
    """Raise unless this is a plan."""
    if not isinstance(plan, Plan):
        raise ValueError(f"plan={plan!r}: give a Plan, such as mk.Plan.zero(3, 8)")


def checked_layout(asked: Workload, plan: Plan) -> Layout:
    """Return the layout of a plan, or raise an error that says why it cannot work, and what would."""
    model, hardware = asked.model, asked.hardware
    if (whole(asked.sequence) or 0) < 1:
        raise ValueError(f"sequence={asked.sequence!r}: tokens per sample, a whole number, 1 or more")
    if plan.ranks > hardware.devices:
        names = (name for name, row in device_names().items() if row["device"] == hardware.device.name)
        raise ValueError(
            f"{plan!r} needs {plan.ranks} devices, and {hardware.name} has {hardware.devices}. "
            f"mk.hardware({next(names, hardware.device.name)!r}, nodes={-(-plan.ranks // hardware.per_node)}, "
            f"per_node={hardware.per_node}, nic='ndr') has enough."
        )
    _check_unpriced(plan)
    half = hardware.device.half
    if plan.precision == "bf16" != half:
        raise ValueError(
            f"{plan!r} computes in bfloat16, which {hardware.device.name} has no units for: {half} does, as "
            f"{call_of(plan, {'precision': half})}"
        )
    if model.heads % plan.tp or model.ffn % plan.tp:
        fits = [t for t in range(1, plan.tp) if not model.heads % t and not model.ffn % t]
        raise ValueError(
            f"tp={plan.tp} does not divide {model.heads} attention heads and an MLP of {model.ffn}: tp={fits[-1]} does"
        )
    if model.experts % plan.ep or (plan.ep > 1 and not model.experts):
        every_ep = range(1, plan.ep) if model.experts else ()
        fits = [n for n in every_ep if not model.experts % n and not plan.mesh.edp * plan.ep % n]
        raise ValueError(
            f"ep={plan.ep} ranks cannot hold equally many of {model.experts} experts per layer: "
            f"ep={max(fits, default=1)}" + ("" if model.experts else ", since this model has none")
        )
    if asked.load > plan.ep > 1:
        raise ValueError(
            f"expert_load={asked.load:g}: if one of ep={plan.ep} ranks has all rows, that is {plan.ep} times the mean; "
            f"expert_load={plan.ep}"
        )
    if every(plan.recompute) > model.layers:
        raise ValueError(
            f"{plan!r} recomputes one of so many layers, and there are {model.layers}: nothing would be recomputed. "
            f"{call_of(plan, {'recompute': f'every={model.layers}'})} recomputes one"
        )
    if plan.stages > model.layers:
        most = model.layers // plan.virtual_stages
        either = f"pp={most} at most" if most else f"virtual_stages={model.layers} at most, with pp=1"
        raise ValueError(f"{plan.stages} stages for {model.layers} layers: {either}")
    check_length(model, asked.sequence)
    _check_sequence(model, plan, asked.sequence)
    layout = layout_of(plan, asked.global_batch, asked.trainable, asked.load)
    changed: dict[str, Any] = {"etp": 1, "alike": True} if model.whole_experts and layout.ep == 1 else {}
    if asked.stack.by_weight:
        changed["head"] = asked.head
    return replace(layout, **changed) if changed else layout


def _check_unpriced(plan: Plan) -> None:
    """Raise if a plan says something that sizes alone do not price; the message has the plan without it."""
    for name, why in UNPRICED.items():
        if getattr(plan, name) != (default := _DEFAULTS[name]):
            raise ValueError(
                f"{plan!r}: {why}, so an estimate, which knows a model's sizes alone, would be that of "
                f"{call_of(plan, {name: default})}. Ask for that one; or let the plan's own code say it: "
                "mk.Timeline.of(mk.trace_fake(lambda: model, plan, batch=batch, loss=..., optimizer=..., "
                "hardware='8x-a100-nvlink'))"
            )


def check_length(model: Architecture, sequence: int) -> None:
    """Raise if a model has learned positions for fewer tokens."""
    if model.positions and not model.patch and sequence > model.positions:
        raise ValueError(
            f"sequence={sequence}: {model.name or 'the model'} has learned positions for {model.positions} tokens, and "
            f"refuses longer sequences: sequence={model.positions}, or a model of more positions"
        )


def _check_sequence(model: Architecture, plan: Plan, sequence: int) -> None:
    """Raise if a plan's ranks cannot share such sequences, or for Ulysses the heads, as in trainings."""
    pieces = 1 if plan.cp == 1 or plan.cp_order == CONTIGUOUS else 2
    parts = plan.cp * max(pieces, plan.tp if plan.sequence_parallel else 1)
    if sequence % parts:
        divides = f"cp={plan.cp}" if plan.cp > 1 else ""
        if pieces > 1:
            divides += f", cp_order={plan.cp_order!r} with two pieces per rank"
        if plan.sequence_parallel:
            divides += f"{' and ' if divides else ''}tp={plan.tp} with sequence_parallel=True"
        near = sequence // parts * parts or parts
        raise ValueError(f"{divides} does not divide sequences of {sequence} tokens: sequence={near} does")
    if plan.cp_method != METHODS[0] and not can_divide_heads(model, plan.tp, plan.cp):
        heads, of_keys = model.heads // plan.tp, max(1, model.kv_heads // plan.tp)
        raise ValueError(
            f"cp_method={plan.cp_method!r}: cp={plan.cp} ranks cannot divide {heads} heads of queries and {of_keys} of "
            "keys; cp_method='ring' divides none"
        )


def can_divide_heads(model: Architecture, tp: int, cp: int) -> bool:
    """Return whether cp ranks can divide the heads of each tp rank, as Ulysses does."""
    heads, of_keys = model.heads // tp, max(1, model.kv_heads // tp)
    return heads % cp == 0 and (of_keys % cp == 0 or cp % of_keys == 0)


# ---- where a plan does not fit


def changes(plan: Plan, microbatch: int, half: str = "bf16") -> Iterator[dict[str, Any]]:
    """Yield changes of a plan that save memory, as fields of the plan; `half` is the device's 16-bit precision."""
    for k in (2, 4, microbatch):
        if 1 < k <= microbatch and microbatch % k == 0:
            yield {"microbatches": plan.microbatches * k}
    if plan.recompute == "none":
        yield from ({"recompute": how} for how in ("selective", "every=2", "full"))
    elif plan.recompute != "full":
        yield {"recompute": "full"}
    if plan.precision == "full":
        yield {"precision": half}
    if plan.dp * plan.cp > 1:
        yield from ({"zero": stage} for stage in range(plan.zero + 1, 4))
    if plan.dp_shard:
        yield {"dp_shard": None}
    if plan.tp > 1 and not plan.sequence_parallel:
        yield {"sequence_parallel": True}
    if plan.dp % 2 == 0:
        yield {"tp": 2 * plan.tp, "dp": plan.dp // 2}
        yield {"pp": 2 * plan.pp, "dp": plan.dp // 2}
    if plan.offload == "none":
        yield {"offload": "optimizer"}
