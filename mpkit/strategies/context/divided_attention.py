"""A model's own attention over a divided sequence: a rank computes on its part, and attends to the whole.

While the mode is on, each call of `torch.nn.functional.scaled_dot_product_attention` is ring attention over the axis,
or Ulysses attention. Everything else in a transformer (embeddings, linear layers, norms, MLPs) works on one token at a
time, and so is correct on a part. The mode rejects other functions that are known to look at several tokens.

A ring keeps its inputs, its output and the log-sum-exp for the backward, and no scores, so selective recomputation
(`mpkit.strategies.stage.recompute`) has nothing left to save; under Ulysses it computes a rank's heads again.
"""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from mpkit.common.torch_private import DataDependentOutputException
from mpkit.strategies.comm.communicator import Communicator
from mpkit.strategies.context.ring import ring_attention
from mpkit.strategies.context.ulysses import ulysses_attention
from mpkit.strategies.models.own_draws import OwnDraws, drawn_by

CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "max_pool1d", "avg_pool1d")
RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
ATTENTIONS = (
    "multi_head_attention_forward", "_native_multi_head_attention", "_transformer_encoder_layer_fwd",
)  # fmt: skip
RECOMPUTES = {
    "torch.utils.checkpoint": "torch.utils.checkpoint: leave that to mpkit.Plan(recompute='full'), and switch it off "
    "in the model (of transformers: model.gradient_checkpointing_disable())",
}


class ContextParallel(TorchFunctionMode):
    """Within the block, compute attention over the sequences of all ranks of an axis, which run the same forward.

    The backward needs no mode. Together with `AttentionAgain`, or another mode that sees the model's forward, this one
    has to be the inner one, which replaces the attention: `with AttentionAgain(), ContextParallel(group):`.

    A rank's loss is the mean over its own tokens; with n ranks of equally many tokens, each has weight 1/n. Losses that
    leave out tokens (ignore_index) are the mean over the rest: if parts have different numbers of those, the mean
    of the ranks' means is not the mean over all.

    Args:
        order: which part of the sequence each rank has (`mpkit.strategies.context.sequence`).
        ulysses: whether ranks divide the heads; otherwise keys and values go round them.
        attended: is called with the number of pairs of a query and a key that an attention computed on this rank.

    Raises:
        ValueError: a function called inside is attention with a mask or dropout, something else that looks at several
            tokens (convolutions, recurrent layers, nn.MultiheadAttention), or an attention that the model itself
            recomputes in the backward, where no mode is on.
    """

    def __init__(
        self, group: Communicator, order: str = "contiguous", draws: OwnDraws | None = None,
        ulysses: bool = False, attended: Callable[[int], None] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.group, self.order, self.calls = group, order, 0  # calls of attention
        self._draws, self._ulysses, self._attended = draws or OwnDraws(), ulysses, attended

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace attention, reject other functions of several tokens, and run the rest unchanged."""
        kwargs = kwargs or {}
        if self.group.size == 1:
            self.calls += func is scaled_dot_product_attention
            return func(*args, **kwargs)
        if func is scaled_dot_product_attention:
            self.calls += 1
            return self._attend(*args, **kwargs)
        _refuse(getattr(func, "__name__", ""), args, kwargs)
        return drawn_by(self._draws, func, args, kwargs)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        n = self.group.size
        if dropout_p:
            raise ValueError(
                f"Attention over cp={n} ranks knows no dropout of its scores, and was asked for dropout_p={dropout_p}: "
                "each score is made on one rank, and again in the backward. Set it to 0 in the model (of "
                "transformers: attention_dropout=0, attn_pdrop=0 or attention_probs_dropout_prob=0 in the config)."
            )
        if attn_mask is not None:
            self._check_mask(attn_mask)
        if not is_causal and query.shape[-2] == 1:
            raise ValueError(
                f"Attention over cp={n} ranks: with one token per rank, transformers' models leave out the causal "
                "mask. Longer sequences have two or more tokens per rank, and so has a smaller cp."
            )
        if query.dim() == 4 and query.shape[1] != key.shape[1] and not enable_gqa:
            raise ValueError(
                f"{query.shape[1]} heads of queries and {key.shape[1]} of keys need enable_gqa=True."
            )
        if query.shape[-2] != key.shape[-2]:
            raise ValueError(
                f"Attention over cp={n} ranks: a rank has {query.shape[-2]} queries and {key.shape[-2]} keys. The keys "
                "of the queries' own tokens come from all ranks; those of other tokens (a memory, a prefix, a part of "
                "the sequence, another sequence) would be taken for them. What works: cp=1."
            )
        _check_frames()
        how: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "attended": self._attended}
        if self._ulysses:
            return ulysses_attention(query, key, value, self.group, **how)
        return ring_attention(query, key, value, self.group, order=self.order, **how)

    def _check_mask(self, mask: Tensor) -> None:
        unknown = None
        try:
            if bool(mask.all() if mask.dtype == torch.bool else (mask == 0).all()):
                return  # it hides nothing
        except DataDependentOutputException as error:  # a mask without content
            unknown = error
        jumps = "" if self.order == "contiguous" else (
            " In zigzag order positions jump, which transformers' decoders with use_cache=False take for the "
            "beginning of another text, and mask: order='contiguous' has none."
        )  # fmt: skip
        raise ValueError(
            f"Attention over cp={self.group.size} ranks takes no mask but is_causal, and was given one of shape "
            f"{list(mask.shape)}: it is about the tokens of one rank, and keys come from all. Sequences without "
            f"padding need none; packed documents, sliding windows, relative positions and prefixes need cp=1.{jumps}"
        ) from unknown

    def check_used(self) -> None:
        """Check, after a forward, that it called attention."""
        if not self.calls:
            raise ValueError(
                f"cp={self.group.size}: the model's forward never calls "
                "torch.nn.functional.scaled_dot_product_attention, which is where its tokens would meet those of the "
                "other ranks. A transformers model does with attn_implementation='sdpa', as in "
                "AutoModel.from_config(config, attn_implementation='sdpa'); a model of your own: "
                "F.scaled_dot_product_attention(q, k, v, is_causal=True)."
            )


def _refuse(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Reject functions that look at several tokens without being an attention."""
    if name in CONVOLUTIONS:
        weight = args[1] if len(args) > 1 else kwargs.get("weight")
        if isinstance(weight, Tensor) and all(size == 1 for size in weight.shape[2:]):
            return
        what = "a convolution or pooling, whose windows reach over the ends of a rank's part"
    elif name in RECURRENT:
        what = "a recurrent layer, which needs the state at the end of the part before"
    elif name in ATTENTIONS:
        what = (
            "nn.MultiheadAttention or nn.TransformerEncoderLayer, whose attention is out of sight; project q, k "
            "and v with nn.Linear and call F.scaled_dot_product_attention"
        )
    else:
        return
    raise ValueError(f"Sequences cannot be shared out (cp > 1) in a model that calls {name}: {what}.")


def _check_frames() -> None:
    """Reject an attention that is recomputed in the backward, where it would see this rank's tokens only."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        remedy = RECOMPUTES.get(frame.f_globals.get("__name__", ""))
        if remedy is not None:
            raise ValueError(f"Attention over a shared-out sequence is recomputed by {remedy}.")
        frame = frame.f_back
