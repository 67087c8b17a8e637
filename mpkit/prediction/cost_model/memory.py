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

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import attrgetter
from typing import Any, NamedTuple

from mpkit.common.arrays import Numbers, larger, smaller, take, where
from mpkit.devices.hardware import Device
from mpkit.prediction.cost_model import layout as layouts
from mpkit.prediction.cost_model.architecture import Architecture
from mpkit.prediction.cost_model.layout import OF_MICROBATCH, Layout, Shares, Stage, remembered
from mpkit.prediction.cost_model.stack import Stack, workspaces

MEANING = {  # of the categories
    "params": "the weights that a rank computes with",
    "grads": "the gradients",
    "optimizer": "the optimizer's states and master weights",
    "activations": "what forwards keep for their backwards",
    "logits": "the logits, their copy in 32 bits and its gradient",
    "gathered": "the whole layers that ZeRO-3 gathers",
    "buffers": "what the framework and libraries keep",
    "context": "the CUDA context and NCCL",
}
CATEGORIES = tuple(MEANING)

FRAGMENTATION, MARGIN_WORD = 0.05, "fragmentation"
"""The share of the peak that an allocator reserves beside it, and what it is called."""

CONTEXT, NCCL = 2.0**30, 2.0**29  # bytes
ON_HOST = {"none": (), "optimizer": ("optimizer",), "params": ("optimizer", "params")}  # by offload
_DEGREES = attrgetter(*OF_MICROBATCH)


def kept_bytes(how: str, everything: Numbers, border: Numbers, scores: Numbers) -> Numbers:
    """Return the bytes kept of all that backwards need, of layers' inputs and of scores (Korthikanti, table 2)."""
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


class RankMemory(NamedTuple):
    """The bytes of a rank, of one layout or of each of many, for any recomputation and offload."""

    held: Mapping[str, Numbers]  # by category, what is always there
    converted: Numbers  # what gradients take more for the update
    everything: Numbers  # what all backwards of the micro-batches in flight need
    border: Numbers  # of that, the layers' inputs
    scores: Numbers  # of that, attention's scores
    within: Numbers  # the working set of a layer whose forward is not computed again
    largest: Numbers  # the same if something of it is
    head: Numbers  # what the last norm and the head read
    logits: Numbers  # those of the last stage

    def take(self, rows: Numbers) -> RankMemory:
        """Return some of the layouts."""
        held, *others = self
        taken = {name: take(value, rows) for name, value in held.items()}
        return RankMemory(taken, *(take(each, rows) for each in others))

    def with_offload(self, offload: str) -> RankMemory:
        """Return what decides the peak with this offload, in as few arrays as that takes."""
        held = sum(value for name, value in self.held.items() if name not in ON_HOST[offload])
        return self._replace(held={"held": held}, head=self.head + self.logits, logits=0.0)

    def _activations(self, recompute: str) -> tuple[Numbers, Numbers]:
        """Return the bytes of activations at the loss and in a backward, the logits left out."""
        kept = kept_bytes(recompute, self.everything, self.border, self.scores)
        return kept + self.head, kept + (self.within if recompute == "none" else self.largest) - self.logits

    def peak(self, recompute: str, offload: str = "none") -> Numbers:
        """Return the bytes at the peak."""
        most = reduce(larger, self._activations(recompute)) + self.logits
        held = sum([value for name, value in self.held.items() if name not in ON_HOST[offload]])
        return held + larger(most, self.converted)

    def by_category(self, recompute: str, offload: str) -> dict[str, float]:
        """Return the bytes at the peak of one layout, by category."""
        held = {name: value for name, value in self.held.items() if name not in ON_HOST[offload]}
        activations = max(self._activations(recompute))
        more = {"grads": self.converted}
        if activations + self.logits >= self.converted:
            more = {"activations": activations, "logits": self.logits}
        return {name: held.get(name, 0.0) + more.get(name, 0.0) for name in CATEGORIES}


def most_at_peak(ranks: Sequence[RankMemory], recompute: str) -> Numbers:
    """Return the bytes at the peak of the fullest rank, fragmentation included, with nothing on the host."""
    return reduce(larger, [rank.peak(recompute) for rank in ranks]) * (1 + FRAGMENTATION)


@dataclass(frozen=True)
class MemoryModel:
    """A model and a software stack, priced for memory."""

    model: Architecture
    sequence: int  # tokens per sample, s
    stack: Stack
    device: Device | None = None  # whose libraries keep workspaces; None: leave those out

    def stages(self, layout: Layout) -> list[dict[str, float]]:
        """Return the bytes by category at the peak of a rank of each stage of one layout."""
        return [rank.by_category(layout.recompute, layout.offload) for rank in self.ranks(layout)]

    def ranks(self, layout: Layout) -> list[RankMemory]:
        """Return the memory of a rank of each stage, of one layout or of many."""
        stages = layouts.stages_of(self.model, layout)
        shares = layouts.shares_of(self.model, layout, stages)
        kinds, border, scores, logits, deferred, within, largest = self._kept(*_DEGREES(layout))
        logits = logits + smaller(self.stack.deferred, layout.microbatches) * deferred
        ranks = []
        for stage, share, held in zip(stages, shares.ranks, self._held(layout, stages, shares), strict=True):
            everything = stage.live * sum([n * each for n, each in zip(stage.kinds, kinds, strict=True)])
            alive = stage.layers * stage.live
            ends = stage.last * (2 * border), stage.last * logits
            converted = self.stack.converted * share.updated
            kept = everything, alive * border, alive * scores, within, largest
            ranks.append(RankMemory(held, converted, *kept, *ends))
        return ranks

    @cached_property
    def _kept(self) -> Callable[..., Any]:
        """What a micro-batch keeps, remembered by the degrees on which it depends."""
        model, stack = self.model, self.stack

        def kept(*values: Any) -> Any:
            layout = Layout.of(OF_MICROBATCH, values)
            tokens = layout.microbatch * self.sequence / layout.cp
            border = stack.element * tokens * model.hidden / layout.sequence_parts
            kinds = [self.activations(first, layout) for first, _ in model.kinds()]
            of_vocabulary = 0.0 if model.patch else tokens * model.vocabulary / layout.tp
            deferred = 0.0 if model.patch else stack.element * (of_vocabulary + tokens * model.hidden)
            working = self._gradients_within(tokens, layout), reduce(larger, kinds)
            return kinds, border, self._scores(layout), stack.logits * of_vocabulary, deferred, *working

        return remembered(kept)

    def _held(self, layout: Layout, stages: Sequence[Stage], shares: Shares) -> Iterator[dict[str, Numbers]]:
        """Yield each rank's bytes by category that do not grow with the micro-batch."""
        stack, zero, several = self.stack, layout.zero, layout.shards > 1
        of_layer = where((zero == 3) & several, shares.layer, 0.0)
        libraries, on_gpu, placeholders = self._of_device
        context = (CONTEXT + where(layout.ranks > 1, NCCL, 0.0)) * on_gpu
        buffers = self._buffers(layout, shares.fullest.weights) + libraries
        copies = where(layout.replicas > 1, stack.copies, 0.0)
        for stage, share in zip(stages, shares.ranks, strict=True):
            own = copies * share.weights
            if stack.placeholders:
                head = stage.last * (self.model.vocabulary * self.model.hidden)
                own = stack.element * (placeholders + head) / layout.tp
            ahead = 1 + smaller(layout.prefetch, stage.layers - 1)
            yield {
                "params": stack.element * where(zero == 3, share.sharded, share.weights),
                "grads": stack.gradient * where(zero >= 2, share.updated, share.weights * layout.trainable),
                "optimizer": stack.states * share.updated,
                "gathered": (ahead * stack.element + stack.reduced) * of_layer,
                "buffers": own + buffers,
                "context": context,
            }

    @cached_property
    def _of_device(self) -> tuple[float, bool, int]:
        """The bytes of libraries' workspaces, whether there is a context, and the elements of all shapes of weights."""
        products = [product for first, _ in self.model.kinds() for product in self.model.matmuls(first)]
        shapes = sum({(product.k, product.n): product.k * product.n for product in products}.values())
        if self.device is None:
            return 0.0, True, shapes
        libraries = workspaces(self.stack, self.device, grouped=bool(self.model.experts))
        return libraries, not self.device.name.startswith("CPU"), shapes

    def _buffers(self, layout: Layout, most: Numbers) -> Numbers:
        """Return the bytes of the framework's buckets; `most` counts the parameters of the fullest rank."""
        stack = self.stack
        found: Numbers = 0.0
        if not (stack.placeholders or stack.copies or stack.bucket_by_replicas):
            bucket = smaller(stack.bucket, stack.reduced * most)
            found = where((layout.replicas > 1) & (layout.zero < 3), bucket, 0.0)
        if stack.partition:
            # DeepSpeed reduces from two flat buffers; ZeRO-3 also keeps parameters of as many elements live.
            live = smaller(where(layout.zero == 3, 2 * stack.partition, 0.0), most)
            flat = 2 * stack.reduced * smaller(stack.partition, most) + stack.element * live
            found = where(layout.zero > 0, flat, found)
        return found

    # ---- activations

    def activations(self, layer: int, layout: Layout) -> Numbers:
        """Return the bytes that a layer keeps of one micro-batch for its backward, without recomputation."""
        model, stack, e, a = self.model, self.stack, self.stack.element, self.model.heads
        tokens = layout.microbatch * self.sequence / layout.cp
        dropped = 1 if stack.dropout else 0
        # Inputs of norms and of products, and dropout masks.
        outside = (4.0 * e + 2 * dropped) * model.hidden
        if model.kv_rank:
            ranks = 2 * (model.q_rank + model.kv_rank)  # before and after their norms
            outside += e * (ranks + model.rope_dim)
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
        """Return the bytes of gradients alive within a layer's backward, for the widest part of its MLP."""
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
