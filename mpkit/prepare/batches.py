"""The data, as far as the steps take it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from torch import Tensor

from mpkit.parallel.microbatch import Value, batch_size, leaves, map_tensors
from mpkit.plan import Plan

__all__ = ["check_split", "take_batches"]

WANTED = "data is a sequence of (inputs, targets), each a whole batch, such as [(torch.randn(8, 4), torch.randn(8, 2))]"


def take_batches(data: Any, steps: int) -> list[tuple[Value, Value]]:
    """The batches that the steps take, on the CPU; of a DataLoader or another iterable, the first ones it gives.

    Raises:
        ValueError: the data is no sequence of pairs of tensors, batch first.
    """
    if isinstance(data, (Tensor, str, bytes, Mapping)) or (
        not isinstance(data, (Sequence, Iterable))
        and not (hasattr(data, "__getitem__") and hasattr(data, "__len__"))
    ):
        hint = ""
        if isinstance(data, Tensor):
            hint = (
                ". This is one tensor: with its targets, data=[(inputs, targets)] trains on it in every step"
            )
        raise ValueError(f"data is {type(data).__name__}; {WANTED}{hint}")
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        items = [data[i] for i in range(min(steps, len(data)))]
    else:
        items = list(islice(iter(data), steps))
    if not items:
        raise ValueError(f"data is empty; {WANTED}")
    if len(items) == 2 and all(isinstance(item, Tensor) for item in items):
        raise ValueError(
            f"data is a pair of tensors, one batch; {WANTED}. For one batch again and again: data=[data]"
        )
    return [_batch(item, i) for i, item in enumerate(items)]


def _batch(item: Any, i: int) -> tuple[Value, Value]:
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
    if not isinstance(inner, (list, tuple)) or not inner or not all(isinstance(t, Tensor) for t in inner):
        raise ValueError(
            f"{what} are {type(value).__name__}: a tensor, a tuple of tensors or a dict of tensors is wanted. "
            "torch.as_tensor(...) makes one of numbers or of a NumPy array"
        )
    for tensor in inner:
        if tensor.dim() == 0:
            raise ValueError(
                f"{what}: a tensor without dimensions has no batch; the first dimension is the batch"
            )
    return map_tensors(lambda tensor: tensor.detach().cpu(), value)


def _shapes(value: Value) -> str:
    return ", ".join(str(list(tensor.shape)) for tensor in leaves(value))


def check_split(batches: list[tuple[Value, Value]], plan: Plan) -> None:
    """Every batch has a sample for each micro-batch.

    Raises:
        ValueError: one has not.
    """
    m = plan.microbatches
    for i, (inputs, _) in enumerate(batches):
        size = batch_size(inputs)
        if size < m:
            best = max(n for n in range(1, size + 1) if size % n == 0)
            raise ValueError(
                f"{plan}: {m} micro-batches of data[{i}], a batch of {size}: each needs a sample at least. "
                f"microbatches={best} works, or a batch of {m} or more; {2 * m}, say."
            )
