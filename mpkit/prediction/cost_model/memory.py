"""Memory: what a rank holds at its peak, by category.

    params        the weights it computes with; under ZeRO-3 its part
    grads         accumulated gradients; under ZeRO-2 and -3 its part. Some stacks convert them for the update, when the
                  activations are gone
    optimizer     states and master weights; under ZeRO its part
    activations   what the backward needs of each micro-batch in flight, and the largest layer's working set
    logits        of the last stage: logits, their copy in 32 bits and its gradient, whose peak is before the backward
    gathered      under ZeRO-3: whole parameters of the layer at work and of those ahead, and a whole gradient; mpkit
                  has two whole units of gradients, one of them on its way, under ZeRO-2 too
    buffers       what the framework and libraries keep: buckets, placeholders, workspaces
    context       outside torch's allocator: the CUDA context and NCCL's channels

The peak is at one of four moments, and what is there at another one does not count:

    loss          all activations, and the logits
    backward      all activations, the working set of a layer, and what is gathered for it
    end           of a backward that makes gradients as it goes, mpkit's under ZeRO with one micro-batch: those of all
                  layers but the first, and the first layer's activations
    update        all gradients, converted

Sources: Rajbhandari et al., "ZeRO", SC 2020 (states); Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models", 2022, section 4 (activations); both extended to gated MLPs, grouped queries and fused attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from mpkit.devices.hardware import Device
from mpkit.plan.schedule.summary import peak_live
from mpkit.prediction.cost_model.architecture import Architecture
from mpkit.prediction.cost_model.layout import Layout, ParameterShares
from mpkit.prediction.cost_model.stack import Stack, workspaces

__all__ = [
    "CATEGORIES",
    "FRAGMENTATION",
    "MARGIN_WORD",
    "SampleMemory",
    "StateMemory",
    "activations",
    "kinds_of_stages",
    "sample_memory",
    "stage_memory",
    "state_memory",
]

CATEGORIES = ("params", "grads", "optimizer", "activations", "logits", "gathered", "buffers", "context")

FRAGMENTATION, MARGIN_WORD = 0.05, "fragmentation"
"""The share of the peak that an allocator reserves beside it, and what it is called."""

GIB = 2**30
CONTEXT = 1.0 * GIB
NCCL = 0.5 * GIB


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
    dropped = 1 if stack.dropout else 0

    routed = 0.0  # of experts
    outside = 2.0 * e * h + 2 * e * h + 2 * dropped * h  # inputs of norms and of products; dropout masks
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
        inside += (2 * e + dropped) * a * sequence if dropped else e * a * sequence
    widths = (
        stack.gates if model.gated else 2
    )  # an MLP without a gate keeps what its activation reads and returns
    if model.visits(layer):
        inside += e * widths * model.shared_ffn
        routed = _expert_activations(model, layout, stack)
        outside += stack.routing * model.experts
    else:
        inside += e * widths * model.ffn
    return tokens * (outside / whole + inside / t + routed)


def _expert_activations(model: Architecture, layout: Layout, stack: Stack) -> float:
    """Return the bytes that the experts which a token visits keep of it."""
    # Where ranks along tp divide an expert, each gathers what the others have received (Liu et al. 2025, arXiv
    # 2504.14960, section 3).
    e, wide = stack.element, model.expert_ffn or model.ffn
    widths = (stack.gates if model.gated else 2) + (stack.weighs_inside and not model.gated)
    each = e * widths * wide + layout.expert_tp * stack.sent * e * model.hidden
    return model.top_k * each * layout.busiest / layout.expert_parts


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


class SampleMemory(NamedTuple):
    """The bytes of one sample of a micro-batch; all of them grow with the number of samples.

    Attributes:
        kinds: by kind of layer, what its backward needs.
        border: a layer's input.
        working: the working set of the layer at work.
        logits: on the last stage, of no deferred gradient of the head, and of each one more.
    """

    kinds: tuple[float, ...]
    border: float
    working: float
    logits: tuple[float, float]

    def moments(
        self, stage: int, held: Sequence[int], layout: Layout, live: float, stack: Stack, states: StateMemory
    ) -> list[dict[str, float]]:
        """Return the bytes of a stage that differ between the moments at which the peak can be.

        Args:
            stage, held: the stage, and how many layers of each kind it has.
            layout, stack: as for `sample_memory`.
            live: micro-batches in flight.
            states: what the stage holds besides.
        """
        b, of_layers = layout.microbatch, list(zip(held, self.kinds, strict=True))
        layers = b * live * sum(count * each for count, each in of_layers)
        head = logits = 0.0
        if stage == layout.last:
            head = b * 2 * self.border  # what the last norm reads, and the head
            logits = b * (self.logits[0] + min(stack.deferred, layout.microbatches) * self.logits[1])
        grads, gathered = states.held["grads"], states.held["gathered"]
        loss = {"activations": layers + head, "logits": logits, "gathered": gathered}
        backward = {"activations": layers + b * self.working - logits, "logits": logits}
        return [loss, backward, {"grads": grads + states.converted}]


def sample_memory(model: Architecture, layout: Layout, sequence: int, stack: Stack) -> SampleMemory:
    """Return the bytes of one sample.

    Args:
        model, layout, sequence, stack: as in `activations`; the layout's micro-batch is of no importance.
    """
    one, tokens = replace(layout, microbatch=1), sequence / layout.cp
    kinds = tuple(kept_bytes(model, first, one, sequence, stack) for first, _ in model.kinds())
    if layout.recompute == "none":
        working = _gradients_within(model, tokens, layout, stack)
    else:
        working = max(activations(model, first, one, sequence, stack) for first, _ in model.kinds())
    border = stack.element * tokens * model.hidden / (layout.tp if layout.sequence_parallel else 1)
    of_vocabulary = 0.0 if model.patch else tokens * model.vocabulary / layout.tp
    deferred = 0.0 if model.patch else stack.element * (of_vocabulary + tokens * model.hidden)
    return SampleMemory(kinds, border, working, (stack.logits * of_vocabulary, deferred))


def kinds_of_stages(model: Architecture, layout: Layout) -> list[tuple[int, ...]]:
    """Return how many layers of each kind each rank of a pipeline holds.

    >>> kinds_of_stages(Architecture(5, 64, 4, experts=4, top_k=2, dense=1), Layout(pp=2))
    [(1, 2), (0, 2)]
    """
    found, begin = [], 0
    for count in layout.stage_layers(model.layers):
        end = begin + count
        found.append(tuple(max(0, min(end, i + n) - max(begin, i)) for i, n in model.kinds()))
        begin = end
    return found


class StateMemory(NamedTuple):
    """The bytes of a stage that do not grow with the micro-batch.

    Attributes:
        held: by category.
        converted: what gradients take more for the update.
    """

    held: dict[str, float]
    converted: float


def state_memory(
    model: Architecture, layout: Layout, stack: Stack, shares: ParameterShares, stage: int, device: Device | None
) -> StateMemory:  # fmt: skip
    """Return the bytes on a stage that do not grow with the micro-batch.

    Args:
        model, layout, stack, shares, device: as in `stage_memory`.
        stage: the stage.
    """
    n = layout.shards
    updated, whole = shares.updated_on(stage, layout), shares.stages[stage]
    gathered = 0.0
    if layout.zero == 3 and n > 1:
        whole_layers = 1 + min(layout.prefetch, layout.stage_layers(model.layers)[stage] - 1)
        gathered = (whole_layers * stack.element + stack.reduced) * shares.layer
    kept_by_libraries = workspaces(stack, device, grouped=bool(model.experts)) if device else 0.0
    grads = stack.gradient * (updated if layout.zero >= 2 else whole * layout.trainable)
    held = {
        "params": 0.0
        if layout.offload == "params"
        else stack.element * (shares.sharded_on(stage, layout) if layout.zero == 3 else whole),
        "grads": grads,
        "optimizer": stack.states * updated if layout.offload == "none" else 0.0,
        "gathered": gathered,
        "buffers": _buffers(model, layout, stack, shares, stage) + kept_by_libraries,
        "context": _context(layout, device),
    }
    return StateMemory(held, stack.converted * updated)


def _context(layout: Layout, device: Device | None) -> float:
    """Return the bytes of the CUDA context and of NCCL's buffers; a CPU has neither."""
    if device is not None and device.name.startswith("CPU"):
        return 0.0
    return CONTEXT + (NCCL if layout.ranks > 1 else 0.0)


def stage_memory(
    model: Architecture, layout: Layout, sequence: int, stack: Stack, shares: ParameterShares,
    device: Device | None = None,
) -> list[dict[str, float]]:  # fmt: skip
    """Return bytes by category for a rank of each stage.

    Args:
        model, layout, sequence, stack: as in `activations`.
        shares: the parameters of the ranks.
        device: whose libraries keep workspaces; None: those are left out.
    """
    sample, out = sample_memory(model, layout, sequence, stack), []
    in_flight = peak_live(layout.schedule, layout.pp, layout.microbatches, layout.virtual_stages)
    kinds = kinds_of_stages(model, layout)
    for stage, live in enumerate(in_flight):
        states = state_memory(model, layout, stack, shares, stage, device)
        moments = sample.moments(stage, kinds[stage], layout, live, stack, states)
        peak = max((states.held | moment for moment in moments), key=lambda held: sum(held.values()))
        out.append({category: peak.get(category, 0.0) for category in CATEGORIES})
    return out


def _gradients_within(model: Architecture, tokens: float, layout: Layout, stack: Stack) -> float:
    """Return the bytes of gradients that are alive within a layer's backward: of the widest part of its MLP."""
    gate, widest = 2 if model.gated else 1, 0.0
    for first, _ in model.kinds():
        inside, rows = model.ffn / layout.tp, 0.0
        if visits := model.visits(first):
            inside = (
                visits * (model.expert_ffn or model.ffn) / layout.expert_parts + model.shared_ffn / layout.tp
            )
            rows = visits * layout.expert_tp / layout.expert_parts
        widest = max(widest, (gate + 1) * inside + 2 * max(1.0, rows) * model.hidden)
    return stack.element * tokens * widest


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
    if layout.replicas > 1 and layout.zero < 3 and not (stack.bucket_by_replicas or stack.views):
        return min(stack.bucket, stack.reduced * shares.parameters)
    return 0.0
