"""What cannot be: a plan that does not divide this model, or needs more devices than the machine has.

What may be changed of a plan so that it fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from mpkit.devices.hardware import Hardware
from mpkit.plan.kinds import CONTIGUOUS, METHODS, every, whole
from mpkit.plan.plan import Plan
from mpkit.plan.rules import call_of
from mpkit.prediction.cost_model.architecture import Architecture
from mpkit.prediction.cost_model.layout import Layout, layout_of
from mpkit.prediction.cost_model.workload import Workload

UNPRICED = {
    "data_parallel": "nn.DataParallel gathers all outputs on one rank and sends it the weights of each step",
    "cut": "cut= names layers of the model that is trained",
    "tensor": "tensor= names layers of the model that is trained",
}
"""The fields of a plan that decide what a step takes, and that no size of a model says anything about."""


def check_plan(plan: object) -> None:
    """Check that a plan is one.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(plan, Plan):
        raise ValueError(f"plan={plan!r}: give a Plan, such as mk.Plan.zero(3, 8)")


def checked_layout(asked: Workload, plan: Plan) -> Layout:
    """Return the layout of a plan that can work.

    Raises:
        ValueError: it cannot; the message says why, and what would.
    """
    model, hardware = asked.model, asked.hardware
    if (whole(asked.sequence) or 0) < 1:
        raise ValueError(f"sequence={asked.sequence!r}: tokens per sample, a whole number, 1 or more")
    if plan.ranks > hardware.devices:
        raise ValueError(
            f"{plan!r} needs {plan.ranks} devices, and {hardware.name} has {hardware.devices}. "
            f"mk.hardware({_short(hardware)!r}, nodes={-(-plan.ranks // hardware.per_node)}, "
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
    if model.whole_experts and layout.ep == 1:
        layout = replace(layout, etp=1, alike=True)
    return replace(layout, head=asked.head) if asked.head else layout


def _check_unpriced(plan: Plan) -> None:
    """Check that a plan says nothing that sizes alone do not price.

    Raises:
        ValueError: it does; the message has the plan without it.
    """
    for name, why in UNPRICED.items():
        default = next(field.default for field in fields(plan) if field.name == name)
        if getattr(plan, name) != default:
            raise ValueError(
                f"{plan!r}: {why}, so an estimate, which knows a model's sizes alone, would be that of "
                f"{call_of(plan, {name: default})}. Ask for that one; or let the plan's own code say it: "
                "mk.Timeline.of(mk.trace_fake(lambda: model, plan, batch=batch, loss=..., optimizer=..., "
                "hardware='8x-a100-nvlink'))"
            )


def check_length(model: Architecture, sequence: int) -> None:
    """Check that a model has positions for so many tokens.

    Raises:
        ValueError: it has learned fewer.
    """
    if model.positions and not model.patch and sequence > model.positions:
        raise ValueError(
            f"sequence={sequence}: {model.name or 'the model'} has learned positions for {model.positions} tokens, and "
            f"refuses longer sequences: sequence={model.positions}, or a model of more positions"
        )


def _check_sequence(model: Architecture, plan: Plan, sequence: int) -> None:
    """Check that the ranks of a plan can share sequences of so many tokens, and for Ulysses the heads, as trainings do.

    Raises:
        ValueError: they cannot.
    """
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
    """Return whether cp ranks can divide the heads that each of tp ranks has, as Ulysses does.

    >>> llama3 = Architecture(32, 4096, 32, kv_heads=8)
    >>> [cp for cp in range(1, 65) if can_divide_heads(llama3, 2, cp)]  # of 16 heads of queries and 4 of keys
    [1, 2, 4, 8, 16]
    """
    heads, of_keys = model.heads // tp, max(1, model.kv_heads // tp)
    return heads % cp == 0 and (of_keys % cp == 0 or cp % of_keys == 0)


def _short(hardware: Hardware) -> str:
    from mpkit.devices.catalogue.machines import device_names

    names = (short for short, row in device_names().items() if row["device"] == hardware.device.name)
    return next(names, hardware.device.name)


# ---- where a plan does not fit


def changes(plan: Plan, microbatch: int, half: str = "bf16") -> Iterator[dict[str, Any]]:
    """Yield what may be changed of a plan to save memory, as fields of the plan.

    Args:
        plan: the plan.
        microbatch: samples per micro-batch.
        half: the precision of 16 bits that the device has.
    """
    yield from (
        {"microbatches": plan.microbatches * k}
        for k in (2, 4, microbatch)
        if 1 < k <= microbatch and microbatch % k == 0
    )
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
