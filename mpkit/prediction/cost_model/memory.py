"""Memory: what a rank holds at its peak, by category.

    params        the weights it computes with; under ZeRO-3 its part
    grads         accumulated gradients; under ZeRO-2 and -3 its part. Some stacks convert them for the update, when the
                  activations are gone
    optimizer     states and master weights; under ZeRO its part
    activations   what the backward needs of each micro-batch in flight, and the largest layer's working set
    logits        of the last stage: logits, their copy in 32 bits and its gradient, whose peak is before the backward
    gathered      under ZeRO-3: whole parameters of the layer at work and of those ahead, and a whole gradient
    buffers       what the framework and libraries keep: buckets, placeholders, workspaces
    context       outside torch's allocator: the CUDA context and NCCL's channels

The peak is at one of three moments, and what is there at another one does not count: at the loss all activations and
the logits, in a backward all activations, the working set of a layer and what is gathered for it, at the update all
gradients, converted.

Sources: Rajbhandari et al., "ZeRO", SC 2020 (states); Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models", 2022, section 4 (activations); both extended to gated MLPs, grouped queries and fused attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

from mpkit.common.arrays import Numbers, larger, smaller, take, where
from mpkit.devices.hardware import Device
from mpkit.prediction.cost_model.architecture import Architecture
from mpkit.prediction.cost_model.layout import Layout, Share, Shares, Stage, shares_of, stages_of
from mpkit.prediction.cost_model.stack import Stack, workspaces

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
"""What the categories mean."""
CATEGORIES = tuple(MEANING)

FRAGMENTATION, MARGIN_WORD = 0.05, "fragmentation"
"""The share of the peak that an allocator reserves beside it, and what it is called."""

GIB = 2**30
CONTEXT = 1.0 * GIB
NCCL = 0.5 * GIB
ON_HOST = {"none": (), "optimizer": ("optimizer",), "params": ("optimizer", "params")}
"""The categories that are on the host with an offload."""


def kept_bytes(how: str, everything: Numbers, border: Numbers, scores: Numbers) -> Numbers:
    """Return the bytes that are kept, of all that a backward needs, of inputs of layers, and of attention's scores.

    Source: Korthikanti et al. 2022, table 2.

    >>> [kept_bytes(how, 34.0, 2.0, 10.0) for how in ("none", "selective", "every=2", "full")]
    [34.0, 24.0, 18.0, 2.0]
    """
    if how == "full":
        return border
    if how == "selective":
        return everything - scores
    if how == "products":
        return border + 0.5 * (everything - border)
    if how == "none":
        return everything
    k = int(how.removeprefix("every="))
    return (border + (k - 1) * everything) / k


@dataclass(frozen=True)
class RankMemory:
    """The bytes of a rank, of one layout or of each of many, for any recomputation and offload.

    Attributes:
        held: by category what is always there.
        converted: what gradients take more for the update.
        everything, border, scores: what all layers keep of the micro-batches in flight: what their backwards need, of
            that only the layers' inputs, and only attention's scores.
        within, largest: the working set of a layer, of whose forward nothing is computed again, or something.
        head: what the last norm reads, and the head.
        logits: of the last stage.
    """

    held: Mapping[str, Numbers]
    converted: Numbers
    everything: Numbers
    border: Numbers
    scores: Numbers
    within: Numbers
    largest: Numbers
    head: Numbers
    logits: Numbers

    def take(self, rows: Numbers) -> RankMemory:
        """Return that of some of the layouts."""
        held, *others = vars(self).values()
        return RankMemory(
            {name: take(value, rows) for name, value in held.items()}, *(take(each, rows) for each in others)
        )

    def with_offload(self, offload: str) -> RankMemory:
        """Return what decides the peak where this is on the host, in as few arrays as that takes."""
        held = sum(value for name, value in self.held.items() if name not in ON_HOST[offload])
        return replace(self, held={"held": held}, head=self.head + self.logits, logits=0.0)

    def _moments(self, recompute: str) -> list[dict[str, Numbers]]:
        """Return what is there at the loss, in a backward and at the update, beside what is always there."""
        kept = kept_bytes(recompute, self.everything, self.border, self.scores)
        working = self.within if recompute == "none" else self.largest
        loss = {"activations": kept + self.head, "logits": self.logits}
        backward = {"activations": kept + working - self.logits, "logits": self.logits}
        return [loss, backward, {"grads": self.converted}]

    def peak(self, recompute: str) -> Numbers:
        """Return the bytes at the peak, with what fragmentation takes; nothing is on the host."""
        most = reduce(larger, (sum(moment.values()) for moment in self._moments(recompute)))
        return (sum(self.held.values()) + most) * (1 + FRAGMENTATION)

    def by_category(self, recompute: str, offload: str) -> dict[str, float]:
        """Return of one layout the bytes at the peak by category."""
        more = max(self._moments(recompute), key=lambda moment: sum(moment.values()))
        held = {name: value for name, value in self.held.items() if name not in ON_HOST[offload]}
        return {name: held.get(name, 0.0) + more.get(name, 0.0) for name in CATEGORIES}


def most_at_peak(ranks: Sequence[RankMemory], recompute: str) -> Numbers:
    """Return the bytes at the peak of the rank with most, with what fragmentation takes; nothing is on the host."""
    return reduce(larger, (rank.peak(recompute) for rank in ranks))


@dataclass(frozen=True)
class MemoryModel:
    """What is trained with which software, as far as memory asks.

    Attributes:
        model: the architecture.
        sequence: tokens per sample, s.
        stack: what the software does.
        device: whose libraries keep workspaces; None: those are left out.
    """

    model: Architecture
    sequence: int
    stack: Stack
    device: Device | None = None

    def stages(self, layout: Layout) -> list[dict[str, float]]:
        """Return the bytes by category at the peak of a rank of each stage of one layout."""
        return [rank.by_category(layout.recompute, layout.offload) for rank in self.ranks(layout)]

    def ranks(self, layout: Layout) -> list[RankMemory]:
        """Return the memory of a rank of each stage, of one layout or of many, whatever they recompute and offload."""
        model, stack = self.model, self.stack
        stages = stages_of(model, layout)
        shares = shares_of(model, layout, stages)
        tokens = layout.microbatch * self.sequence / layout.cp
        border = stack.element * tokens * model.hidden / layout.sequence_parts
        kinds = [self.activations(first, layout) for first, _ in model.kinds()]
        of_vocabulary = 0.0 if model.patch else tokens * model.vocabulary / layout.tp
        deferred = 0.0 if model.patch else stack.element * (of_vocabulary + tokens * model.hidden)
        logits = stack.logits * of_vocabulary + smaller(stack.deferred, layout.microbatches) * deferred
        working = self._gradients_within(tokens, layout), reduce(larger, kinds)
        scores = self._scores(layout)
        return [
            RankMemory(
                self._held(layout, stage, share, shares),
                stack.converted * share.updated,
                stage.live * sum(count * each for count, each in zip(stage.kinds, kinds, strict=True)),
                stage.layers * stage.live * border,
                stage.layers * stage.live * scores,
                *working,
                stage.last * (2 * border),
                stage.last * logits,
            )
            for stage, share in zip(stages, shares.ranks, strict=True)
        ]

    def _held(self, layout: Layout, stage: Stage, share: Share, shares: Shares) -> dict[str, Numbers]:
        """Return the bytes by category that do not grow with the micro-batch."""
        stack, zero = self.stack, layout.zero
        ahead = 1 + smaller(layout.prefetch, stage.layers - 1)
        gathered = (ahead * stack.element + stack.reduced) * shares.layer
        libraries = workspaces(stack, self.device, grouped=bool(self.model.experts)) if self.device else 0.0
        on_gpu = self.device is None or not self.device.name.startswith("CPU")
        return {
            "params": stack.element * where(zero == 3, share.sharded, share.weights),
            "grads": stack.gradient * where(zero >= 2, share.updated, share.weights * layout.trainable),
            "optimizer": stack.states * share.updated,
            "gathered": where((zero == 3) & (layout.shards > 1), gathered, 0.0),
            "buffers": self._buffers(layout, stage, share, shares.fullest.weights) + libraries,
            "context": (CONTEXT + where(layout.ranks > 1, NCCL, 0.0)) * on_gpu,
        }

    def _buffers(self, layout: Layout, stage: Stage, share: Share, most: Numbers) -> Numbers:
        """Return the bytes of buffers that the framework keeps, where the rank with most has so many parameters."""
        stack, model, several = self.stack, self.model, layout.replicas > 1
        found: Numbers = 0.0
        if stack.placeholders:
            shapes = {(m.k, m.n): m.k * m.n for first, _ in model.kinds() for m in model.matmuls(first)}
            head = stage.last * (model.vocabulary * model.hidden)
            found = stack.element * (sum(shapes.values()) + head) / layout.tp
        elif stack.copies:
            found = where(several, stack.copies, 0.0) * share.weights
        elif not stack.bucket_by_replicas:
            bucket = smaller(stack.bucket, stack.reduced * most)
            found = where(several & (layout.zero < 3), bucket, 0.0)
        if stack.partition:
            # DeepSpeed reduces from two flat buffers; ZeRO-3 also keeps parameters of as many elements live.
            live = smaller(where(layout.zero == 3, 2 * stack.partition, 0.0), most)
            flat = 2 * stack.reduced * smaller(stack.partition, most) + stack.element * live
            found = where(layout.zero > 0, flat, found)
        return found

    # ---- activations

    def activations(self, layer: int, layout: Layout) -> Numbers:
        """Return the bytes that a layer keeps of one micro-batch for its backward, without recomputation.

        >>> paper = MemoryModel(Architecture(48, 6144, 64, bias=True), 2048, Stack("paper", fused=False, dropout=True))
        >>> s, b, h = 2048, 4, 6144
        >>> round(paper.activations(0, Layout(microbatch=b)) / (s * b * h * (34 + 5 * 64 * s / h)), 9)
        1.0
        """
        model, stack, e, a = self.model, self.stack, self.stack.element, self.model.heads
        tokens = layout.microbatch * self.sequence / layout.cp
        dropped = 1 if stack.dropout else 0
        # Inputs of norms and of products, and dropout masks.
        outside = (4.0 * e + 2 * dropped) * model.hidden
        if model.kv_rank:
            outside += e * (
                2 * (model.q_rank + model.kv_rank) + model.rope_dim
            )  # before and after their norms
            inside = e * a * (2 * model.qk_dim + model.v_dim)
        else:
            inside = e * (a + 2 * model.kv_heads) * model.head_dim
        inside += stack.attention_outputs * e * a * model.v_dim
        if model.qk_norm:  # queries and keys before and after their norms
            inside += e * (a + model.kv_heads) * model.head_dim
        if stack.fused:
            inside += 4 * a  # the logarithms of the sums of its scores
        # An MLP without a gate keeps what its activation reads and returns.
        widths = stack.gates if model.gated else 2
        routed: Numbers = 0.0
        if model.visits(layer):
            inside += e * widths * model.shared_ffn
            outside += stack.routing * model.experts
            # Where ranks along tp divide an expert, each gathers what the others have received (Liu et al. 2025, arXiv
            # 2504.14960, section 3).
            own = e * (widths + (stack.weighs_inside and not model.gated)) * (model.expert_ffn or model.ffn)
            each = own + layout.expert_tp * stack.sent * e * model.hidden
            routed = model.top_k * each * layout.busiest / layout.expert_parts
        else:
            inside += e * widths * model.ffn
        kept = tokens * (outside / layout.sequence_parts + inside / layout.tp + routed)
        return kept + self._scores(layout)

    def _scores(self, layout: Layout) -> Numbers:
        """Return the bytes of a layer's s x s scores, with their dropout; none where attention is fused."""
        if self.stack.fused:
            return 0.0
        e, tokens = self.stack.element, layout.microbatch * self.sequence / layout.cp
        per_score = 2 * e + 1 if self.stack.dropout else e
        return tokens * per_score * self.model.heads * self.sequence / layout.tp

    def _gradients_within(self, tokens: Numbers, layout: Layout) -> Numbers:
        """Return the bytes of gradients that are alive within a layer's backward: of the widest part of its MLP."""
        model, gate = self.model, 2 if self.model.gated else 1
        widest: Numbers = 0.0
        for first, _ in model.kinds():
            inside, rows = model.ffn / layout.tp, 0.0
            if visits := model.visits(first):
                routed = visits * (model.expert_ffn or model.ffn) / layout.expert_parts
                inside = routed + model.shared_ffn / layout.tp
                rows = visits * layout.expert_tp / layout.expert_parts
            widest = larger(widest, (gate + 1) * inside + 2 * larger(1.0, rows) * model.hidden)
        return self.stack.element * tokens * widest
