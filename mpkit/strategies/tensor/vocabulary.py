"""The vocabulary divided over the ranks: embedding and cross-entropy.

    embedding       forward: each rank looks up the tokens that it has, with 0 for the others; all-reduce
                    backward: nothing
    cross-entropy   forward: three all-reduces of one number per token: the largest logit, the sum of exp, the logit of
                    the target; so b s numbers are sent, three times, instead of b s V
                    backward: nothing

`mpkit.strategies.reference.tensor.vocabulary_cross_entropy` is the cross-entropy. This module adds
vocabularies that the number of ranks does not divide, ignored targets, and losses per token.

Source: Shoeybi et al. 2019, end of section 3.

The user's loss is called unchanged, with the model's output. To avoid whole logits, [b, s, V], on every rank, the
output is a `DividedLogits`, a tensor that reports that shape and holds this rank's part:

    shape, dtype, device               those of the whole logits
    view, reshape, flatten, [:, :-1]   still divided, as long as the vocabulary stays the last dimension
    float, to, contiguous, clone       still divided
    F.cross_entropy                    on the parts: `vocabulary.cross_entropy`
    anything else                      gathers the whole first: exact, with gradients, and expensive
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpkit.common.torch_private import DisableTorchFunctionSubclass, FakeTensor, _assert_async
from mpkit.strategies.comm.communicator import Communicator
from mpkit.strategies.tensor.operators import g, gather_features


def divide_embedding(group: Communicator, embedding: nn.Embedding, mine: range, vocabulary: int) -> None:
    """Let an embedding, which holds this rank's vectors already, look up tokens of the whole vocabulary."""
    embedding.forward = partial(_look_up, group, embedding, mine, vocabulary)  # type: ignore[method-assign]


def _look_up(
    group: Communicator, embedding: nn.Embedding, mine: range, vocabulary: int, tokens: Tensor
) -> Tensor:
    """Look up tokens: [...] -> [..., width]."""
    _check_in_vocabulary(tokens, vocabulary, "Token")
    here = (tokens >= mine.start) & (tokens < mine.stop)
    local = torch.where(here, tokens - mine.start, 0)
    index = embedding.padding_idx  # whose vector has no gradient
    padding = index - mine.start if index is not None and index in mine else None
    vectors = F.embedding(local, embedding.weight, padding)
    return g(group, torch.where(here[..., None], vectors, 0))


def _check_in_vocabulary(tokens: Tensor, vocabulary: int, what: str, counts: Tensor | None = None) -> None:
    """Reject tokens that no rank has, whose vectors, and logits as targets, would be 0.

    On a GPU the device stops the program, as in torch's own lookup: to look at values, the CPU would have to wait.
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
    group: Communicator, logits: Tensor, targets: Tensor, mine: range, vocabulary: int,
    *, ignore_index: int, reduction: str,
) -> Tensor:  # fmt: skip
    """Return what `torch.nn.functional.cross_entropy` returns for the whole logits.

    Args:
        logits: [n, V_i], of this rank's part of the vocabulary, `mine`.
        targets: [n], tokens of the whole vocabulary.
        vocabulary: V, the size of the whole vocabulary.
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
    def forward(ctx: Any, group: Communicator, logits: Tensor, targets: Tensor, mine: range) -> Tensor:
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


OF_THE_WHOLE = {
    "shape", "size", "dtype", "device", "dim", "ndim", "ndimension", "numel", "nelement", "layout", "is_cuda", "is_cpu",
    "is_meta", "is_sparse", "is_quantized", "is_nested", "is_mkldnn", "is_floating_point", "is_complex", "__len__",
    "itemsize", "element_size", "get_device",
}  # fmt: skip
"""Attributes of the whole logits, which the wrapper answers itself."""

OF_THE_PART = {
    "requires_grad", "grad_fn", "is_leaf", "_version", "untyped_storage", "nbytes", "data_ptr", "register_hook",
    "retain_grad", "grad", "is_contiguous", "_backward_hooks", "output_nr", "requires_grad_", "retains_grad",
}  # fmt: skip
"""Attributes and methods of this rank's part."""

ELEMENTWISE = {
    "float", "double", "half", "bfloat16", "to", "type", "contiguous", "clone", "detach", "cpu", "cuda",
}  # fmt: skip
SHAPING = {"view", "reshape", "flatten", "__getitem__"}


class DividedLogits(Tensor):
    """Logits [..., V], of which this rank holds [..., V_i]."""

    part: Tensor  # [..., V_i], in autograd's graph
    group: Communicator
    parts: tuple[range, ...]  # each rank's range of the vocabulary

    @staticmethod
    def make(group: Communicator, parts: tuple[range, ...], part: Tensor) -> DividedLogits:
        """Wrap a rank's part of the logits."""
        whole = (*part.shape[:-1], parts[-1].stop)
        made = Tensor._make_wrapper_subclass(DividedLogits, whole, dtype=part.dtype, device=part.device)
        made.part, made.group, made.parts = part, group, parts
        return made

    def __new__(cls, *_: Any) -> DividedLogits:
        """Reject direct construction."""
        raise AssertionError("DividedLogits.make makes them")

    def whole(self) -> Tensor:
        """Gather the whole logits, [..., V]."""
        return gather_features(self.group, self.part, [len(part) for part in self.parts])

    def _wrap(self, part: Tensor) -> DividedLogits:
        return DividedLogits.make(self.group, self.parts, part)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        mine = self.parts[self.group.index]
        return f"<logits of shape {list(self.shape)}, here those of tokens {mine.start} to {mine.stop - 1}>"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        """Run a function on the part if possible, and else on the gathered logits."""
        kwargs = kwargs or {}
        name = func.__name__
        if name in ("__get__", "__set__"):
            name = func.__self__.__name__  # type: ignore[attr-defined]
        own = args[0] if args and isinstance(args[0], cls) else None
        if own is not None:
            if name in OF_THE_WHOLE:
                with DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if name in OF_THE_PART:
                result = func(own.part, *args[1:], **kwargs)
                return own if result is own.part else result
            if name in ELEMENTWISE and not any(isinstance(arg, cls) for arg in args[1:]):
                return own._wrap(func(own.part, *args[1:], **kwargs))
            if name in SHAPING:
                shaped = _reshape_part(own, func, name, args[1:], kwargs)
                if shaped is not None:
                    return own._wrap(shaped)
            if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
                raise ValueError(
                    f"{name} writes into the logits, of which each rank of a tensor-parallel group holds a part of the "
                    "vocabulary: it would be lost. Make new ones: logits = logits.masked_fill(...), "
                    "logits / temperature, torch.where(...)"
                )
        logits = kwargs.get("input", own)
        if func is F.cross_entropy and isinstance(logits, cls):
            result = _cross_entropy(logits, *args[1:], **{k: v for k, v in kwargs.items() if k != "input"})
            if result is not None:
                return result
        with DisableTorchFunctionSubclass():
            return func(*_whole(args), **{key: _whole(value) for key, value in kwargs.items()})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run operations that bypass `__torch_function__` on the gathered logits."""
        return func(*_whole(args), **{key: _whole(value) for key, value in (kwargs or {}).items()})


def _whole(value: Any) -> Any:
    """Gather all divided logits in a value."""
    if isinstance(value, DividedLogits):
        return value.whole()
    if type(value) in (tuple, list):
        return type(value)(map(_whole, value))
    return value


def _reshape_part(logits: DividedLogits, func: Any, name: str, args: Any, kwargs: Any) -> Tensor | None:
    """Return the part in another shape, or None if that shape splits the vocabulary."""
    part = logits.part
    if name == "__getitem__":
        index = args[0] if isinstance(args[0], tuple) else (args[0],)
        plain = all(isinstance(one, (int, slice)) and not isinstance(one, bool) for one in index)
        whole_rows = len(index) < part.dim() or (len(index) == part.dim() and index[-1] == slice(None))
        return part[args[0]] if plain and whole_rows else None
    if any(isinstance(one, torch.dtype) for one in args):  # view(dtype) reinterprets the values
        return None
    shape = func(torch.empty(logits.shape, device="meta"), *args, **kwargs).shape
    # The vocabulary stays the last dimension if that keeps its size.
    if not shape or shape[-1] != logits.shape[-1]:
        return None
    local = (*shape[:-1], part.shape[-1])
    return part.view(local) if name == "view" else part.reshape(local)


def _cross_entropy(
    logits: DividedLogits, target: Tensor, weight: Tensor | None = None, size_average: Any = None,
    ignore_index: int = -100, reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Tensor | None:  # fmt: skip
    """Compute the loss from the parts; return None for unsupported options."""
    rows = logits.dim() == 2 and target.dim() == 1 and target.shape[0] == logits.shape[0]
    special = weight is not None or size_average is not None or reduce is not None or label_smoothing != 0.0
    if not rows or special or target.is_floating_point() or reduction not in ("mean", "sum", "none"):
        return None
    mine, V = logits.parts[logits.group.index], logits.shape[-1]
    return cross_entropy(
        logits.group, logits.part, target, mine, V, ignore_index=ignore_index, reduction=reduction
    )
