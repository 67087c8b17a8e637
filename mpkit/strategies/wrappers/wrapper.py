"""ModuleWrapper: a module around the user's, with its signature, its attributes and its names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

__all__ = ["ModuleWrapper"]


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
