"""ModuleWrapper: a module around the user's, with its signature, its attributes and its names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

__all__ = ["HeldParameters", "ModuleWrapper", "checked_prove"]


class ModuleWrapper(nn.Module):
    """A module that calls another, and is taken for it: attributes, names and signature are those of `module`.

    Args:
        module: the user's module.
    """

    module: nn.Module

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.training = module.training  # train() would change the modules within, too
        inner = module.forward

        @wraps(inner)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self.run(*args, **kwargs)

        self.forward = forward

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Call the user's module."""
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set the user's module's attribute, where it is that which would be read."""
        own = name.startswith("_") or name in vars(self) or hasattr(type(self), name)
        if own or "module" not in self._modules or not hasattr(self._modules["module"], name):
            super().__setattr__(name, value)
        else:
            setattr(self._modules["module"], name, value)

    # ---- names ----------------------------------------------------------------------------------------------

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters by the names that they have in the user's module, in its order."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers by the names that they have in the user's module."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def get_submodule(self, target: str) -> nn.Module:
        """Return a module within the user's, by its name there."""
        return self.module.get_submodule(target)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of the user's module, by its own names."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load the state of the user's module, by its own names.

        Raises:
            ValueError: `assign` is set, which would replace the parameters that are wrapped.
        """
        if assign:
            raise ValueError(
                "load_state_dict(assign=True) replaces the parameters, and it is those that are wrapped: leave "
                "assign=False, or load the state before the module is wrapped"
            )
        return self.module.load_state_dict(state_dict, strict=strict)

    # ---- what would break the wrapping ----------------------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Refuse to move or cast what is wrapped; `.to` of the device and dtype that it has does nothing."""
        with torch.no_grad():
            for name, tensor in (*self.named_parameters(), *self.named_buffers()):
                new = fn(tensor.detach())
                if new.device != tensor.device or new.dtype != tensor.dtype:
                    raise ValueError(
                        f"{name} is on {tensor.device} in {tensor.dtype}, and was to be moved to {new.device} or cast "
                        f"to {new.dtype}. A wrapped module stays as it is, since its gradients have their place in "
                        "buckets and shards: module.to(...) comes before it is wrapped."
                    )
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ValueError(
            f"{type(self).__name__} cannot be copied or pickled, since it belongs to this rank's process group. Its "
            "weights can: state_dict(), and load_state_dict() of the model without a wrapper."
        )


class HeldParameters:
    """The parameters of a module as they were when it was wrapped.

    Args:
        module: the module.
        wrapper: the wrapper's call, for errors: "mk.ddp".
        allows_unused: whether a parameter may get no gradient, and so may be frozen while others train.
    """

    def __init__(self, module: nn.Module, wrapper: str, *, allows_unused: bool) -> None:
        self._module, self._wrapper, self._allows_unused = module, wrapper, allows_unused
        self._then = self._now()
        self._parameters = dict(self._parameters_by_name())
        self._trained = {name for name, parameter in self._parameters.items() if parameter.requires_grad}

    def _now(self) -> list[tuple[int, bool]]:
        every = (p for module in self._module.modules() for p in module._parameters.values() if p is not None)
        return [(id(parameter), parameter.requires_grad) for parameter in every]

    def _parameters_by_name(self) -> dict[str, nn.Parameter]:
        return dict(self._module.named_parameters(remove_duplicate=False))

    def check(self) -> None:
        """Check that they are still those, and that those are frozen that were.

        Raises:
            ValueError: one was added, removed, exchanged, unfrozen, or frozen while others train.
        """
        if self._now() == self._then:
            return
        named, then = self._parameters_by_name(), self._parameters
        for name in (*named, *then):
            if named.get(name) is not then.get(name):
                did = "added" if name not in then else "removed" if name not in named else "exchanged"
                raise ValueError(
                    f"{name} was {did} after {self._wrapper} had wrapped the module, and gradients are synchronized of "
                    f"the parameters that it had: change the module first, then model = {self._wrapper}(module)"
                )
        trained = {name for name, parameter in named.items() if parameter.requires_grad}
        unused = "find_unused_parameters=True"
        if late := sorted(trained - self._trained):
            within = f", with {unused}," if self._wrapper == "mk.ddp" else ""
            raise ValueError(
                f"{late[0]} was frozen when {self._wrapper} wrapped the module, and trains now: its gradient would not "
                f"be synchronized. Wrap the module while it trains{within} and then freeze it until it is to train"
            )
        frozen = sorted(self._trained - trained)
        if frozen and trained and not self._allows_unused:
            raise ValueError(
                f"{frozen[0]} was frozen after {self._wrapper} had wrapped the module, and the ranks wait for its "
                f"gradient: {self._wrapper}(module, {unused}) allows that, or freeze it first"
            )


def checked_prove(wrapper: str, prove: Any, option: str = "prove") -> int:
    """Return the number of steps to prove.

    Raises:
        ValueError: it is no number of steps.
    """
    if isinstance(prove, bool) or not isinstance(prove, int) or prove < 0:
        raise ValueError(
            f"{wrapper}({option}={prove!r}): {option} is the number of steps, from the first on, that are compared "
            f"with plain PyTorch: {wrapper}(module, ..., {option}=2); 0 compares none"
        )
    return prove
