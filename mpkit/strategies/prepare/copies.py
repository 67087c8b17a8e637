"""Copies of a model whose functions refer to the copy.

`copy.deepcopy` does not copy functions. A forward or a hook that was attached to a model and refers to it (`lambda x:
model.head(x)`) would still refer to the original model, but after pickling to the copy.
"""

import copy
from collections.abc import Callable, Iterable
from types import CellType, FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mpkit.common.exceptions import one_line, report
from mpkit.common.torch_private import (
    FakeTensor,
    FakeTensorMode,
    _disable_current_modes,
    _get_dispatch_mode,
    _TorchDispatchModeKey,
)
from mpkit.strategies.data.microbatch import Value, leaves, map_tensors
from mpkit.strategies.models.nested_values import flatten
from mpkit.strategies.partition.walk import HOOKS
from mpkit.trace.record.fake_mode import FakeMode

Result = TypeVar("Result")


def copy_model(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """Return a deep copy of the model, or raise a ValueError: it may hold a lock, or the like.

    `memo` maps the id of an object in the model to its replacement in the copy.

    >>> def doubled(model):
    ...     model.forward = lambda x: nn.Linear.forward(model, x) * 2
    ...     return model
    >>> model = doubled(nn.Linear(2, 2))
    >>> copy_model(model).forward.__closure__[0].cell_contents is model
    False
    """
    memo = {} if memo is None else memo
    for buffer in model.buffers():
        if isinstance(buffer, FakeTensor):  # which has no memory that deepcopy could copy
            memo.setdefault(id(buffer), buffer.clone())
    try:
        made = copy.deepcopy(model, memo)
    except Exception as error:
        which, reason = "The model", error
        for name, child in model.named_children():
            if (refused := _refusal(child)) is not None:
                which, reason = f"The model's {name}", refused
                break
        raise ValueError(
            f"{which} cannot be copied, and so not sent to the ranks: {one_line(reason)}. Locks, open files, "
            "generators and the like belong to this process: make them when they are first used, on the rank, or leave "
            "them out (__getstate__)."
        ) from None
    for before, after in zip(model.parameters(), made.parameters(), strict=True):
        if issubclass(type(before), nn.Parameter):  # deepcopy leaves out what its author added to a parameter
            vars(after).update(vars(before) | vars(after))
    for module in made.modules():
        _rebind(vars(module), [name for name in ("forward",) if name in vars(module)], memo)
        for name in HOOKS:
            hooks = vars(module)[name]
            _rebind(hooks, list(hooks), memo)
    return made


def _refusal(module: nn.Module) -> Exception | None:
    """Return what copying a module raises; None if it can be copied."""
    try:
        copy.deepcopy(module)
    except Exception as error:
        return error
    return None


def ready_to_travel(model: nn.Module) -> nn.Module:
    """Return the model itself, or a copy if some of it is on a GPU or belongs to a graph.

    A tensor that a module keeps from a forward, such as the weight that `torch.nn.utils.weight_norm` computes, can be
    neither copied nor sent together with its graph.
    """
    values = (value for module in model.modules() for value in vars(module).values())
    tensors = [leaf for value in values for leaf in flatten(value)[0] if isinstance(leaf, Tensor)]
    if kept := [tensor for tensor in tensors if tensor.grad_fn is not None]:
        memo: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        model = copy_model(model, memo | {id(tensor): tensor.detach() for tensor in kept})
    if all(tensor.device.type == "cpu" for tensor in (*model.parameters(), *model.buffers())):
        return model
    return copy_model(model).cpu()


class _DropContent(TorchFunctionMode):
    """Lets `copy.deepcopy` make fakes of the plain tensors that modules keep in attributes, lists and objects.

    It converts each storage once, so tensors that share memory share it in the copy.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not Tensor.__deepcopy__ or isinstance(args[0], FakeTensor):
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            memo[id(tensor)] = self._mode.from_tensor(tensor)
        return memo[id(tensor)]


def _lacks_content(error: BaseException | None) -> bool:
    """Return whether an error, or one behind it, is of the kinds that fakes raise because they have no numbers.

    `item`, branches on values, operators whose output's shape depends on values, and access to memory raise subclasses
    of RuntimeError. Conversions to Python's or NumPy's types, and dtypes that do not go together, raise TypeError.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen and not isinstance(error, (RuntimeError, TypeError)):
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return isinstance(error, (RuntimeError, TypeError))


class DryRuns:
    """Runs a model without consequences: a copy on fake tensors, and where that is impossible, one on real ones.

    Args:
        dtype: what its floating-point tensors are cast to; None: they stay.
        ready: changes a copy before it is run.
    """

    def __init__(
        self, model: nn.Module, dtype: torch.dtype | None = None,
        ready: Callable[[nn.Module], object] = lambda _: None,
    ) -> None:  # fmt: skip
        self._model, self._dtype, self._ready = model, dtype, ready
        self._mode = FakeMode()
        self._fake: nn.Module | None = None
        self.on_fakes = False  # whether what runs now runs on fake tensors

    def run(
        self, fn: Callable[..., Result], *values: Value, what: str, final: tuple[type[Exception], ...] = ()
    ) -> Result:
        """Return fn(copy, *values); what fails on fake tensors is run again on real ones, for an error with numbers.

        An error that only fake tensors raise is expected if they lack the content, and reported otherwise. `what`, such
        as "the model", begins the report; `final` exceptions are a result on fake tensors already.
        """
        self.on_fakes = True
        try:
            with self._mode:
                if self._fake is None:
                    with _DropContent(self._mode):
                        self._fake = self._copy(self._mode.from_tensor)
                return fn(self._fake, *(map_tensors(self._mode.from_tensor, value) for value in values))
        except final:
            raise
        except Exception as error:
            failed = error
        finally:
            self.on_fakes = False
        result = fn(self._copy(torch.clone), *(map_tensors(torch.clone, value) for value in values))
        if not _lacks_content(failed):
            report(
                f"{what} was computed for real before the ranks started, which takes time and memory: on tensors that "
                f"have shapes and no content it raises {one_line(failed)}."
            )
        return result

    def _copy(self, of: Callable[[Tensor], Tensor]) -> nn.Module:
        memo: dict[int, Any] = {}
        with _disable_current_modes():  # before 2.13 the mode takes no parameter of a class of its own
            plain = [(parameter, parameter.detach()) for parameter in self._model.parameters()]
        for parameter, tensor in plain:
            memo[id(parameter)] = nn.Parameter(self._narrow(of(tensor)), parameter.requires_grad)
        for buffer in self._model.buffers():
            memo[id(buffer)] = self._narrow(of(buffer.detach()))
        made = copy_model(self._model, memo)
        self._ready(made)
        return made

    def _narrow(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._dtype) if self._dtype and tensor.is_floating_point() else tensor


def has_content(model: nn.Module, batch: tuple[Value, Value]) -> bool:
    """Return whether the tensors of a model and a batch hold numbers: none is fake, or on the meta device."""
    tensors = (*model.parameters(), *model.buffers(), *leaves(batch[0]), *leaves(batch[1]))
    fake = _get_dispatch_mode(_TorchDispatchModeKey.FAKE)
    return fake is None and not any(tensor.is_meta for tensor in tensors)


def _rebind(functions: dict[Any, Any], names: Iterable[Any], memo: dict[int, Any]) -> None:
    """Make functions use the copies of the modules that they closed over."""
    for name in names:
        function = functions[name]
        if not isinstance(function, FunctionType) or not function.__closure__:
            continue
        cells = [_cell(cell, memo) for cell in function.__closure__]
        if all(a is b for a, b in zip(cells, function.__closure__, strict=True)):
            continue
        made = FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(cells)
        )
        made.__kwdefaults__, made.__qualname__ = function.__kwdefaults__, function.__qualname__
        made.__module__ = function.__module__
        functions[name] = made


def _cell(cell: CellType, memo: dict[int, Any]) -> CellType:
    try:
        content = cell.cell_contents
    except ValueError:  # the cell is still empty
        return cell
    if isinstance(content, MethodType) and isinstance(content.__self__, nn.Module):
        owner = memo.get(id(content.__self__))
        return cell if owner is None else CellType(MethodType(content.__func__, owner))
    if isinstance(content, nn.Module) and id(content) in memo:
        return CellType(memo[id(content)])
    return cell
