"""Which flat tensors of parameters are whole at the moment: gather, wait, free."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import torch
from torch import nn

from mpkit.errors import MpkitError
from mpkit.strategies.comm.process_group import PendingWork
from mpkit.strategies.zero.flat import Flat
from mpkit.strategies.zero.sharded_parameter import on_demand, veil

__all__ = ["WholeParameters"]


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
