"""Logits whose vocabulary is divided over ranks, and that nobody need know are.

The user's loss is called as it is, with what the model gave. So that it is not the whole logits, [b, s, V] on every
rank, they are a tensor that says it has that shape and holds this rank's part:

    shape, dtype, device               those of the whole
    view, reshape, flatten, [:, :-1]   still divided, as long as the vocabulary stays the last dimension
    float, to, contiguous, clone       still divided
    F.cross_entropy                    on the parts: `vocabulary.cross_entropy`
    anything else                      gathers the whole first: exact, with gradients, and as dear as it sounds
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mpkit.parallel.axis import Line
from mpkit.parallel.tensor.operators import gather_features
from mpkit.parallel.tensor.vocabulary import cross_entropy

__all__ = ["DividedLogits"]

OF_THE_WHOLE = {
    "shape", "size", "dtype", "device", "dim", "ndim", "ndimension", "numel", "nelement", "layout", "is_cuda", "is_cpu",
    "is_meta", "is_sparse", "is_quantized", "is_nested", "is_mkldnn", "is_floating_point", "is_complex", "__len__",
    "itemsize", "element_size", "get_device",
}  # fmt: skip
"""What the stand-in answers by itself."""

OF_THE_PART = {
    "requires_grad", "grad_fn", "is_leaf", "_version", "untyped_storage", "nbytes", "data_ptr", "register_hook",
    "retain_grad", "grad", "is_contiguous", "_backward_hooks", "output_nr", "requires_grad_", "retains_grad",
}  # fmt: skip
"""What is asked of, or done to, what is really there."""

ELEMENTWISE = {
    "float",
    "double",
    "half",
    "bfloat16",
    "to",
    "type",
    "contiguous",
    "clone",
    "detach",
    "cpu",
    "cuda",
}
SHAPING = {"view", "reshape", "flatten", "__getitem__"}
REBINDING = {"__iadd__", "__isub__", "__imul__", "__itruediv__"}


class DividedLogits(Tensor):
    """[..., V], of which this rank holds [..., V_i].

    Attributes:
        part: [..., V_i], in autograd's graph.
        line: the ranks.
        parts: of the vocabulary, by rank.
    """

    part: Tensor
    line: Line
    parts: tuple[range, ...]

    @staticmethod
    def make(line: Line, parts: tuple[range, ...], part: Tensor) -> DividedLogits:
        """The logits whose part this is."""
        whole = (*part.shape[:-1], parts[-1].stop)
        made = Tensor._make_wrapper_subclass(DividedLogits, whole, dtype=part.dtype, device=part.device)
        made.part, made.line, made.parts = part, line, parts
        return made

    def __new__(cls, *_: Any) -> DividedLogits:
        """Not by itself."""
        raise AssertionError("DividedLogits.make makes them")

    def whole(self) -> Tensor:
        """[..., V], gathered."""
        return gather_features(self.line, self.part, [len(part) for part in self.parts])

    def _like(self, part: Tensor) -> DividedLogits:
        return DividedLogits.make(self.line, self.parts, part)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        mine = self.parts[self.line.index]
        return f"<logits of shape {list(self.shape)}, here those of tokens {mine.start} to {mine.stop - 1}>"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Whatever is asked of them, or done with them."""
        kwargs = kwargs or {}
        name = func.__name__
        if name in ("__get__", "__set__"):
            name = func.__self__.__name__  # type: ignore[attr-defined]
        own = args[0] if args and isinstance(args[0], cls) else None
        if own is not None:
            if name in OF_THE_WHOLE:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if name in OF_THE_PART:
                found = func(own.part, *args[1:], **kwargs)
                return own if found is own.part else found
            if name in ELEMENTWISE and not any(isinstance(arg, cls) for arg in args[1:]):
                return own._like(func(own.part, *args[1:], **kwargs))
            if name in SHAPING:
                shaped = _shaped(own, func, name, args[1:], kwargs)
                if shaped is not None:
                    return own._like(shaped)
            if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
                raise ValueError(_cannot_write(name))
        logits = kwargs.get("input", own)
        if func is F.cross_entropy and isinstance(logits, cls):
            found = _cross_entropy(logits, *args[1:], **{k: v for k, v in kwargs.items() if k != "input"})
            if found is not None:
                return found
        with torch._C.DisableTorchFunctionSubclass():
            return func(*_whole(args), **{key: _whole(value) for key, value in kwargs.items()})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Where `__torch_function__` is not asked."""
        return func(*_whole(args), **{key: _whole(value) for key, value in (kwargs or {}).items()})


def _whole(value: Any) -> Any:
    """The same with every logits in it gathered."""
    if isinstance(value, DividedLogits):
        return value.whole()
    if type(value) in (tuple, list):
        return type(value)(map(_whole, value))
    return value


def _shaped(logits: DividedLogits, func: Any, name: str, args: Any, kwargs: Any) -> Tensor | None:
    """The part, in another shape; None if that takes the vocabulary apart."""
    part = logits.part
    if name == "__getitem__":
        index = args[0] if isinstance(args[0], tuple) else (args[0],)
        plain = all(isinstance(one, (int, slice)) and not isinstance(one, bool) for one in index)
        whole_rows = len(index) < part.dim() or (len(index) == part.dim() and index[-1] == slice(None))
        return part[args[0]] if plain and whole_rows else None
    stand_in = torch.empty(logits.shape, device="meta")
    if any(isinstance(one, torch.dtype) for one in args):  # view(dtype) sees other numbers
        return None
    shape = func(stand_in, *args, **kwargs).shape
    # Rows stay rows if they are as long as before.
    if not shape or shape[-1] != logits.shape[-1]:
        return None
    local = (*shape[:-1], part.shape[-1])
    return part.view(local) if name == "view" else part.reshape(local)


def _cross_entropy(
    logits: DividedLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """On the parts; None for what cannot be done so."""
    rows = logits.dim() == 2 and target.dim() == 1 and target.shape[0] == logits.shape[0]
    special = weight is not None or size_average is not None or reduce is not None or label_smoothing != 0.0
    if not rows or special or target.is_floating_point() or reduction not in ("mean", "sum", "none"):
        return None
    mine = logits.parts[logits.line.index]
    return cross_entropy(
        logits.line, logits.part, target, mine, ignore_index=ignore_index, reduction=reduction
    )


def _cannot_write(name: str) -> str:
    return (
        f"{name} writes into the logits, of which each rank of a tensor-parallel group holds a part of the vocabulary: "
        "it would be lost. Make new ones: logits = logits.masked_fill(...), logits / temperature, torch.where(...)"
    )
