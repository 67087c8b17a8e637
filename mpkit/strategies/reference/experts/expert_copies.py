"""Copies of experts: n ranks have S slots for E experts, S > E, so that several ranks share the rows of a busy expert.

    borrow       an all-to-all of weights: the owner of an expert sends it to each slot that holds it
    give back    the backward of borrow: gradients take the all-to-all the other way, and the owner adds them up
    choose       the i-th row of an expert with c slots goes to its slot (i + r) mod c, on rank r
    visit        expert parallelism, with slots in place of experts

Rank r owns experts r E/n to (r + 1) E/n - 1, with their optimizer states, and has slots r S/n to (r + 1) S/n - 1. A
step borrows once, computes all its micro-batches, and gives back once.

Sources: DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv 2412.19437, section 3.4 (redundant experts, for inference);
He et al., "FasterMoE", PPoPP 2022, section 4.2 (dynamic shadowing: weights are sent, and gradients returned).
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

import mpkit as mk
from mpkit.strategies.reference.experts.exchange import exchange
from mpkit.strategies.reference.experts.expert_parallel import visit_experts
from mpkit.strategies.reference.experts.mixture_of_experts import route

__all__ = ["borrow", "choose_slots", "expert_copies"]


def borrow(ctx: mk.Context, own: Tensor, slots: Tensor) -> Tensor:
    """Return the weights of this rank's slots, (S/n, ...). own: (E/n, ...); slots: (S,), the expert of each."""
    # ---- borrow
    held, owners = (each.view(ctx.world_size, -1) for each in (slots, slots // len(own)))
    lent = held[owners == ctx.rank] - ctx.rank * len(own)  # to rank 0, to rank 1, ...
    sends, receives = (owners == ctx.rank).sum(1), owners[ctx.rank].bincount(minlength=ctx.world_size)
    borrowed = exchange(ctx, own[lent], sends.tolist(), receives.tolist())
    # ---- give back, with autograd: gradients of equal indices add up
    return borrowed[owners[ctx.rank].argsort(stable=True).argsort()]  # they came sorted by owner


def choose_slots(chosen: Tensor, slots: Tensor, rank: int) -> Tensor:
    """Return the slot for each choice of an expert, in the shape of `chosen`."""
    # ---- choose
    copies = slots.bincount()
    one_hot = F.one_hot(chosen.flatten(), len(copies))
    i = (one_hot.cumsum(0) * one_hot).sum(1).view_as(chosen) - 1
    first = (copies.cumsum(0) - copies)[chosen]
    return slots.argsort(stable=True)[first + (i + rank) % copies[chosen]]


def expert_copies(
    ctx: mk.Context, x: Tensor, W: Tensor, A: Tensor, B: Tensor, k: int, slots: Tensor
) -> Tensor:
    """Return the layer's output (T, h) of this rank's tokens. A: (S/n, h, f), B: (S/n, f, h), from `borrow`."""
    chosen, weights = route(x, W, k)
    chosen = choose_slots(chosen, slots, ctx.rank)
    # ---- visit
    return visit_experts(ctx, x, chosen, weights, A, B)
