"""Selective recomputation: keep everything but what is inside of an attention, and recompute that in the backward.

Attention takes q, k and v [batch, heads, time, width/heads], computes the scores softmax(q k^T) [batch, heads, time,
time], drops some of them, and weights v by them. The scores are many and cheap to compute: of the bytes that a layer
keeps, s b h (34 + 5 a s/h) in 16 bits, they are all of 5 a s^2 b. So

    forward     computes the attention's output, and keeps only q, k and v
    backward    computes scores and output again, with the same dropout; then their gradients

for each call of `torch.nn.functional.scaled_dot_product_attention` in the model's own code: in the kit's GPT, and in
transformers' models as they are set up by default. A fused kernel makes no scores in memory; then it is its output
that is not kept.

Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", MLSys 2023, section 5.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from mpkit.strategies.partition.value import Value

__all__ = ["AttentionAgain"]


class AttentionAgain(TorchFunctionMode):
    """Lets attentions keep only their inputs, inside the block.

    >>> q, k, v = (torch.randn(1, 1, 3, 2, requires_grad=True) for _ in range(3))
    >>> with AttentionAgain():
    ...     y = scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> torch.equal(y, scaled_dot_product_attention(q, k, v, is_causal=True)), type(y.grad_fn).__name__
    (True, '_AttentionBackward')
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace attention; call any other function as it is."""
        kwargs = kwargs or {}
        first = args[0] if args else kwargs.get("query")
        if (
            func is not scaled_dot_product_attention
            or isinstance(first, Value)
            or not torch.is_grad_enabled()
        ):
            return func(*args, **kwargs)  # a stand-in for another rank's tensor has nothing to keep
        return _attend(*args, **kwargs)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **how: Any
) -> Any:
    names = ("dropout_p", "is_causal", "scale", "enable_gqa")
    how |= dict(zip(names, args, strict=False))
    return _Attention.apply(how, query, key, value, attn_mask)  # type: ignore[no-untyped-call]


class _Attention(torch.autograd.Function):
    """Attention that keeps only its inputs."""

    @staticmethod
    def forward(
        ctx: Any, how: dict[str, Any], q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
    ) -> Tensor:
        # ---- forward
        ctx.how = how
        kind = q.device.type
        ctx.cast = torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        ctx.random = _random_state(q.device) if how.get("dropout_p") else None
        ctx.save_for_backward(q, k, v, mask)
        return scaled_dot_product_attention(q, k, v, mask, **how)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        # ---- backward
        saved: list[Tensor | None] = list(ctx.saved_tensors)
        wanted = ctx.needs_input_grad[1:]
        inputs: list[Any] = [
            None if tensor is None else tensor.detach().requires_grad_(wants)
            for tensor, wants in zip(saved, wanted, strict=True)
        ]
        before = None
        if ctx.random is not None:
            before = _random_state(gradient.device)
            _set_random_state(gradient.device, ctx.random)
        with torch.enable_grad(), ctx.cast:
            output = scaled_dot_product_attention(*inputs, **ctx.how)
        if before is not None:
            _set_random_state(gradient.device, before)
        of = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
        grads = iter(torch.autograd.grad(output, of, gradient))
        return None, *(next(grads) if wants else None for wants in wanted)


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_random_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
