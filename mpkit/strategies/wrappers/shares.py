"""Shares: the parameters that a sharded module shows to its user, one per parameter of the module.

A share is what this rank's optimizer updates: its elements of a parameter, (k, 1, ...) in as many dimensions as that
has, by which optimizer groups are often made; or the whole parameter where that is not sharded. It lies in the same
memory as the rank's piece, or is its fp32 master copy where the module computes in 16 bits. While the module computes,
its own parameters are in their places; at any other time the shares are.

    show, hide   the shares take the places of the parameters, and give them back
    take         gradients of a backward are added to `share.grad`, as the mean over replicas
    give         what the optimizer changed is copied into the pieces, where those are in 16 bits
    full         whole tensors, gathered from the shares of all ranks; `load` does the opposite
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mpkit.strategies.comm.communicator import Communicator
from mpkit.strategies.stage.gradient_sync import Piece
from mpkit.strategies.update.master_weights import Masters
from mpkit.strategies.wrappers.divided_optimizer import mark_divided
from mpkit.strategies.wrappers.gradient_part import mark_part
from mpkit.strategies.zero.flat import FlatLayout
from mpkit.trace.record.ledger import Ledger

__all__ = ["ShardedParameters"]


def _refuse_gradient(name: str, _gradient: Tensor) -> None:
    """Refuse a gradient that autograd makes for a share itself, which the module's forward does not use."""
    raise ValueError(
        f"The loss depends on {name} outside of the wrapped module's forward, where it is this rank's share: the "
        "gradient would be this rank's own. Let forward compute that too (a penalty on weights, a layer that is called "
        "by itself); an optimizer's weight_decay is a penalty as well"
    )


class ParameterPlace(NamedTuple):
    """Where a parameter is in the module."""

    module: nn.Module
    key: str
    parameter: nn.Parameter
    share: nn.Parameter


class ShardedParameters:
    """The shares of one module.

    Args:
        module: the module, whose parameters are pieces of what strategies hold.
        pieces: this rank's pieces, frozen ones too.
        sharded: of these, the pieces in each flat tensor.
        masters: copies in 32 bits, if there are any.
        shard_group: the ranks that hold the other pieces.
        ledger: counts gradients.
    """

    def __init__(
        self,
        module: nn.Module,
        pieces: Iterable[Piece],
        sharded: Mapping[FlatLayout, list[Piece]],
        masters: Masters,
        shard_group: Communicator,
        ledger: Ledger,
    ) -> None:
        self._sharded, self._shard_group, self._ledger = sharded, shard_group, ledger
        self._masters = masters
        self._apart = {
            piece for parts in sharded.values() for piece in parts
        }  # of which other ranks have the rest
        self.of = {piece: self._share(piece) for piece in pieces}
        for piece, share in self.of.items():
            share.is_share = True  # type: ignore[attr-defined]
            for name, value in vars(piece.parameter).items():  # marks, by which groups are made
                if name != "_gather":
                    setattr(share, name, value)
            if piece in self._apart:
                mark_divided(share, "elements", "mk.fully_shard")
            if share.requires_grad:
                share.register_hook(partial(_refuse_gradient, piece.name))
        by_parameter = {piece.parameter: share for piece, share in self.of.items()}
        self._places = [
            ParameterPlace(inner, key, parameter, by_parameter[parameter])
            for inner in module.modules()
            for key, parameter in inner._parameters.items()
            if parameter is not None
        ]
        self.device = next(iter(self.of.values())).device
        self._hidden = 0
        self._versions = self._now()
        self.show()

    def _share(self, piece: Piece) -> nn.Parameter:
        if self._masters.copies and piece.parameter.is_floating_point():
            held = self._masters.master_of(piece).detach()
        else:
            held = piece.held.detach()
        if piece in self._apart:
            held = held.view(-1, *[1] * (len(piece.shape) - 1))
        return nn.Parameter(held, piece.parameter.requires_grad)

    # ---- show, hide

    def show(self) -> None:
        """Put the shares where the module's parameters are, after as many calls as there were of `hide`."""
        self._hidden = max(self._hidden - 1, 0)
        if not self._hidden:
            for place in self._places:
                place.module._parameters[place.key] = place.share

    def hide(self) -> None:
        """Put the module's own parameters in their places."""
        self._hidden += 1
        if self._hidden == 1:
            for place in self._places:
                place.module._parameters[place.key] = place.parameter

    @property
    def is_hidden(self) -> bool:
        """Whether the module's own parameters are in their places."""
        return self._hidden > 0

    def freeze(self) -> None:
        """Let the parameters train whose shares do."""
        for piece, share in self.of.items():
            if piece.parameter.requires_grad != share.requires_grad:
                piece.parameter.requires_grad_(share.requires_grad)

    # ---- take

    @torch.no_grad()
    def take(self, divisor: float) -> None:
        """Add the gradients of the pieces, divided by a number, to those of the shares."""
        for piece, share in self.of.items():
            if piece.held.grad is None:
                continue
            new = piece.held.grad.to(share.dtype, copy=True).div_(divisor).view_as(share)
            if share.grad is None:
                self._ledger.track(new, "grads")
                share.grad = mark_part(new) if piece in self._apart else new
            else:
                share.grad.add_(new)

    def drop_gradients(self) -> None:
        """Drop the gradients of all shares."""
        for share in self.of.values():
            share.grad = None

    # ---- give

    def _now(self) -> list[int]:
        return [share._version for share in self.of.values()]

    @property
    def is_changed(self) -> bool:
        """Whether a share has changed since the last `give`."""
        return self._now() != self._versions

    @torch.no_grad()
    def give(self) -> None:
        """Copy the shares into the pieces, where they are not in the same memory."""
        for piece, share in self.of.items():
            if share.data_ptr() != piece.held.data_ptr() or share.dtype != piece.held.dtype:
                piece.held.copy_(share.view_as(piece.held))
        self._versions = self._now()

    # ---- full

    @torch.no_grad()
    def full(self, values: Mapping[Piece, Tensor]) -> dict[str, Tensor]:
        """Return whole tensors by name, from a tensor per piece that is like its share; every rank calls it."""
        whole = {
            piece.name: value.detach().clone() for piece, value in values.items() if piece not in self._apart
        }
        for layout, pieces in self._sharded.items():
            here = [piece for piece in pieces if piece in values]
            if not here:
                continue
            first = values[here[0]]
            shard = torch.zeros(layout.k, dtype=first.dtype, device=first.device)
            for part, piece in zip(layout.parts(shard), pieces, strict=True):
                part.copy_(values[piece].reshape(-1))
            gathered = self._shard_group.all_gather(shard)
            for view, piece in zip(layout.views(gathered), pieces, strict=True):
                whole[piece.name] = view.clone()
        return whole

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take this rank's parts of whole tensors; pieces whose name is missing stay."""
        for piece, share in self.of.items():
            if piece.name in state:
                part = state[piece.name].reshape(-1)[piece.start : piece.end]
                share.copy_(part.view(share.shape))
