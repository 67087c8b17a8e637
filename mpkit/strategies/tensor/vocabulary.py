"""The vocabulary divided over the ranks: embedding and cross-entropy.

    embedding       forward: each rank looks up the tokens that it has, with 0 for the others; all-reduce
                    backward: nothing
    cross-entropy   forward: three all-reduces of one number per token: the largest logit, the sum of exp, the logit of
                    the target; so b s numbers are sent, three times, instead of b s V
                    backward: nothing

`mpkit.strategies.reference.tensor.vocabulary_cross_entropy` is the cross-entropy in 40 lines. This module adds
vocabularies that the number of ranks does not divide, ignored targets, and losses per token.

Source: Shoeybi et al. 2019, end of section 3.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpkit.common.torch_private import FakeTensor, _assert_async
from mpkit.strategies.comm.process_group import ProcessGroup
from mpkit.strategies.tensor.operators import g

__all__ = ["cross_entropy", "divide_embedding"]


def divide_embedding(group: ProcessGroup, embedding: nn.Embedding, mine: range, vocabulary: int) -> None:
    """Let an embedding look up tokens of this rank's part of the vocabulary, whose vectors it holds already."""
    embedding.forward = partial(_look_up, group, embedding, mine, vocabulary)  # type: ignore[method-assign]


def _look_up(
    group: ProcessGroup, embedding: nn.Embedding, mine: range, vocabulary: int, tokens: Tensor
) -> Tensor:
    """Look up tokens: [...] -> [..., width].

    Raises:
        IndexError: a token is not in the vocabulary, as in `torch.nn.Embedding`.
    """
    _check_in_vocabulary(tokens, vocabulary, "Token")
    here = (tokens >= mine.start) & (tokens < mine.stop)
    local = torch.where(here, tokens - mine.start, 0)
    nowhere = embedding.padding_idx  # whose vector has no gradient
    padding = nowhere - mine.start if nowhere is not None and nowhere in mine else None
    vectors = F.embedding(local, embedding.weight, padding)
    return g(group, torch.where(here[..., None], vectors, 0))


def _check_in_vocabulary(tokens: Tensor, vocabulary: int, what: str, counts: Tensor | None = None) -> None:
    """Reject tokens that no rank has: their vectors would be 0, and so the logits of such targets.

    On a GPU the device stops the program, as torch's own lookup does, since looking at values would wait for it.
    """
    outside = (tokens < 0) | (tokens >= vocabulary)
    if counts is not None:
        outside &= counts
    if tokens.device.type == "cuda":
        _assert_async(~outside.any(), f"{what}s are out of bounds: the vocabulary has {vocabulary}")
    elif not (isinstance(tokens, FakeTensor) or tokens.is_meta) and bool(outside.any()):
        raise IndexError(
            f"{what} {int(tokens[outside][0])} is out of bounds: the vocabulary has the tokens 0 to {vocabulary - 1}"
        )


def cross_entropy(
    group: ProcessGroup,
    logits: Tensor,
    targets: Tensor,
    mine: range,
    vocabulary: int,
    *,
    ignore_index: int,
    reduction: str,
) -> Tensor:
    """Return what `torch.nn.functional.cross_entropy` returns for the whole logits.

    Args:
        group: the ranks that share the vocabulary.
        logits: [n, V_i], this rank's part.
        targets: [n], tokens of the whole vocabulary.
        mine: this rank's part of the vocabulary.
        vocabulary: V, the size of the whole vocabulary.
        ignore_index: the target that does not count.
        reduction: "mean" (over those that count), "sum" or "none".

    Raises:
        IndexError: a target that counts is not in the vocabulary.
    """
    counts = targets != ignore_index
    _check_in_vocabulary(targets, vocabulary, "Target", counts)
    losses = _CrossEntropy.apply(group, logits, targets, mine)  # type: ignore[no-untyped-call]
    losses = torch.where(counts, losses, 0)
    if reduction == "none":
        return losses
    total: Tensor = losses.sum()
    return total / counts.sum() if reduction == "mean" else total


class _CrossEntropy(torch.autograd.Function):
    """Map z [n, V_i] and t [n] to the losses log(sum of exp z) - z_t, [n]."""

    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, logits: Tensor, targets: Tensor, mine: range) -> Tensor:
        wide = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        # ---- the largest logit, so that exp cannot overflow
        largest = group.all_reduce(wide.amax(-1), op="max")
        z = wide - largest[:, None]
        # ---- the logit of the target, which one rank has
        here = (targets >= mine.start) & (targets < mine.stop)
        place = torch.where(here, targets - mine.start, 0)[:, None]
        of_target = group.all_reduce(torch.where(here, z.gather(-1, place)[:, 0], 0))
        # ---- the sum of exp
        softmax = z.exp_()
        total = group.all_reduce(softmax.sum(-1))
        softmax.div_(total[:, None])
        ctx.save_for_backward(softmax, place, here)
        ctx.dtype = logits.dtype
        return total.log() - of_target

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[None, Tensor, None, None]:
        # softmax - 1 at the target, times the gradient of its loss
        softmax, place, here = ctx.saved_tensors
        dz = softmax * dloss[:, None]
        dz.scatter_add_(-1, place, torch.where(here, -dloss, 0)[:, None])
        return None, dz.to(ctx.dtype), None, None
