"""Layer: how long one layer takes for a micro-batch, by cause; of one plan or of many.

A kind of layer is priced once, so that an estimate costs the same for 2 layers and for 200.

    product        F / (e peak) + bytes / bandwidth: two terms that add up fit 183 products measured on an A100 to 4 %.
                   Where the products of a device were measured by shape (`kernels.csv`), its table is used instead:
                   on B200 the share of the peak is between .39 and .66 for like shapes, which no formula gives
    attention      F / (e peak) + s tau: a tile visits all keys one after the other, however few heads there are
    elementwise    bytes / bandwidth
    communication  that of `mpkit.devices.hardware`, which replays take as well

Sources: Calculon (Isaev et al., SC 2023) adds the two terms; shapes measured by MooreThreads/SimuMax.
"""

import csv
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from math import log
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpkit.common.arrays import Numbers, call_distinct, larger, smaller, where
from mpkit.devices.hardware import Device, Hardware, collective_time
from mpkit.plan.kinds import CONTIGUOUS
from mpkit.prediction.cost_model.architecture import Architecture
from mpkit.prediction.cost_model.layout import OF_MICROBATCH, Layout, remembered
from mpkit.prediction.cost_model.stack import Constants, Stack
from mpkit.trace import Kind

KAPPA = 0.3
"""How much of the time that communication shares with compute is lost, since both need the memory's bandwidth and
collectives occupy multiprocessors; fitted to all published rows at once."""
ASYNC = 0.7
"""The share of tensor-parallel communication that remains exposed where it runs beside its product; fitted to the rows
of nanotron and torchtitan."""
STREAM = 0.8  # the share of the memory's bandwidth that streaming kernels reach
TILE = 25e-9
"""Seconds per key that a tile of attention takes at least; fitted to attention with few heads on A100 and B200."""
LAUNCH = 8e-6  # seconds per product of a group that is run one after the other: experts
CONVERTED = {"tensor": 2.5, "row": 7.0, "block": 2.0, "block128": 2.0}
"""What converting an operand moves, in units of its bytes, by what shares a scale. For a tensor its largest value is
read before its values, which are written in half as many bytes. A block is scaled as it is read, and written for both
directions in which products read it. Rows differ by direction, so they are converted twice; 7 instead of 5 is fitted
to one comparison, Llama 3 8B on 8 H100, where rowwise is 11.5 % faster than 16 bits (torchtitan at 7a04053)."""
PACE = {"block128": (1.66 / 2, 1.34 / 2)}
"""Of the rate without scales, what products reach by what shares a scale: with a weight, and of a weight's gradient,
both of whose operands have scales along the sum. Hopper's tensor cores know no scales of blocks, so CUDA cores add the
partial sums up. Measured on H100 with 16,640 tokens, 5,120 and 8,192: 1.66 times as fast as 16 bits (608 and 1,009
TFLOP/s; pytorch/ao, pull request 2784) and 1.34 times (433 and 580; pull request 3342)."""


def overlapped_time(compute: Numbers, communication: Numbers) -> Numbers:
    """Return the seconds that both take side by side.

    >>> overlapped_time(1.0, 0.5), overlapped_time(1.0, 2.0)
    (1.15, 2.0)
    """
    return larger(compute + KAPPA * smaller(compute, communication), communication)


@dataclass(frozen=True)
class LayerTime:
    """Seconds per micro-batch of a layer, the mean of all kinds."""

    forward: Mapping[str, Numbers]  # by cause
    backward: Mapping[str, Numbers]  # by cause, without what is computed again
    last: Numbers  # the last product of the forward, which recomputation may leave out

    def again(self, recompute: str | NDArray[np.str_]) -> Numbers:
        """Return the seconds of the forward that the backward computes again."""
        if isinstance(recompute, np.ndarray):
            seconds: Numbers = 0.0
            for how in set(recompute.tolist()):
                seconds = where(recompute == how, self.again(how), seconds)
            return seconds
        if recompute == "none":
            return 0.0
        if recompute == "selective":
            return self.forward["attention"]
        if recompute == "products":
            return self.forward["products"] / 2 + self.forward["elementwise"]
        everything = sum(self.forward.values()) - self.last
        return everything if recompute == "full" else everything / int(recompute.removeprefix("every="))


class MicroBatchTime(NamedTuple):
    """Seconds per micro-batch."""

    kind: LayerTime  # of a layer
    forward: Numbers  # of a layer
    backward: Numbers  # without what is computed again
    head: Numbers  # with the loss, forward and backward
    embedding: Numbers


@dataclass(frozen=True)
class LayerModel:
    """A model, a machine and a software stack, priced for time."""

    model: Architecture
    sequence: int  # tokens per sample, s
    hardware: Hardware  # whose published peak by dtype counts, not the rate of its best shape
    stack: Stack
    constants: Constants

    # ---- kernels

    @cached_property
    def peak(self) -> float:
        """The published FLOP/s in the dtype that it computes in."""
        return peak_of(self.hardware.device, "bfloat16" if self.stack.element == 2 else "float32")

    @cached_property
    def microbatch(self) -> Callable[[Layout], MicroBatchTime]:
        """The times of a layout's micro-batch, remembered by the degrees on which they depend."""
        names = *OF_MICROBATCH, *(["microbatches"] if self.stack.converts_once else [])
        times = remembered(lambda *values: self._microbatch(Layout.of(names, values)))
        degrees = attrgetter(*names)
        return lambda layout: times(*degrees(layout))

    def move(self, nbytes: Numbers) -> Numbers:
        """Return the seconds in which streaming kernels move so many bytes."""
        return nbytes / (STREAM * self.hardware.device.bandwidth)

    def elementwise(self, nbytes: Numbers) -> Numbers:
        """Return the seconds of elementwise operators that would move so many bytes if they were well fused."""
        return self.constants.traffic * self.move(nbytes)

    def product(
        self, tokens: Numbers, k: Numbers, n: Numbers, conversions: Numbers | None = None
    ) -> tuple[Numbers, Numbers]:
        """Return the seconds of the forward of [tokens, k] x [k, n], and of the backward's two products.

        `conversions` is how often the weight is converted per micro-batch if the stack computes in 8 or 4 bits; None:
        this product runs in 16 or 32.
        """
        stack, device, flops = self.stack, self.hardware.device, 2.0 * tokens * k * n
        size, matmul, bandwidth = stack.element, self.constants.matmul, self.hardware.device.bandwidth
        narrow = conversions is not None and (stack.fp8 or stack.fp4)
        if device.name in _measured_shapes() and not narrow:
            at_peak = flops / self.peak / (matmul / 0.72)
            forward = at_peak / measured_share(device.name, "TN", tokens, k, n)
            back = at_peak / measured_share(device.name, "NN", tokens, n, k)
            return forward, back + at_peak / measured_share(device.name, "NT", n, tokens, k)
        moved = size * (tokens * k + k * n + tokens * n) / bandwidth
        accumulated = stack.gradient * k * n / bandwidth
        if not narrow:
            forward = flops / (self.peak * matmul) + moved
            return forward, 2 * forward + accumulated
        converted = self.move(CONVERTED[stack.scaling] * size)
        pace, back_pace = PACE.get(stack.scaling, (1.0, 1.0))
        at_rate = flops / (device.peak.get("float4" if stack.fp4 else "float8", self.peak) * matmul)
        forward, of_weight = at_rate / pace + moved / 2, at_rate / back_pace + moved / 2
        return (
            forward + converted * (tokens * k + k * n * conversions),
            forward + of_weight + accumulated + converted * tokens * n,
        )

    def _attend(self, flops: Numbers, scores: Numbers) -> tuple[Numbers, Numbers]:
        """Return the forward and backward seconds of an attention's core.

        `flops` are those of the forward, half of them if attention is causal and fused; `scores` counts the elements of
        the s x s scores of all heads and samples of this rank.
        """
        if self.stack.fused:
            forward, tiles = flops / (self.peak * self.constants.attention), self.sequence * TILE
            return forward + tiles, 2.5 * forward + tiles  # the backward computes the scores again
        moved = self.constants.attention * self.move(13 * scores)
        forward = flops / (self.peak * self.constants.matmul) + moved
        return forward, 2 * forward

    # ---- communication

    def collective(
        self, kind: Kind, nbytes: Numbers, layout: Layout, axis: str, n: Numbers = None, calls: Numbers = 1
    ) -> Numbers:  # fmt: skip
        """Return the seconds of successive collectives along an axis of `Layout.per_node`.

        `nbytes` is the payload over all calls: what each rank has before a reduce-scatter or after an all-gather.
        """
        n = getattr(layout, axis) if n is None else n
        if is_zero(nbytes) or (isinstance(n, int) and n < 2):
            return 0.0
        nodes = larger(1, n // layout.per_node(axis, self.hardware.per_node))
        return self._collective_time(kind, nbytes, n, nodes, calls)

    @cached_property
    def _collective_time(self) -> Callable[..., Numbers]:
        inside, between = self.hardware.link, self.hardware.between

        def took(kind: Kind, nbytes: Numbers, n: Numbers, nodes: Numbers, calls: Numbers) -> Numbers:
            return where(nbytes > 0, collective_time(kind, nbytes, n, nodes, inside, between, calls), 0.0)

        return remembered(took)

    def message(self, nbytes: Numbers, crosses: Numbers) -> Numbers:
        """Return the seconds of a message between two ranks, perhaps on different nodes."""
        inside, between = self.hardware.link, self.hardware.between or self.hardware.link
        return where(crosses, between.time(Kind.SEND, nbytes), inside.time(Kind.SEND, nbytes))

    # ---- a layer

    def _microbatch(self, layout: Layout) -> MicroBatchTime:
        kinds = [(count / self.model.layers, self.kind(first, layout)) for first, count in self.model.kinds()]
        forward = {cause: sum(n * each.forward[cause] for n, each in kinds) for cause in kinds[0][1].forward}
        backward = {cause: sum(n * each.backward[cause] for n, each in kinds) for cause in forward}
        kind = LayerTime(forward, backward, sum(share * each.last for share, each in kinds))
        embedding = self.move(12 * layout.microbatch * self.sequence / layout.cp * self.model.hidden)
        both = sum(forward.values()), sum(backward.values())
        return MicroBatchTime(kind, *both, self.head(layout), embedding)

    def kind(self, layer: int, layout: Layout) -> LayerTime:
        """Return the times of a layer of one kind, by its number."""
        model, stack, sp = self.model, self.stack, layout.sequence_parallel
        tokens, visits = layout.microbatch * self.sequence / layout.cp, model.visits(layer)
        nbytes = tokens * model.hidden * stack.element
        products, backward_products, last = self._products(layer, tokens, layout)
        attention = self._attention(layer, layout)
        moved = self._moved_per_token(layer, layout)

        # Of its tokens, what tensor parallelism sends for the attention and the MLP. Experts that are whole on each
        # rank (etp = 1) need nothing. Divided ones need their tokens from the whole group after the dispatch, once per
        # visit (Liu et al. 2025, arXiv 2504.14960, section 3). Without sequence parallelism the group sums what it made
        # of each token.
        sent: list[Numbers] = [nbytes] * (1 if visits and not model.shared_ffn else 2)
        if visits:
            sent.append(nbytes * where(layout.expert_tp > 1, where(sp, visits, 1), 0))
        tensor = sum(self._tensor_parallel(each, layout) for each in sent)
        context, back_context = self._context_parallel(tokens, layout)
        # Tokens reach the ranks of their experts from all that have part of the sequence, and come back.
        ranks_visited = layout.ep * (1 - (1 - 1 / layout.ep) ** visits) if stack.deduplicates else visits
        dispatched = nbytes * ranks_visited * layout.busiest / layout.sequence_parts
        experts = 2 * self.collective(Kind.ALL_TO_ALL, dispatched, layout, "ep")

        fixed = self.constants.fixed
        forward = {
            "products": products, "attention": attention[0], "elementwise": self.elementwise(moved[0] * tokens),
            "launches": fixed, "tensor parallel": tensor, "context parallel": context, "experts": experts,
        }  # fmt: skip
        backward = {
            "products": backward_products, "attention": attention[1],
            "elementwise": self.elementwise(moved[1] * tokens), "launches": 2 * fixed, "tensor parallel": tensor,
            "context parallel": back_context, "experts": experts,
        }  # fmt: skip
        return LayerTime(forward, backward, last if stack.early_stop else 0.0)

    def head(self, layout: Layout) -> Numbers:
        """Return the seconds per micro-batch of the head and the loss, forward and backward."""
        if not self.model.vocabulary:
            return 0.0
        width = larger(1, self.model.vocabulary // layout.tp)
        # Of an image, only one token is classified.
        tokens = layout.microbatch * (1 if self.model.patch else self.sequence / layout.cp)
        loss = self.elementwise(self.stack.loss * tokens * width)
        return sum(self.product(tokens, self.model.hidden, width)) + loss

    def _products(self, layer: int, tokens: Numbers, layout: Layout) -> tuple[Numbers, Numbers, Numbers]:
        """Return the seconds of products with weights: forward, backward, and the last one's forward."""
        zeros: tuple[Numbers, Numbers, Numbers] = 0.0, 0.0, 0.0
        forward, backward, last = zeros
        conversions = 1 / layout.microbatches if self.stack.converts_once else 1.0  # of a weight
        spread = layout.expert_parts // layout.expert_tp  # each has experts for a part of the sequence
        for m in self.model.matmuls(layer):
            degree = layout.expert_tp if m.experts else layout.tp
            k = larger(1, m.k // degree) if m.divided == "k" else m.k
            n = larger(1, m.n // degree) if m.divided == "n" else m.n
            if m.experts:
                visited = tokens * self.model.visits(layer) * layout.busiest / spread
                local = m.experts / layout.ep  # which run one after the other on equal shares
                last, back = self.product(visited / local, k, n, conversions)
                last, back = local * (last + LAUNCH), local * (back + 2 * LAUNCH)
            else:
                rows = tokens if m.divided else tokens / layout.sequence_parts
                last, back = self.product(rows, k, n, conversions)
            forward = forward + last
            backward = backward + back * (1 + layout.trainable) / 2  # frozen weights need no gradient
        return forward, backward, last

    def _attention(self, layer: int, layout: Layout) -> tuple[Numbers, Numbers]:
        """Return the seconds of a layer's attention cores on the rank with most scores.

        A mask hides scores that unfused attention computes anyway. In a ring of contiguous parts, the last rank's
        tokens see all parts before theirs and half of their own; in zigzag order every rank computes half.
        """
        model = self.model
        scores = layout.microbatch * self.sequence * (self.sequence / layout.cp) * model.heads / layout.tp
        every = 2.0 * (model.qk_dim + model.v_dim) * scores
        share: Numbers = 1.0
        if self.stack.fused and model.causal and layer >= model.encoder:
            share = where(layout.cp_order == CONTIGUOUS, 1 - 0.5 / layout.ring, 0.5)
        attention = self._attend(every * share, scores)
        cross = self._attend(every, scores) if model.encoder and layer >= model.encoder else (0.0, 0.0)  # T5
        return attention[0] + cross[0], attention[1] + cross[1]

    def _moved_per_token(self, layer: int, layout: Layout) -> tuple[Numbers, Numbers]:
        """Return the bytes per token that a layer's elementwise operators move, forward and backward.

        Tokens are copied into the order of experts and back; again on arrival if a rank has several experts, except
        with DeepEP; and once more to pad them in 8 or 4 bits. Megatron multiplies an expert's output with the router's
        weight: without a gate it does so in 32 bits, at 12 bytes per element and 32 in the backward (experts.py).
        """
        model, stack, h, visits = self.model, self.stack, self.model.hidden, self.model.visits(layer)
        width = model.ffn / layout.tp
        copied: Numbers = 0.0
        if visits:
            routed = (model.expert_ffn or model.ffn) * visits * layout.busiest
            width = routed / layout.expert_parts + model.shared_ffn / layout.tp
            sorts = (layout.ep > 1) & (layout.ep < model.experts) & (not stack.deduplicates)
            copies = 1 + sorts + (stack.grouped and (stack.fp8 or stack.fp4))
            rows = visits * layout.busiest * layout.expert_tp / layout.expert_parts
            copied = 4 * stack.element * h * copies * rows
        weighed = width if visits and stack.weighs_inside and not model.gated else 0.0
        once = stack.element / 2 * (22 * h / layout.sequence_parts + (8 if model.gated else 4) * width)
        return once + copied + 12 * weighed, 2 * once + copied + 32 * weighed

    def _tensor_parallel(self, nbytes: Numbers, layout: Layout) -> Numbers:
        """Return the exposed seconds of what a forward sends; its backward takes as long.

        With sequence parallelism an all-gather and a reduce-scatter replace the all-reduce and send as much
        (Korthikanti et al. 2022, section 4.2.2), but a switch that adds up cannot help.
        """
        exposed = KAPPA if self.stack.userbuffers else ASYNC if self.stack.async_tp else 1.0
        reduce, gather, scatter = Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.REDUCE_SCATTER
        whole, *parts = (self.collective(kind, nbytes, layout, "tp") for kind in (reduce, gather, scatter))
        return where(layout.sequence_parallel, sum(parts) * exposed, whole)

    def _context_parallel(self, tokens: Numbers, layout: Layout) -> tuple[Numbers, Numbers]:
        """Return the exposed seconds, forward and backward, of attention to other ranks' tokens.

        A ring passes keys and values, and in the backward their gradients; half of that runs beside the attention.
        Ulysses exchanges queries, keys, values and outputs, and then their gradients, while nothing computes. Together,
        the ranks of a ring have the heads that Ulysses leaves them.
        """
        model, element, u, r = self.model, self.stack.element, layout.ulysses, layout.ring
        of_keys = model.kv_heads / layout.tp
        of_keys = where(u > 1, larger(of_keys, u), of_keys)
        nbytes = element * tokens * 2 * (model.heads / layout.tp + of_keys) * model.head_dim
        exchanged = self.collective(Kind.ALL_TO_ALL, nbytes, layout, "ulysses", calls=4)
        keys = element * tokens * r * 2 * of_keys * model.head_dim
        passed = 0.5 * self.collective(Kind.ALL_GATHER, keys, layout, "ring")
        return exchanged + passed, exchanged + 2 * passed


def is_zero(value: Numbers) -> bool:
    """Return whether this is a single 0, whose consequences need no computation."""
    return not isinstance(value, np.ndarray) and value == 0


def peak_of(device: Device, dtype: str) -> float:
    """Return the published peak in FLOP/s, or the known rate if there is none."""
    return device.peak.get(dtype) or device.rate(dtype)


@cache
def _measured_shapes() -> dict[str, dict[str, list[tuple[float, float, float, float]]]]:
    """Return the measured shapes by device and layout, as logarithms, with their share of the peak."""
    out: dict[str, dict[str, list[tuple[float, float, float, float]]]] = {}
    with files("mpkit.prediction.cost_model").joinpath("kernels.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            shape = log(int(row["m"])), log(int(row["k"])), log(int(row["n"])), float(row["share"])
            out.setdefault(row["device"], {}).setdefault(row["layout"], []).append(shape)
    return out


@cache
def _share(device: str, layout: str, *sizes: float) -> float:
    near = sorted(
        (sum(abs(log(size) - own) for size, own in zip(sizes, shape, strict=True)), share)
        for *shape, share in _measured_shapes()[device][layout]
    )
    if same := [share for distance, share in near if distance < 1e-9]:
        return sum(same) / len(same)
    weights = [(1 / (distance + 0.05), share) for distance, share in near[:3]]
    return sum(w * share for w, share in weights) / sum(w for w, _ in weights)


def measured_share(device: str, layout: str, m: Numbers, k: Numbers, n: Numbers) -> Numbers:
    """Return the share of the peak that [m, k] x [k, n] reaches: that of its shape, or of the three nearest, weighted.

    The layout is "TN" (forward), "NN" (gradient of the input) or "NT" (gradient of the weight).
    """
    if not any(isinstance(size, np.ndarray) for size in (m, k, n)):
        return _share(device, layout, m, k, n)
    shares, which = call_distinct(lambda *sizes: _share(device, layout, *sizes), m, k, n)
    return np.array(shares)[which]
