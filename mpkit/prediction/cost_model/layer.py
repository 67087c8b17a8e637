"""Layer: how long one layer of a kind takes for a micro-batch, by cause.

The layer is priced once, and a step is composed of its times: so an estimate costs the same for 2 layers and for 200.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpkit.plan.kinds import CONTIGUOUS
from mpkit.prediction.cost_model.architecture import Architecture
from mpkit.prediction.cost_model.communication import KAPPA, Network
from mpkit.prediction.cost_model.kernels import LAUNCH, Kernels
from mpkit.prediction.cost_model.layout import Layout
from mpkit.prediction.cost_model.stack import Stack
from mpkit.trace import Kind

__all__ = ["LayerTime", "head_time", "layer_time"]

ASYNC = 0.7
"""The share of tensor-parallel communication that remains exposed where it runs beside its product; fitted to the rows
of nanotron and torchtitan."""

CAUSES = (
    "products",
    "attention",
    "elementwise",
    "launches",
    "tensor parallel",
    "context parallel",
    "experts",
)


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Seconds per micro-batch.

    Attributes:
        forward, backward: by cause (`CAUSES`); the backward without what is computed again.
        computed: of the forward, what full recomputation computes again.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    computed: float

    def seconds_again(self, recompute: str) -> float:
        """Return the seconds of the forward that the backward computes again."""
        products, attention, elementwise = self.forward[:3]
        if recompute == "none":
            return 0.0
        if recompute == "selective":
            return attention
        if recompute == "products":
            return products / 2 + elementwise
        return self.computed if recompute == "full" else self.computed / int(recompute.removeprefix("every="))


def layer_time(
    model: Architecture, layer: int, layout: Layout, sequence: int, kernels: Kernels, network: Network
) -> LayerTime:
    """Return the times of a layer.

    Args:
        model, layer: the architecture, and the number of the layer.
        layout: how the step is divided.
        sequence: tokens per sample, s.
        kernels, network: of the stack and the machine.
    """
    t, cp, stack = layout.tp, layout.cp, kernels.stack
    tokens = layout.microbatch * sequence / cp
    own_tokens = tokens / (t if layout.sequence_parallel else 1)
    h = model.hidden

    spread = layout.expert_parts // layout.expert_tp  # each has experts for a part of the sequence
    products = [0.0, 0.0]
    last, visited = 0.0, model.visits(layer) * layout.busiest
    for m in model.matmuls(layer):
        degree = layout.expert_tp if m.experts else t
        k = max(1, m.k // degree) if m.divided == "k" else m.k
        n = max(1, m.n // degree) if m.divided == "n" else m.n
        if not m.experts:
            last, back = kernels.product(tokens if m.divided else own_tokens, k, n, can_narrow=True)
        else:
            last, back = _experts(m.experts / layout.ep, tokens * visited / spread, k, n, kernels)
        products[0] += last
        products[1] += back * (1 + layout.trainable) / 2  # frozen weights need no gradient

    attention = _attention(model, layer, layout, sequence, kernels)
    moved = _moved_per_token(model, layer, layout, stack)
    elementwise = [kernels.elementwise(nbytes * tokens) for nbytes in moved]

    fixed = kernels.constants.fixed
    sent = [
        times * tokens * h * stack.element
        for times in _sent_by_tensor_parallel(model, model.visits(layer), layout)
    ]
    tensor = sum(_tensor_parallel(nbytes, layout, network, stack) for nbytes in sent)
    context, back_context = _context_parallel(model, tokens, layout, network, stack.element)
    experts = 2 * _dispatch_time(tokens * h * stack.element, model.visits(layer), layout, network, stack)

    forward = (products[0], attention[0], elementwise[0], fixed, tensor, context, experts)
    backward = (
        products[1], attention[1], elementwise[1], 2 * fixed, tensor, back_context, experts,
    )  # fmt: skip
    computed = sum(forward) - (last if stack.early_stop else 0.0)
    return LayerTime(forward, backward, computed)


def head_time(model: Architecture, layout: Layout, sequence: int, kernels: Kernels) -> float:
    """Return the seconds per micro-batch of the head and the loss, forward and backward."""
    tokens = layout.microbatch * sequence / layout.cp
    width = max(1, model.vocabulary // layout.tp)
    if not model.vocabulary:
        return 0.0
    if model.patch:  # of an image, only one token is classified
        tokens = layout.microbatch
    loss = kernels.elementwise(kernels.stack.loss * tokens * width)
    return sum(kernels.product(tokens, model.hidden, width)) + loss


def _experts(local: float, visits: float, k: int, n: int, kernels: Kernels) -> tuple[float, float]:
    """Return the times of the experts that a rank holds, which run one after the other on equal shares."""
    forward, back = kernels.product(visits / local, k, n, can_narrow=True)
    return local * (forward + LAUNCH), local * (back + 2 * LAUNCH)


def _dispatch_time(nbytes: float, visits: int, layout: Layout, network: Network, stack: Stack) -> float:
    """Return the seconds in which tokens reach the ranks of their experts, from all that have part of the sequence."""
    sends = _ranks_visited(visits, layout.ep) if stack.deduplicates else visits
    senders = layout.tp if layout.sequence_parallel else 1
    inside = layout.per_node("ep", network.per_node)
    return network.time(Kind.ALL_TO_ALL, nbytes * sends * layout.busiest / senders, layout.ep, inside)


def _ranks_visited(visits: int, ep: int) -> float:
    """Return on how many of ep ranks the experts are that a token visits, if all ranks are equally likely.

    >>> [_ranks_visited(k, 8) for k in (1, 2)], round(_ranks_visited(8, 8), 2)
    ([1.0, 1.875], 5.25)
    """
    return ep * (1 - (1 - 1 / ep) ** visits)


def _attention(
    model: Architecture, layer: int, layout: Layout, sequence: int, kernels: Kernels
) -> tuple[float, float]:
    """Return the seconds of a layer's attentions without their weights, on the rank with most scores."""
    stack, causal = kernels.stack, model.causal and layer >= model.encoder
    scores = layout.microbatch * sequence * (sequence / layout.cp) * model.heads / layout.tp
    each = 2.0 * (model.qk_dim + model.v_dim)
    share = (
        _score_share(layout, causal=causal) if stack.fused else 1.0
    )  # a mask hides scores that are computed
    attention = kernels.attention(each * scores * share, scores, sequence)
    if model.encoder and layer >= model.encoder:  # it attends to the encoder too
        cross = kernels.attention(each * scores, scores, sequence)
        return attention[0] + cross[0], attention[1] + cross[1]
    return attention


def _score_share(layout: Layout, *, causal: bool) -> float:
    """Return which share of its tokens' scores with all tokens the rank with most computes.

    In a ring of contiguous parts the last rank's tokens see all parts before theirs, and half of their own.

    >>> [_score_share(Layout(cp=4, cp_order=order), causal=True) for order in ("zigzag", "contiguous")]
    [0.5, 0.875]
    """
    if not causal:
        return 1.0
    return 1 - 0.5 / layout.ring if layout.cp_order == CONTIGUOUS else 0.5


def _moved_per_token(model: Architecture, layer: int, layout: Layout, stack: Stack) -> tuple[float, float]:
    """Return the bytes per token that elementwise operators move in a layer's forward and backward.

    Tokens are copied into the order of experts and back; on arrival again, where a rank has several experts, but for
    DeepEP; and in 8 or 4 bits to be padded. Megatron multiplies what an expert's activation returns with the router's
    weight: without a gate it does so in 32 bits, which moves 12 bytes per element, and 32 in the backward (experts.py).
    """
    h, width, visits = model.hidden, _mlp_width(model, layer, layout), model.visits(layer) * layout.busiest
    whole = 22 * h / (layout.tp if layout.sequence_parallel else 1)
    sorts = model.experts > layout.ep > 1 and not stack.deduplicates
    copies = 1 + sorts + (stack.grouped and (stack.fp8 or stack.fp4))
    copied = 4 * stack.element * h * copies * visits * layout.expert_tp / layout.expert_parts
    weighed = width if visits and stack.weighs_inside and not model.gated else 0.0
    once = stack.element / 2 * (whole + (8 if model.gated else 4) * width)
    return once + copied + 12 * weighed, 2 * once + copied + 32 * weighed


def _mlp_width(model: Architecture, layer: int, layout: Layout) -> float:
    """Return the width inside of the MLP, or of the experts that a token visits, as one rank computes it per token."""
    if not (visits := model.visits(layer)):
        return model.ffn / layout.tp
    routed = (model.expert_ffn or model.ffn) * visits * layout.busiest
    return routed / layout.expert_parts + model.shared_ffn / layout.tp


def _sent_by_tensor_parallel(model: Architecture, visits: int, layout: Layout) -> list[int]:
    """Return what tensor parallelism sends in a layer's forward, in units of its tokens: for the attention and the MLP.

    Experts that are whole on each rank (etp = 1) need nothing. Divided ones need their tokens from the whole group
    after the dispatch, once per visit (Liu et al. 2025, arXiv 2504.14960, section 3). Without sequence parallelism the
    group sums what it made of each token.
    """
    sent = [1]
    if not visits or model.shared_ffn:
        sent.append(1)
    if visits and layout.expert_tp > 1:
        sent.append(visits if layout.sequence_parallel else 1)
    return sent


def _tensor_parallel(nbytes: float, layout: Layout, network: Network, stack: Stack) -> float:
    """Return the exposed seconds of what a forward sends; its backward takes as long.

    An all-reduce; with sequence parallelism an all-gather and a reduce-scatter, which together send as much
    (Korthikanti et al. 2022, section 4.2.2), but without the help of a switch that adds up.
    """
    t, inside = layout.tp, layout.per_node("tp", network.per_node)
    if not layout.sequence_parallel:
        return network.time(Kind.ALL_REDUCE, nbytes, t, inside)
    both = sum(network.time(kind, nbytes, t, inside) for kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER))
    return both * (KAPPA if stack.userbuffers else ASYNC if stack.async_tp else 1.0)


def _context_parallel(
    model: Architecture, tokens: float, layout: Layout, network: Network, element: int
) -> tuple[float, float]:
    """Return the exposed seconds that attention to other ranks' tokens takes, forward and backward.

    A ring passes keys and values on, and their gradients too in the backward: half of that runs beside the attention.
    Ulysses exchanges queries, keys, values and outputs, and then their gradients, while nothing is computed. Together,
    the ranks of a ring have the heads that Ulysses leaves them.
    """
    u, r = layout.ulysses, layout.ring
    of_keys, exchanged, passed = model.kv_heads / layout.tp, 0.0, 0.0
    if u > 1:
        of_keys = max(of_keys, u)
        nbytes = element * tokens * 2 * (model.heads / layout.tp + of_keys) * model.head_dim
        inside = layout.per_node("ulysses", network.per_node)
        exchanged = network.time(Kind.ALL_TO_ALL, nbytes, u, inside, calls=4)
    if r > 1:
        keys = element * tokens * r * 2 * of_keys * model.head_dim
        passed = 0.5 * network.time(Kind.ALL_GATHER, keys, r, layout.per_node("ring", network.per_node))
    return exchanged + passed, exchanged + 2 * passed
