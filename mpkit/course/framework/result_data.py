"""Results of a student's code: written as plain data, and read as such.

Reading a pickle can call anything that the pickle names, and a rank that ran student code may have written anything.
So a result is bytes that `torch.load(weights_only=True)` reads, inside a pickle that may not name anything.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import IO, Any

import numpy as np

from mpkit.course.framework.equal import is_tensor

__all__ = ["pack_result", "plain", "unpack_result"]

_KINDS: tuple[Any, ...] = (bool, int, float, str, bytes)


def pack_result(value: Any) -> bytes:
    """Return a result, made plain, as bytes.

    >>> import torch
    >>> unpack_result(io.BytesIO(pickle.dumps(pack_result({"sum": torch.ones(2), "odd": object}))))
    {'sum': tensor([1., 1.]), 'odd': '<type>'}
    >>> numbers = {np.int64(1): np.float64(0.5), "all": np.arange(2), "r": range(2)}
    >>> unpack_result(io.BytesIO(pickle.dumps(pack_result(numbers))))
    {1: 0.5, 'all': [0, 1], 'r': [0, 1]}
    """
    import torch

    file = io.BytesIO()
    torch.save(plain(value), file)
    return file.getvalue()


def unpack_result(file: IO[bytes]) -> Any:
    """Return the result that `pack_result` packed.

    Raises:
        pickle.UnpicklingError: The file was not made by `pack_result`.
    """
    import torch

    content = _NamesNothing(file).load()
    if not isinstance(content, bytes):
        raise pickle.UnpicklingError("a rank left something else than a sealed result")
    return torch.load(io.BytesIO(content), weights_only=True)


class _NamesNothing(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"a result that wants {module}.{name}")


def plain(value: Any) -> Any:
    """Return a result as tensors, numbers, strings, lists, tuples and dicts; of anything else the type's name.

    NumPy's numbers and arrays become Python's, as do ranges, so that values from a data frame are accepted.
    """
    if is_tensor(value):
        from torch import Tensor

        return value.detach().cpu().clone().as_subclass(Tensor)
    if isinstance(value, np.generic):
        number = value.item()
        return f"<{type(value).__name__}>" if isinstance(number, np.generic) else plain(number)
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {plain(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | range):
        items = [plain(each) for each in value]
        return tuple(items) if type(value) is tuple else items
    if isinstance(value, bool | int | float | str | bytes):
        # An instance of a subclass is reduced to its plain value: the pickle may not name a class.
        return next(kind(value) for kind in _KINDS if isinstance(value, kind))
    if value is None:
        return value
    if value is ...:
        return "..."
    return f"<{type(value).__name__}>"
