"""A walk: the model's own forward, with the calls of its blocks and the operations between them intercepted.

The model is *opened*: some of its modules run their forward as it is written (the model itself, and whatever contains
blocks), and the others, the *blocks*, are called as a whole. A walk is a torch function mode, so it also intercepts
every operation between blocks; an autograd function is one operation. Within a block it is off. torch.utils.checkpoint
between blocks means the blocks in it: each is a node, whose activations are not kept.

    seen            determine whether a call is a question about shapes, an operation, or a block
    inputs only     run an operation on what follows from the model's inputs alone, here and on every rank
    node            anything else is a node of the graph, which the two kinds of walk treat differently: the dry run
                    (`mpkit.strategies.prepare.record`), and a stage's forward
                    (`mpkit.strategies.stage.partitioned_stage`)
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd import Function
from torch.overrides import TorchFunctionMode, handle_torch_function

from mpkit.common.torch_private import GENERATORS, _get_current_function_mode_stack
from mpkit.strategies.partition.value import Value

HOOKS = (
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called", "_backward_pre_hooks", "_backward_hooks",
)  # fmt: skip
"""The attributes in which a module keeps its hooks."""


class OriginalForward:
    """The forward of a block, as it was before `prepare_modules`, with the hooks around it."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.module = name, module
        self.forward = _with_hooks(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the block's forward."""
        return self.forward(*args, **kwargs)


class ForwardWalk(TorchFunctionMode):
    """Intercepts one forward: `with Walk(names of the model's parameters, by id) as walk: model(...)`."""

    def __init__(self, parameters: dict[int, str]) -> None:
        super().__init__()
        _intercept()
        self.checkpoints = 0  # how many of torch's checkpoints are around what runs now
        self._parameters = parameters
        self.scopes = [""]  # the opened modules whose forward is running

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # ---- seen
        kwargs = kwargs or {}
        if type(func) is OriginalForward:
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
        """Run or skip a block's call or an operation on values; the latter may be only a question about shapes."""
        raise NotImplementedError

    def inputs_only(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Observe an operation on what follows from the inputs alone, just before it is run."""

    @contextmanager
    def enter_scope(self, scope: str) -> Iterator[None]:
        """Mark an opened module's forward as running, inside the block."""
        self.scopes.append(scope)
        try:
            yield
        finally:
            self.scopes.pop()


def prepare_modules(model: nn.Module, opened: Iterable[str], blocks: Iterable[str]) -> dict[str, nn.Module]:
    """Prepare a copy of the user's model for walks, which cannot be undone; return the blocks, by name.

    The forward of `opened` modules runs as it is written; `blocks` are called as a whole.
    """
    modules = dict(model.named_modules())
    for name in opened:
        modules[name].forward = _as_written(name, modules[name].forward)
    for name in blocks:
        modules[name].forward = AsAWhole(OriginalForward(name, modules[name]))
    return {name: modules[name] for name in blocks}


def _as_written(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        walk = current_walk()
        if walk is None:
            return forward(*args, **kwargs)
        with walk.enter_scope(name):
            return forward(*args, **kwargs)

    return run


def _with_hooks(module: nn.Module) -> Callable[..., Any]:
    """Return a function that runs the forward of a module and all its hooks, which torch no longer calls.

    Torch would call them even where the block is skipped, with stand-ins.
    """
    inner = module.forward
    hooks = {name: module.__dict__[name] for name in HOOKS}
    if not any(hooks.values()):
        return inner
    none = {name: type(registered)() for name, registered in hooks.items()}
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
    """A block's replaced forward: it asks the walk, which runs the call or skips it."""

    def __init__(self, call: OriginalForward) -> None:
        self.call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the block through the current walk, if there is one."""
        if current_walk() is None:  # within another block, or outside of any walk
            return self.call(*args, **kwargs)
        return handle_torch_function(self.call, (), *args, **kwargs)


def around_forward(
    module: nn.Module, before: Callable[..., Any], after: Callable[[nn.Module, Any, Any], Any]
) -> None:
    """Call functions before and after a module computes, as forward hooks do; for a block only where it is really run.

    A block's own hooks would also be called where it is skipped, with stand-ins.
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


def current_walk() -> ForwardWalk | None:
    """Return the walk that is active now, or None outside of walks and inside a block."""
    return next((mode for mode in _get_current_function_mode_stack() if isinstance(mode, ForwardWalk)), None)


def _name_of(func: Any) -> str:
    """Return the name of an operation, such as "add", of a property, such as "shape", or of an autograd function."""
    name = getattr(func, "__name__", type(func).__name__)
    return name if name not in ("__get__", "apply") else getattr(func.__self__, "__name__", name)


@cache
def _intercept() -> None:
    """Let walks see calls of autograd functions, and what a checkpoint is around, from now on, in this process.

    Torch shows a mode only what an autograd function's forward computes, which has no graph, so the call as a whole is
    a node. Of a checkpoint the walk sees the blocks within, one by one, and lets each be computed again.
    """
    inner = vars(Function)["apply"].__get__  # written in Python before torch 2.14, in C from then on
    checkpoint: Any = torch.utils.checkpoint
    # What checkpoint() calls: another function before torch 2.14.
    name = next(each for each in GENERATORS if hasattr(checkpoint, each))
    around = getattr(checkpoint, name)

    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        walk = current_walk()
        if walk is None:
            return inner(None, cls)(*args, **kwargs)
        if cls is checkpoint.CheckpointFunction:
            function, _, *rest = args
            with contextmanager(_within_checkpoint)(walk):
                return function(*rest)
        return handle_torch_function(cls.apply, (), *args, **kwargs)

    def around_checkpointed(*args: Any, **kwargs: Any) -> Any:
        walk = current_walk()
        return around(*args, **kwargs) if walk is None else _within_checkpoint(walk)

    Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
    setattr(checkpoint, name, around_checkpointed)


def _within_checkpoint(walk: ForwardWalk) -> Iterator[None]:
    """Yield once, as torch's own generator does, while what a checkpoint is around runs."""
    walk.checkpoints += 1
    try:
        yield
    finally:
        walk.checkpoints -= 1
