"""Selective recomputation: keep everything but what is inside of an attention, and recompute that in the backward.

Attention takes q, k and v [batch, heads, time, width/heads], computes the scores softmax(q k^T) [batch, heads, time,
time], drops some of them, and weights v by them. The scores are many and cheap to compute: of the bytes that a layer
keeps, s b h (34 + 5 a s/h) in 16 bits, they are all of 5 a s^2 b.

Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", MLSys 2023, section 5.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from mpkit.strategies.models.own_draws import OwnDraws
from mpkit.strategies.partition.value import Value
from mpkit.strategies.stage.recompute import RecomputedCall
from mpkit.strategies.stage.starting_point import Setting
from mpkit.trace.record.recorder import Recorder

__all__ = ["AttentionAgain"]


class AttentionAgain(TorchFunctionMode):
    """Lets calls of `torch.nn.functional.scaled_dot_product_attention` keep only their inputs, inside the block.

    A fused kernel makes no scores in memory; then it is its output that is not kept.

    >>> q, k, v = (torch.randn(1, 1, 3, 2, requires_grad=True) for _ in range(3))
    >>> with AttentionAgain():
    ...     y = scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> torch.equal(y, scaled_dot_product_attention(q, k, v, is_causal=True))
    True
    """

    def __init__(self, record: Recorder | None = None) -> None:
        super().__init__()
        self._record = record

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
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        if self._record is not None:
            for tensor in tensors:
                self._record.ledger.track(tensor, "activations")
        setting = Setting.now(tensors, OwnDraws())
        return RecomputedCall(
            partial(func, *args, **kwargs), self._record, setting=setting, who="An attention"
        )()
