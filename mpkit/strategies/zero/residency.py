"""Which flat tensors of parameters are whole at the moment: gather, wait, free.

A `ShardedParameter` is one that ZeRO stage 3 has not gathered, because no layer needs it at the moment.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from mpkit.common.torch_private import DisableTorchFunctionSubclass, tree_leaves
from mpkit.errors import MpkitError
from mpkit.strategies.comm.process_group import PendingWork
from mpkit.strategies.zero.flat import Flat

__all__ = ["ShardedParameter", "WholeParameters", "on_demand", "veil"]


# What may be called on a parameter without reading its values.
METHODS = {
    "untyped_storage", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "numel", "nelement",
    "dim", "ndimension", "size", "stride", "element_size", "is_floating_point", "is_complex", "__len__", "backward",
}  # fmt: skip
NUMBERS = {"data", "T", "mT", "H", "mH", "real", "imag"}


class ShardedParameter(nn.Parameter):
    """A parameter while it is not gathered: it knows its shape, and is gathered when its values are read.

    It can be gathered only while a model computes. At any other time reading it is an error: the memory that would be
    read does not exist, so reading it would kill the process.
    """

    _gather: Callable[[nn.Parameter], bool]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a function that needs no values; for any other, gather the parameters first."""
        kwargs = kwargs or {}
        name = func.__name__
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        is_harmless = attribute not in NUMBERS if name in ("__get__", "__set__") else name in METHODS
        sharded = [] if is_harmless else [arg for arg in tree_leaves((args, kwargs)) if isinstance(arg, cls)]
        # One by one: gathering the parameter before may have made this one whole.
        if name != "__set__" and all(arg.__class__ is not cls or arg._gather(arg) for arg in sharded):
            is_harmless = True
        if is_harmless:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        of_shape = f" of shape {list(sharded[0].shape)}" if sharded else ""
        raise MpkitError(
            f"{name} of a parameter{of_shape} that is sharded: each rank holds a part of it, and it is whole only "
            "while its layer computes. Look at it inside `with replica.gathered():`, which all ranks enter."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<parameter of shape {list(self.shape)}, sharded; whole inside `with replica.gathered():`>"


def on_demand(parameter: nn.Parameter, gather: Callable[[nn.Parameter], bool]) -> None:
    """Set the function that gathers the parameter where it is used; it returns False where that is not possible."""
    parameter._gather = gather  # type: ignore[attr-defined]


def veil(parameters: Iterable[nn.Parameter], *, sharded: bool) -> None:
    """Make parameters sharded ones, or plain ones again. Instances of a user's own subclasses stay as they are."""
    now, then = (nn.Parameter, ShardedParameter) if sharded else (ShardedParameter, nn.Parameter)
    for parameter in parameters:
        if parameter.__class__ is now:
            parameter.__class__ = then


class WholeParameters:
    """The parameters that are whole, or are being gathered. At first none are.

    Args:
        flats: flat tensors of parameters, with the shards filled.
        demand: gathers a parameter that is used while it is not whole; returns False where that is not possible.
    """

    def __init__(self, flats: list[Flat], demand: Callable[[nn.Parameter], bool]) -> None:
        self._versions: dict[Flat, list[int]] = {}
        self._whole: dict[Flat, PendingWork | None] = {}  # whole (None), or with the pending all-gather
        for flat in flats:
            flat.free()
            for parameter in flat.layout.parameters:
                on_demand(parameter, demand)
            veil(flat.layout.parameters, sharded=True)

    @torch.no_grad()
    def gather(self, flats: Iterable[Flat], soon: Iterable[Flat] = ()) -> None:
        """Make these flat tensors whole, and start gathering those that are needed soon."""
        flats = list(flats)
        for flat in (*flats, *soon):
            self._start(flat)
        for flat in flats:
            self._wait(flat)

    def _start(self, flat: Flat) -> None:
        if flat not in self._whole:
            flat.allocate()
            with flat.shard_group.wire.sending_for(flat.layer, flat.names):
                self._whole[flat] = flat.start_all_gather()

    def _wait(self, flat: Flat) -> None:
        work = self._whole[flat]
        if work is not None:
            work.wait()
            self._whole[flat] = None
            self._versions[flat] = [parameter._version for parameter in flat.layout.parameters]
            veil(flat.layout.parameters, sharded=False)

    def free_all_but(self, kept: Collection[Flat], *, changed: bool = False) -> None:
        """Free all flat tensors but these.

        Args:
            kept: those that stay whole.
            changed: whether the others may have been written into, which is lost.

        Raises:
            MpkitError: one was written into.
        """
        for flat in [flat for flat in self._whole if flat not in kept]:
            self._wait(flat)
            for parameter, version in zip(flat.layout.parameters, self._versions.pop(flat), strict=True):
                if parameter._version != version and not changed:
                    raise MpkitError(
                        f"The model's forward writes into a parameter, of shape {list(parameter.shape)}, and under "
                        "zero=3 that is lost: it is whole only while its layer computes. Change parameters between "
                        "steps, or take zero=2, which keeps them whole"
                    )
            veil(flat.layout.parameters, sharded=True)
            flat.free()
            del self._whole[flat]
