"""Memory: what a rank holds at its peak, by category.

    params        the weights it computes with; under ZeRO-3 its part
    grads         accumulated gradients; under ZeRO-2 and -3 its part. Some stacks convert them for the update, when the
                  activations are gone
    optimizer     states and master weights; under ZeRO its part
    activations   what the backward needs of each micro-batch in flight, and the largest layer's working set
    logits        of the last stage: logits, their copy in 32 bits and its gradient, whose peak is before the backward
    gathered      under ZeRO-3: whole parameters of the layer at work and the next one, and a whole gradient
    buffers       what the framework and libraries keep: buckets, placeholders, workspaces
    context       outside torch's allocator: the CUDA context and NCCL's channels

Sources: Rajbhandari et al., "ZeRO", SC 2020 (states); Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models", 2022, section 4 (activations); both extended to gated MLPs, grouped queries and fused attention.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cache

from mpkit.devices.device import Device
from mpkit.plan.schedule.summary import peak_live
from mpkit.prediction.cost_model.architecture import Architecture
from mpkit.prediction.cost_model.layout import Layout
from mpkit.prediction.cost_model.shares import ParameterShares
from mpkit.prediction.cost_model.stack import MIB, Stack

__all__ = ["CATEGORIES", "activations", "fullest_stages", "stage_memory", "workspaces"]

CATEGORIES = ("params", "grads", "optimizer", "activations", "logits", "gathered", "buffers", "context")

GIB = 2**30
CONTEXT = 1.0 * GIB
NCCL = 0.5 * GIB


@cache
def workspaces(stack: Stack, device: Device) -> float:
    """Return the bytes that cuBLAS and Transformer Engine keep within torch's allocator.

    cuBLAS keeps one workspace for each of the two threads that multiply, of the forward and of the backward: what
    CUBLAS_WORKSPACE_CONFIG says (:4096:8 is 32 MiB), else 32 MiB on Hopper and 8.1 MiB on other GPUs of NVIDIA.
    Transformer Engine keeps another one: 32 MiB, or 4 before Hopper.

    Source: torch/aten/src/ATen/cuda/CublasHandlePool.cpp; transformer_engine/pytorch/module/base.py.

    >>> from mpkit.devices.catalogue import build_machine
    >>> [workspaces(Stack("any"), build_machine(name).device) / MIB for name in ("a100", "h100", "gb200", "mi300x")]
    [16.25, 64.0, 16.25, 0.0]
    """
    if not re.match(r"(A|V|T|L|H|B|GH|GB)\d|RTX|TITAN", device.name) or stack.name == "mpkit":
        return 0.0
    cublas = stack.cublas_workspace or (32 if re.match(r"G?H\d", device.name) else 8.125) * MIB
    engine = (32 if "float8" in device.peak else 4) * MIB if stack.transformer_engine else 0.0
    return 2 * cublas + engine


def activations(model: Architecture, layer: int, layout: Layout, sequence: int, stack: Stack) -> float:
    """Return the bytes that a layer keeps of one micro-batch for its backward, without recomputation.

    Args:
        model, layer: the architecture, and the number of the layer.
        layout: how the step is divided.
        sequence: tokens per sample, s.
        stack: what the software does.

    >>> gpt = Architecture(48, 6144, 64, bias=True)
    >>> stack = Stack("paper", fused=False, dropout=True)
    >>> s, b, h = 2048, 4, 6144
    >>> round(activations(gpt, 0, Layout(microbatch=b), s, stack) / (s * b * h * (34 + 5 * 64 * s / h)), 9)
    1.0
    """
    t = layout.tp
    whole = t if layout.sequence_parallel else 1
    tokens = layout.microbatch * sequence / layout.cp
    e, h, a = stack.element, model.hidden, model.heads
    mask = 1 if stack.dropout else 0

    routed = 0.0  # of experts
    outside = 2 * e * h + 2 * e * h + 2 * mask * h  # inputs of norms and of products; dropout masks
    if model.kv_rank:
        latent = 2 * (model.q_rank + model.kv_rank) + model.rope_dim  # before and after their norms
        outside += e * latent
        inside = e * a * (2 * model.qk_dim + model.v_dim)
    else:
        inside = e * (a + 2 * model.kv_heads) * model.head_dim
    inside += stack.attention_outputs * e * a * model.v_dim
    if model.qk_norm:  # queries and keys before and after their norms
        inside += e * (a + model.kv_heads) * model.head_dim
    if stack.fused:
        inside += 4 * a  # the logarithms of the sums of its scores
    else:
        inside += (2 * e + mask) * a * sequence if mask else e * a * sequence
    widths = (
        stack.gates if model.gated else 2
    )  # an MLP without a gate keeps what its activation reads and returns
    if model.experts and layer >= model.dense:
        each = e * widths * (model.expert_ffn or model.ffn) + 2 * e * h  # and the tokens as they were sent
        inside += e * widths * model.shared_ffn
        routed = model.top_k * each / layout.expert_parts
        outside += 4 * model.experts
    else:
        inside += e * widths * model.ffn
    return tokens * (outside / whole + inside / t + routed)


def kept_bytes(model: Architecture, layer: int, layout: Layout, sequence: int, stack: Stack) -> float:
    """Return the bytes that a layer keeps of one micro-batch, with the layout's recomputation.

    >>> gpt = Architecture(48, 6144, 64, bias=True)
    >>> kept_bytes(gpt, 0, Layout(microbatch=4, recompute="full"), 2048, Stack("paper")) == 2 * 2048 * 4 * 6144
    True
    """
    everything = activations(model, layer, layout, sequence, stack)
    how, tokens = layout.recompute, layout.microbatch * sequence / layout.cp
    border = stack.element * tokens * model.hidden / (layout.tp if layout.sequence_parallel else 1)
    if how == "full":
        return border
    if how == "selective":
        core = 0.0 if stack.fused else 1.0
        mask = 1 if stack.dropout else 0
        per_score = (2 * stack.element + mask) if mask else stack.element
        return everything - core * tokens * per_score * model.heads * sequence / layout.tp
    if how == "products":
        return border + 0.5 * (everything - border)
    if how == "none":
        return everything
    k = int(how.removeprefix("every="))
    return (border + (k - 1) * everything) / k


def stage_memory(
    model: Architecture, layout: Layout, sequence: int, stack: Stack, shares: ParameterShares,
    stages: Collection[int] | None = None, device: Device | None = None,
) -> list[dict[str, float]]:  # fmt: skip
    """Return bytes by category for a rank of each stage.

    Args:
        model, layout, sequence, stack: as in `activations`.
        shares: the parameters of the ranks.
        stages: only of these; None: of all.
        device: whose libraries keep workspaces; None: those are left out.
    """
    kept_by_libraries = workspaces(stack, device) if device else 0.0
    n, tokens = layout.shards, layout.microbatch * sequence / layout.cp
    kinds = [
        (first, first + count, kept_bytes(model, first, layout, sequence, stack))
        for first, count in model.kinds()
    ]
    border = stack.element * tokens * model.hidden / (layout.tp if layout.sequence_parallel else 1)
    working = max(activations(model, first, layout, sequence, stack) for first, _ in model.kinds())
    working = working if layout.recompute != "none" else _gradients_within(model, tokens, layout, stack)
    held, begin, out = layout.stage_layers(model.layers), 0, []
    in_flight = peak_live(layout.schedule, layout.pp, layout.microbatches, layout.virtual_stages)
    for stage, count in enumerate(held):
        end, whole = begin + count, shares.stages[stage]
        if stages is not None and stage not in stages:
            begin = end
            continue
        layers = sum(each * max(0, min(end, last) - max(begin, first)) for first, last, each in kinds)
        begin = end  # beside the logits
        head = 2 * border if stage == layout.last else 0.0  # what the last norm reads, and the head
        updated, trained = shares.updated_on(stage, layout), whole * layout.trainable
        held_params = whole / (n if layout.zero == 3 else 1)
        deferred = min(stack.deferred, layout.microbatches) * stack.element
        per_token = (stack.logits + deferred) * model.vocabulary / layout.tp + deferred * model.hidden
        logits = tokens * per_token if stage == layout.last else 0.0
        if model.patch:
            logits = 0.0
        gathered = 0.0
        if layout.zero == 3 and n > 1:
            gathered = 2 * stack.element * shares.layer + stack.reduced * shares.layer
        memory = {
            "params": 0.0 if layout.offload == "params" else stack.element * held_params,
            "grads": stack.gradient * (updated if layout.zero >= 2 else trained),
            "optimizer": stack.states * updated if layout.offload == "none" else 0.0,
            "activations": layers * in_flight[stage] + max(head, working - logits),
            "logits": logits,
            "gathered": gathered,
            "buffers": _buffers(model, layout, stack, shares, stage) + kept_by_libraries,
            "context": CONTEXT + (NCCL if layout.ranks > 1 else 0.0),
        }
        converted = stack.converted * updated
        if converted > memory["activations"] + memory["logits"]:  # the update is the peak
            memory |= {"grads": memory["grads"] + converted, "activations": 0.0, "logits": 0.0}
        out.append(memory)
    return out


def fullest_stages(model: Architecture, layout: Layout) -> Collection[int]:
    """Return the stages of which one holds most.

    The first has the embedding and the last the head; of others with as many layers, it is the one that has most
    micro-batches in flight.

    >>> fullest_stages(Architecture(30, 64, 4), Layout(pp=8, microbatches=8))  # 4 layers on stages 0 to 5, then 3
    {0, 6, 7}
    """
    if len(model.kinds()) > 1:
        return range(layout.pp)
    held = layout.stage_layers(model.layers)
    in_flight = peak_live(layout.schedule, layout.pp, layout.microbatches, layout.virtual_stages)
    most: dict[int, int] = {}
    for stage in range(layout.pp):
        count = held[stage]
        if count not in most or in_flight[stage] > in_flight[most[count]]:
            most[count] = stage
    return {0, layout.pp - 1, *most.values()}


def _gradients_within(model: Architecture, tokens: float, layout: Layout, stack: Stack) -> float:
    """Return the bytes of gradients that are alive within a layer's backward: of the widest part of its MLP."""
    gate = 2 if model.gated else 1
    return stack.element * tokens * ((gate + 1) * model.ffn / layout.tp + 2 * model.hidden)


def _buffers(model: Architecture, layout: Layout, stack: Stack, shares: ParameterShares, stage: int) -> float:
    """Return the bytes of buffers that the framework keeps."""
    if stack.partition and layout.zero:
        # DeepSpeed reduces from two flat buffers; ZeRO-3 also keeps parameters of as many elements live.
        flat = min(stack.partition, shares.parameters)
        live = 2 * stack.partition if layout.zero == 3 else 0.0
        return 2 * stack.reduced * flat + stack.element * min(live, shares.parameters)
    if stack.placeholders:
        shapes = {(m.k, m.n): m.k * m.n for first, _ in model.kinds() for m in model.matmuls(first)}
        head = model.vocabulary * model.hidden if stage == layout.last else 0
        return float(stack.element * (sum(shapes.values()) + head) / layout.tp)
    if layout.replicas > 1 and stack.copies:
        return stack.copies * shares.stages[stage]
    if layout.replicas > 1 and layout.zero < 3 and not stack.bucket_by_replicas:
        return min(stack.bucket, stack.reduced * shares.parameters)
    return 0.0
