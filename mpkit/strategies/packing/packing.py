"""Pickling for ranks and back: cloudpickle, which pickles a notebook's classes by value, and special cases.

functions within functions of installed packages
    cloudpickle copies the globals that such a function uses, so on the rank the function would use the copies and
    the package the originals; and some globals cannot be copied (a ContextVar). So the function is sent as code
    of its module. transformers attaches such functions to models whose hidden states are requested.
models of transformers
    Constructing a model registers its class's recordable outputs in the package; a rank does not construct it.
functions that wrap a library's
    They have its name (functools.wraps), under which a rank would find the library's function.
plain tensors
    They are sent as their bytes; torch pickles each as a file of its own, which takes twice the time.
parameters of classes of their own
    torch pickles them as plain ones.
classes of torch's C++ part that are not where their qualified name says, such as SDPBackend
    They are sent by the name in their module.
parametrized modules
    `torch.nn.utils.parametrize` (weight_norm, spectral_norm, orthogonal) gives a module a dynamically created
    class, which cannot be pickled. So its original class and its state are sent, and parametrized again.
"""

import io
import sys
import sysconfig
from collections.abc import Callable, Sequence
from ctypes import string_at
from importlib import import_module
from pathlib import Path
from types import CellType, CodeType, FunctionType
from typing import IO, Any

import cloudpickle
import torch
from torch import Tensor, nn

ATTRIBUTES = (
    "__name__", "__qualname__", "__module__", "__doc__", "__defaults__", "__kwdefaults__", "__annotations__",
)  # fmt: skip
RECORDS = "transformers.utils.output_capturing"  # registers which outputs the models of a class can record


def dumps(value: object) -> bytes:
    """Pickle a value as `cloudpickle.dumps` does; `pickle.loads` reads the result."""
    file = io.BytesIO()
    Packer(file).dump(value)
    return file.getvalue()


class Packer(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles as cloudpickle does, except some objects from libraries."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self.modules: set[str] = set()  # the modules of all pickled functions and classes

    def reducer_override(self, obj: Any) -> Any:
        """Reduce an object that is not a plain value."""
        if isinstance(obj, (type, FunctionType)):
            self.modules.add(obj.__module__)
        if isinstance(obj, type) and _is_renamed(obj):
            return _member, (obj.__module__, obj.__name__)
        if isinstance(obj, FunctionType) and _is_disguised(obj):
            return self._dynamic_function_reduce(obj)
        if isinstance(obj, FunctionType) and _is_nested(obj):
            cells = [cell.cell_contents for cell in obj.__closure__ or ()]
            attributes = {name: getattr(obj, name) for name in ATTRIBUTES}
            state = (cells, attributes, obj.__dict__)
            return _function, (obj.__globals__["__name__"], obj.__code__), state, None, None, _complete
        if type(obj) is Tensor and _is_plain(obj):
            whole = obj.untyped_storage()
            content = string_at(whole.data_ptr(), whole.nbytes())
            return _tensor, (obj.dtype, content, obj.storage_offset(), tuple(obj.shape), obj.stride())
        if isinstance(obj, nn.Parameter) and _loses_its_class(type(obj)):
            return _parameter, (type(obj), *obj.__reduce_ex__(4)[:2])
        if (parts := taken_apart(obj)) is not None:
            return parts
        if getattr(type(obj), "_can_record_outputs", None) and RECORDS in sys.modules:
            make, args, state, *_ = obj.__reduce_ex__(4)
            return make, args, state, None, None, _complete_model
        return super().reducer_override(obj)


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is a place in the host's memory and nothing else."""
    marked = (
        tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or vars(tensor)
    )
    return not marked and tensor.device.type == "cpu" and tensor.layout is torch.strided


def _tensor(
    dtype: torch.dtype, content: bytes, offset: int, shape: Sequence[int], stride: Sequence[int]
) -> Tensor:
    whole = (
        torch.UntypedStorage.from_buffer(content, dtype=torch.uint8) if content else torch.UntypedStorage()
    )
    return torch.empty(0, dtype=dtype).set_(whole, offset, shape, stride)


def _loses_its_class(kind: type[nn.Parameter]) -> bool:
    """Return whether torch pickles parameters of this class as plain ones."""
    return kind is not nn.Parameter and kind.__reduce_ex__ is nn.Parameter.__reduce_ex__


def _parameter(
    kind: type[nn.Parameter], make: Callable[..., nn.Parameter], args: tuple[Any, ...]
) -> nn.Parameter:
    plain = make(*args)
    made: nn.Parameter = Tensor._make_subclass(kind, plain.data, plain.requires_grad)
    vars(made).update(vars(plain))
    return made


def _is_renamed(kind: type) -> bool:
    """Return whether a class is in its module by its name, and not by its qualified name."""
    there = getattr(sys.modules.get(kind.__module__), kind.__name__, None)
    return kind.__name__ != kind.__qualname__ and there is kind


def _member(module: str, name: str) -> Any:
    return getattr(import_module(module), name)


def _is_disguised(function: FunctionType) -> bool:
    """Return whether a notebook's function has a library's name (functools.wraps)."""
    return function.__globals__.get("__name__") == "__main__" != function.__module__


def _is_nested(function: FunctionType) -> bool:
    """Return whether a function of an installed package defined this one, which then has no name in its module."""
    module = sys.modules.get(function.__globals__.get("__name__", ""))
    file = getattr(module, "__file__", None)
    if module is None or file is None or vars(module) is not function.__globals__:
        return False
    if "<locals>" not in function.__qualname__:
        return False
    by_value = cloudpickle.list_registry_pickle_by_value()
    if any(f"{module.__name__}.".startswith(f"{name}.") for name in by_value):
        return False
    installed = {Path(sysconfig.get_path(kind)) for kind in ("purelib", "platlib")}
    return any(folder in Path(file).parents for folder in installed)


def _function(module: str, code: CodeType) -> FunctionType:
    cells = tuple(CellType() for _ in code.co_freevars)
    return FunctionType(code, vars(import_module(module)), closure=cells)


def _complete(function: FunctionType, state: tuple[list[Any], dict[str, Any], dict[str, Any]]) -> None:
    contents, attributes, own = state
    for cell, content in zip(function.__closure__ or (), contents, strict=True):
        cell.cell_contents = content
    for name, value in attributes.items():
        setattr(function, name, value)
    function.__dict__.update(own)


def _complete_model(model: Any, state: dict[str, Any]) -> None:
    model.__setstate__(state)
    registry = getattr(import_module(RECORDS), "_CAN_RECORD_REGISTRY", None)
    if registry is not None:
        registry[model] = type(model)._can_record_outputs


def taken_apart(obj: Any) -> tuple[Any, ...] | None:
    """Return what pickle needs to rebuild a parametrized module; None for any other object."""
    parametrize = sys.modules.get("torch.nn.utils.parametrize")  # not imported: nothing is parametrized
    if parametrize is None or "parametrizations" not in getattr(obj, "_modules", ()):
        return None
    base = type(obj).__mro__[1]
    if not parametrize.is_parametrized(obj) or type(obj).__name__ != f"Parametrized{base.__name__}":
        return None
    state: Any = base.__getstate__
    return _empty, (base,), state(obj), None, None, _parametrize


def _empty(kind: Any) -> Any:
    return kind.__new__(kind)


def _parametrize(module: Any, state: dict[str, Any]) -> None:
    """Turn an empty module into the parametrized one with this state."""
    from mpkit.common.torch_private import _inject_new_class, _inject_property

    module.__setstate__(state)
    _inject_new_class(module)
    for name in module.parametrizations:
        _inject_property(module, name)
