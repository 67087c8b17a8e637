"""Checks of one batch: a pair of inputs and targets, both tensors whose first dimension is the batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mpkit.strategies.data.batches import check_tensor
from mpkit.strategies.data.microbatch import Value, leaves, map_tensors

__all__ = ["WANTED", "checked_batch"]

WANTED = "data is a sequence of (inputs, targets), each a whole batch, such as [(torch.randn(8, 4), torch.randn(8, 2))]"


def checked_batch(item: Any, i: int) -> tuple[Value, Value]:
    """Check batch number `i` of the data and return it on the CPU.

    Raises:
        ValueError: the batch is not a pair of tensors whose first dimension is the batch.
    """
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        what = (
            f"{type(item).__name__} of {len(item)}"
            if isinstance(item, (tuple, list))
            else type(item).__name__
        )
        raise ValueError(f"data[{i}] is {what}, not a pair; {WANTED}")
    inputs, targets = (
        _value(item[0], f"the inputs of data[{i}]"),
        _value(item[1], f"the targets of data[{i}]"),
    )
    sizes = {int(tensor.shape[0]) for tensor in (*leaves(inputs), *leaves(targets))}
    if len(sizes) > 1:
        raise ValueError(
            f"data[{i}]: the tensors' first dimensions differ: inputs {_shapes(inputs)}, targets {_shapes(targets)}. "
            "The first dimension is the batch, which micro-batches are taken from: it has to be the same in all."
        )
    if sizes == {0}:
        raise ValueError(
            f"data[{i}] is a batch of 0 samples: inputs {_shapes(inputs)}. A batch has 1 or more."
        )
    return inputs, targets


def _value(value: Any, what: str) -> Value:
    if isinstance(value, list):
        value = tuple(value)
    if isinstance(value, Mapping):
        value = dict(value)
    inner = (
        [value] if isinstance(value, Tensor) else list(value.values()) if isinstance(value, dict) else value
    )
    if isinstance(value, (dict, tuple)):
        _refuse_nested(value, what)
    if not isinstance(inner, (list, tuple)) or not inner or not all(isinstance(t, Tensor) for t in inner):
        raise ValueError(
            f"{what} are {type(value).__name__}: a tensor, a tuple of tensors or a dict of tensors is wanted. "
            "torch.as_tensor(...) makes one of numbers or of a NumPy array"
        )
    for tensor in inner:
        check_tensor(tensor, what)
        if tensor.dim() == 0:
            raise ValueError(
                f"{what}: a tensor without dimensions has no batch; the first dimension is the batch"
            )
    return map_tensors(lambda tensor: tensor.detach().cpu(), value)


def _refuse_nested(value: dict[Any, Any] | tuple[Any, ...], what: str) -> None:
    """Raise the error of inputs or targets that have structures in their structure, if they have."""
    for key, each in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(each, (Mapping, list, tuple)) and each:
            inside = next(iter(each)) if isinstance(each, Mapping) else 0
            flat = f"{key}_{inside}"
            example = (
                f'{{"{flat}": batch[{key!r}][{inside!r}], ...}}'
                if isinstance(value, dict)
                else "(*batch[0], *batch[1])"
            )
            raise ValueError(
                f"{what} are nested: [{key!r}] is itself a {type(each).__name__}, and micro-batches are taken from one "
                f"tensor, or from one tuple or dict of tensors. Give them flat, such as {example}, and let the model's "
                "forward (or the loss) put together what it needs"
            )


def _shapes(value: Value) -> str:
    return ", ".join(str(list(tensor.shape)) for tensor in leaves(value))
