"""A walk: the model's own forward, in which the calls of its blocks and what happens between them are seen.

The model is *opened*: of its modules some run their forward as it is written (the model itself, and whatever has blocks
within), the others are called as a whole, the *blocks*. A walk is a torch function mode, so that it sees every
operation between blocks too. Within a block it is off.

    seen            is it a question about shapes, an operation, or a block?
    inputs only     an operation on what follows from the model's inputs alone is done, here and on every rank
    node            anything else is a node of the graph; what becomes of it the two kinds of walk decide: the dry run
                    (`mpkit.prepare.record`), and a stage's forward (`mpkit.parallel.anymodel.part`)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,  # private: tests/test_any_model.py guards it
    handle_torch_function,
)

from mpkit.parallel.anymodel.value import Value

__all__ = ["Call", "Walk", "current_walk", "prepare_modules"]

HOOKS = (
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called", "_backward_pre_hooks", "_backward_hooks",
)  # fmt: skip
"""Where a module keeps what is called around it."""


class Call:
    """The forward of a block, as it was before `prepare_modules`, with the hooks around it."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.module = name, module
        self.forward = _with_hooks(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Do it."""
        return self.forward(*args, **kwargs)


class Walk(TorchFunctionMode):
    """Sees a forward. One for each forward: `with Walk(...) as walk: model(...)`.

    Args:
        parameters: the model's, by id, with their names.
    """

    def __init__(self, parameters: dict[int, str]) -> None:
        super().__init__()
        self._parameters = parameters
        self.scopes = [""]  # the opened modules whose forward is under way

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # ---- seen
        kwargs = kwargs or {}
        if type(func) is Call:
            return self.node(func.name, func, args, kwargs)
        # ---- inputs only
        if not (self._has_value(args) or (kwargs and self._has_value(kwargs.values()))):
            self.inputs_only(func, args, kwargs)
            return func(*args, **kwargs)
        # ---- node
        return self.node(_name_of(func), func, args, kwargs)

    def _has_value(self, parts: Iterable[Any]) -> bool:
        for part in parts:
            if isinstance(part, Tensor):
                if type(part) is Value or id(part) in self._parameters:
                    return True
            elif isinstance(part, (tuple, list)):
                if self._has_value(part):
                    return True
            elif isinstance(part, dict) and self._has_value(part.values()):
                return True
        return False

    def node(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What becomes of a block's call, or of an operation on values; the latter may be a question of shapes."""
        raise NotImplementedError

    def inputs_only(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An operation is about to be done on what follows from the inputs alone."""

    @contextmanager
    def within(self, scope: str) -> Iterator[None]:
        """Inside, an opened module's forward is under way."""
        self.scopes.append(scope)
        try:
            yield
        finally:
            self.scopes.pop()


def prepare_modules(model: nn.Module, opened: Iterable[str], blocks: Iterable[str]) -> dict[str, nn.Module]:
    """Let walks see the model's modules; of a copy of the user's model, for good.

    Args:
        opened: names of the modules whose forward runs as it is written.
        blocks: names of those that are called as a whole.

    Returns:
        The blocks.
    """
    modules = dict(model.named_modules())
    for name in opened:
        modules[name].forward = _as_written(name, modules[name].forward)
    for name in blocks:
        modules[name].forward = AsAWhole(Call(name, modules[name]))
    return {name: modules[name] for name in blocks}


def _as_written(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        walk = current_walk()
        if walk is None:
            return forward(*args, **kwargs)
        with walk.within(name):
            return forward(*args, **kwargs)

    return run


def _with_hooks(module: nn.Module) -> Callable[..., Any]:
    """The forward of a module and all its hooks, which are no more called by torch.

    Torch would call them, with stand-ins, also where the block's call is passed over.
    """
    inner = module.forward
    hooks = {name: module.__dict__[name] for name in HOOKS}
    if not any(hooks.values()):
        return inner
    none = {name: type(found)() for name, found in hooks.items()}
    module.__dict__.update(none)

    def forward(*args: Any, **kwargs: Any) -> Any:
        now = module.__dict__["forward"]
        module.__dict__.update(hooks, forward=inner)
        try:
            return module._call_impl(*args, **kwargs)
        finally:
            module.__dict__.update(none, forward=now)

    return forward


class AsAWhole:
    """What a block's forward is: it asks the walk, which does the call or passes it over."""

    def __init__(self, call: Call) -> None:
        self.call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Of the block."""
        if current_walk() is None:  # within another block, or outside of any walk
            return self.call(*args, **kwargs)
        return handle_torch_function(self.call, (), *args, **kwargs)


def around_forward(
    module: nn.Module, before: Callable[..., Any], after: Callable[[nn.Module, Any, Any], Any]
) -> None:
    """Do something before and after a module computes, as forward hooks do; of a block only where it really does.

    Hooks of a block are called, with stand-ins, also where its call is passed over.

    Args:
        before, after: called with what hooks are: (module, inputs) and (module, inputs, output).
    """
    if not isinstance(module.forward, AsAWhole):
        module.register_forward_pre_hook(before, prepend=True)  # a user's hook may use the parameters
        module.register_forward_hook(after)
        return
    call = module.forward.call
    inner = call.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        before(module, args)
        output = inner(*args, **kwargs)
        after(module, args, output)
        return output

    call.forward = forward


def current_walk() -> Walk | None:
    """The walk that sees what happens now, if there is one and it is not inside a block."""
    return next((mode for mode in _get_current_function_mode_stack() if isinstance(mode, Walk)), None)


def _name_of(func: Any) -> str:
    """Of an operation: "add"; of a property, its own: "shape"."""
    name = getattr(func, "__name__", type(func).__name__)
    return name if name != "__get__" else getattr(func.__self__, "__name__", name)
