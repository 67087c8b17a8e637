"""Hooks: functions that are called around a module's forward and backward, or when a parameter's gradient is ready.

A module is *bare* if calling it only calls its forward; then the forward may be run without calling the module.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import nn

AROUND_FORWARD = {"_forward_pre_hooks": "forward pre-hook", "_forward_hooks": "forward hook"}
AROUND_BACKWARD = {"_backward_pre_hooks": "full backward pre-hook", "_backward_hooks": "full backward hook"}
ON_PARAMETERS = {
    "_backward_hooks": "register_hook",
    "_post_accumulate_grad_hooks": "register_post_accumulate_grad_hook",
}


class Hook(NamedTuple):
    """A function that is called around a module's forward or backward, or on a parameter's gradient."""

    where: str  # the module's or parameter's name in the model
    kind: str  # the kind of hook in PyTorch's terms; for a parameter, the method that registers it
    function: Any

    def __str__(self) -> str:
        name, where = hook_name(self.function), self.where or "the model"
        if self.kind.startswith("register_"):
            return f"the hook {name} on the parameter {where} ({self.kind})"
        return f"the {self.kind} {name} of {where}"


def hook_name(function: Any) -> str:
    """Return the name of a hook.

    >>> hook_name(len), hook_name(lambda: None)
    ('len', '<lambda>')
    """
    function = function.func if isinstance(function, partial) else function
    name = getattr(function, "__qualname__", None) or type(function).__name__
    return str(name).rpartition("<locals>.")[2]


def is_bare(module: nn.Module) -> bool:
    """Return whether calling a module only calls its class's forward.

    >>> layer, hooked = nn.ReLU(), nn.ReLU()
    >>> _ = hooked.register_forward_hook(print)
    >>> is_bare(layer), is_bare(hooked)
    (True, False)
    """
    return describe_wrappers(module) is None


def describe_wrappers(module: nn.Module, where: str = "") -> str | None:
    """Describe what runs around the forward of a module's class; None if nothing does."""
    if type(module).__call__ is not nn.Module.__call__:
        return f"the __call__ of {where or 'the model'} ({type(module).__name__})"
    forward = vars(module).get("forward")
    if forward is not None and not is_ours(forward):
        return f"the forward that was put in the place of {where or 'the model'}'s ({hook_name(forward)})"
    hooks = (str(Hook(where, *hook)) for hook in _hooks(module, AROUND_FORWARD | AROUND_BACKWARD))
    return next(hooks, None)


def backward_hooks(model: nn.Module) -> list[Hook]:
    """List the hooks around the backward of a model's modules."""
    return [
        Hook(name, kind, function)
        for name, module in model.named_modules()
        for kind, function in _hooks(module, AROUND_BACKWARD)
    ]


def parameter_hooks(model: nn.Module) -> list[Hook]:
    """List the hooks on a model's parameters."""
    return hooks_on(dict(model.named_parameters()))


def hooks_on(parameters: Mapping[str, nn.Parameter]) -> list[Hook]:
    """List the hooks on named parameters."""
    return [
        Hook(name, kind, function)
        for name, parameter in parameters.items()
        for attribute, kind in ON_PARAMETERS.items()
        for function in (getattr(parameter, attribute, None) or {}).values()
    ]


def register(hooks: Sequence[Hook], parameters: Mapping[str, nn.Parameter]) -> None:
    """Register the hooks on these named parameters, and leave out hooks on others."""
    for hook in hooks:
        if hook.where in parameters:
            getattr(parameters[hook.where], hook.kind)(hook.function)


def _hooks(module: nn.Module, kinds: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """Yield the user's hooks on a module, without those that strategies add to a rank's modules."""
    for attribute, kind in kinds.items():
        for function in getattr(module, attribute).values():
            if not is_ours(function):
                yield kind, function


def is_ours(function: Any) -> bool:
    """Return whether a hook is one of mpkit's."""
    function = function.func if isinstance(function, partial) else function
    home = getattr(function, "__module__", None) or type(function).__module__
    return str(home).startswith("mpkit.")
