"""What cannot be: a plan that does not divide this model, or needs more devices than the machine has.

What may be changed of a plan so that it fits, and what the categories of memory mean.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from mpkit.devices.hardware import Device, Hardware
from mpkit.plan.kinds import CONTIGUOUS, every, real, whole
from mpkit.plan.plan import Plan
from mpkit.plan.rules import call_of
from mpkit.prediction.cost_model.architecture import Architecture
from mpkit.prediction.cost_model.layer import CONVERTED
from mpkit.prediction.cost_model.layout import Layout, layout_of
from mpkit.prediction.cost_model.stack import Stack

__all__ = [
    "MEANING",
    "can_divide_experts",
    "can_divide_heads",
    "changes",
    "check_length",
    "check_plan",
    "check_products",
    "check_trainable",
    "checked_layout",
    "checked_load",
]

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


def check_trainable(trainable: object) -> None:
    """Check that a share of the parameters is one.

    Raises:
        ValueError: it is not.
    """
    if isinstance(trainable, bool) or not isinstance(trainable, int | float) or not 0 < trainable <= 1:
        raise ValueError(
            f"trainable={trainable!r}: the share of the parameters that is trained, such as 0.01 for LoRA"
        )


def check_products(stack: Stack, device: Device) -> None:
    """Check that a device computes in the 8 or 4 bits of a stack.

    Raises:
        ValueError: it does not, or both are asked for.
    """
    dtype, switch = ("float4", "fp4") if stack.fp4 else ("float8", "fp8")
    if stack.fp8 and stack.fp4:
        raise ValueError("stack_of(fp8=True, fp4=True): products run in one of them; fp4=True alone is NVFP4")
    if stack.scaling not in CONVERTED:
        raise ValueError(f"stack_of(scaling={stack.scaling!r}): one of {', '.join(map(repr, CONVERTED))}")
    if (stack.fp8 or stack.fp4) and dtype not in device.peak:
        raise ValueError(
            f"stack={stack.name!r} with {switch}=True multiplies in {dtype}, and no rate of {device.name} in it is "
            f"known: {switch}=False, or hardware={'8x-b200-nvlink' if stack.fp4 else '8x-h100-nvlink'!r}"
        )


def checked_layout(
    model: Architecture, plan: Plan, hardware: Hardware, global_batch: int, sequence: int, trainable: float = 1.0,
    expert_load: float | None = None,
) -> Layout:  # fmt: skip
    """Return the layout of a plan that can work.

    Raises:
        ValueError: it cannot; the message says why, and what would.
    """
    if (whole(sequence) or 0) < 1:
        raise ValueError(f"sequence={sequence!r}: tokens per sample, a whole number, 1 or more")
    check_trainable(trainable)
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
        fits = [
            n
            for n in range(1, plan.ep)
            if model.experts and not model.experts % n and not plan.mesh.edp * plan.ep % n
        ]
        raise ValueError(
            f"ep={plan.ep} ranks cannot hold equally many of {model.experts} experts per layer: "
            f"ep={max(fits, default=1)}" + ("" if model.experts else ", since this model has none")
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
    _check_sequence(model, plan, sequence)
    _check_ulysses(model, plan)
    return layout_of(plan, global_batch, trainable, checked_load(expert_load, model, plan.ep))


def checked_load(load: object, model: Architecture, ep: int = 1) -> float:
    """Return the rows of the busiest of ep ranks that divide experts, divided by the mean; None: 1.

    Raises:
        ValueError: it is no such ratio, or the model has no experts.
    """
    if load is None:
        return 1.0
    ratio = real(load)
    if ratio is None or not 1 <= ratio < float("inf"):
        raise ValueError(
            f"expert_load={load!r:.80}: rows of the busiest rank that divides experts, divided by the mean, 1 or more, "
            "such as expert_load=1.4; of a run, run.expert_load has the rows"
        )
    if not model.experts:
        raise ValueError(f"expert_load={load!r} says how busy experts are, and this model has none")
    if ratio > ep > 1:
        raise ValueError(
            f"expert_load={ratio:g}: if one of ep={ep} ranks has all rows, that is {ep} times the mean; "
            f"expert_load={ep}"
        )
    return float(ratio)


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
    """Check that the ranks of a plan can share sequences of so many tokens, as trainings do.

    Raises:
        ValueError: they cannot, or the model has no positions for so many.
    """
    check_length(model, sequence)
    blocks = plan.cp == 1 or plan.cp_order == CONTIGUOUS
    pieces = 1 if blocks else 2
    parts = plan.cp * max(pieces, plan.tp if plan.sequence_parallel else 1)
    if sequence % parts:
        divides = f"cp={plan.cp}" if plan.cp > 1 else ""
        if pieces > 1:
            divides += f", cp_order={plan.cp_order!r} with two pieces per rank"
        if plan.sequence_parallel:
            divides += f"{' and ' if divides else ''}tp={plan.tp} with sequence_parallel=True"
        near = sequence // parts * parts or parts
        raise ValueError(f"{divides} does not divide sequences of {sequence} tokens: sequence={near} does")


def _check_ulysses(model: Architecture, plan: Plan) -> None:
    """Check that the ranks of a plan can divide the heads as Ulysses does.

    Raises:
        ValueError: they cannot.
    """
    ulysses = plan.cp if plan.cp_method == "ulysses" else 1
    if not can_divide_heads(model, plan.tp, ulysses):
        heads, of_keys = model.heads // plan.tp, max(1, model.kv_heads // plan.tp)
        raise ValueError(
            f"cp_method={plan.cp_method!r}: {ulysses} of cp={plan.cp} ranks cannot divide {heads} heads of queries and "
            f"{of_keys} of keys; cp_method='ring' divides none"
        )


def can_divide_heads(model: Architecture, tp: int, cp: int) -> bool:
    """Return whether cp ranks can divide the heads that each of tp ranks has, as Ulysses does.

    >>> llama3 = Architecture(32, 4096, 32, kv_heads=8)
    >>> [cp for cp in range(1, 65) if can_divide_heads(llama3, 2, cp)]  # of 16 heads of queries and 4 of keys
    [1, 2, 4, 8, 16]
    """
    heads, of_keys = model.heads // tp, max(1, model.kv_heads // tp)
    return heads % cp == 0 and (of_keys % cp == 0 or cp % of_keys == 0)


def can_divide_experts(model: Architecture, tp: int) -> bool:
    """Return whether each of tp ranks can have a part of every expert, as tensor parallelism divides an MLP.

    >>> qwen3 = Architecture(94, 4096, 64, experts=128, top_k=8, expert_ffn=1536)
    >>> [tp for tp in range(2, 65) if can_divide_experts(qwen3, tp) and 64 % tp == 0]
    [2, 4, 8, 16, 32, 64]
    """
    return not model.whole_experts and (model.expert_ffn or model.ffn) % tp == 0


def _short(hardware: Hardware) -> str:

    from mpkit.devices.catalogue.machines import device_names

    names = (short for short, row in device_names().items() if row["device"] == hardware.device.name)
    return next(names, hardware.device.name)


# ---- where a plan does not fit

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
