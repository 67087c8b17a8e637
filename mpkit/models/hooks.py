"""Hooks: what is called around a module's forward and backward, or when a parameter's gradient comes.

A module is *bare* if calling it is calling its forward: then others may do that forward in its place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import nn

__all__ = [
    "Hook", "around", "backward_hooks", "hook_name", "hooks_on", "is_bare", "parameter_hooks", "register",
    "with_backward_hooks",
]  # fmt: skip

AROUND_FORWARD = {"_forward_pre_hooks": "forward pre-hook", "_forward_hooks": "forward hook"}
AROUND_BACKWARD = {
    "_backward_pre_hooks": "full backward pre-hook",
    "_backward_hooks": "full backward hook",
}
ON_PARAMETERS = {
    "_backward_hooks": "register_hook",
    "_post_accumulate_grad_hooks": "register_post_accumulate_grad_hook",
}


class Hook(NamedTuple):
    """A function that is called around something.

    Attributes:
        where: the module's or parameter's name in the model.
        kind: of hook, as PyTorch's documentation calls it; of a parameter's, the method that registers it.
        function: the user's.
    """

    where: str
    kind: str
    function: Any

    def __str__(self) -> str:
        name, where = hook_name(self.function), self.where or "the model"
        if self.kind.startswith("register_"):
            return f"the hook {name} on the parameter {where} ({self.kind})"
        return f"the {self.kind} {name} of {where}"


def hook_name(function: Any) -> str:
    """What a hook is called.

    >>> hook_name(len), hook_name(lambda: None)
    ('len', '<lambda>')
    """
    function = function.func if isinstance(function, partial) else function
    name = getattr(function, "__qualname__", None) or type(function).__name__
    return str(name).rpartition("<locals>.")[2]


def is_bare(module: nn.Module) -> bool:
    """Return whether calling a module calls its class's forward, and nothing else.

    >>> layer = nn.ReLU()
    >>> is_bare(layer)
    True
    >>> _ = layer.register_forward_hook(print)
    >>> is_bare(layer)
    False
    """
    return around(module) is None


def around(module: nn.Module, where: str = "") -> str | None:
    """What is done around the forward of a module's class, in words; None of a bare module.

    >>> around(nn.ReLU()) is None
    True
    """
    if type(module).__call__ is not nn.Module.__call__:
        return f"the __call__ of {where or 'the model'} ({type(module).__name__})"
    forward = vars(module).get("forward")
    if forward is not None and not _is_ours(forward):
        return f"the forward that was put in the place of {where or 'the model'}'s ({hook_name(forward)})"
    hooks = (str(Hook(where, *hook)) for hook in _hooks(module, AROUND_FORWARD | AROUND_BACKWARD))
    return next(hooks, None)


def backward_hooks(model: nn.Module) -> list[Hook]:
    """The hooks around the backward of a model's modules."""
    return [
        Hook(name, kind, function)
        for name, module in model.named_modules()
        for kind, function in _hooks(module, AROUND_BACKWARD)
    ]


def with_backward_hooks(model: nn.Module) -> dict[str, Hook]:
    """The first backward hook of each module that has one."""
    found: dict[str, Hook] = {}
    for hook in backward_hooks(model):
        found.setdefault(hook.where, hook)
    return found


def parameter_hooks(model: nn.Module) -> list[Hook]:
    """The hooks on a model's parameters."""
    return hooks_on(dict(model.named_parameters()))


def hooks_on(parameters: Mapping[str, nn.Parameter]) -> list[Hook]:
    """The hooks on some parameters, given by name."""
    return [
        Hook(name, kind, function)
        for name, parameter in parameters.items()
        for attribute, kind in ON_PARAMETERS.items()
        for function in (getattr(parameter, attribute, None) or {}).values()
    ]


def register(hooks: Sequence[Hook], parameters: Mapping[str, nn.Parameter]) -> None:
    """Register hooks on parameters, given by name; those of others are left out."""
    for hook in hooks:
        if hook.where in parameters:
            getattr(parameters[hook.where], hook.kind)(hook.function)


def _hooks(module: nn.Module, kinds: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """The user's hooks on a module: strategies have hooks of their own on a rank's modules."""
    for attribute, kind in kinds.items():
        for function in getattr(module, attribute).values():
            if not _is_ours(function):
                yield kind, function


def _is_ours(function: Any) -> bool:
    function = function.func if isinstance(function, partial) else function
    home = getattr(function, "__module__", None) or type(function).__module__
    return str(home).startswith("mpkit.")
