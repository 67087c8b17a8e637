"""Masters: the copies that an optimizer updates where it cannot update the parameters themselves.

    16 bits    a weight changes by less than fp16 can represent: the optimizer keeps fp32 copies (Micikevicius et al.,
               "Mixed Precision Training", ICLR 2018, section 3.1)
    offload    the optimizer runs on the host, on copies there (Ren et al., "ZeRO-Offload", ATC 2021, section 4); where
               the parameters are on the host anyway, on the parameters

In a step, gradients are copied to the masters (`gradients`), the optimizer steps, and the masters are copied back
(`renew`). Where neither copy is needed, the masters are the pieces themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mpkit.plan.plan import Plan
from mpkit.strategies.stage.gradient_sync import Piece
from mpkit.strategies.stage.stage import PRECISIONS, cast_module
from mpkit.trace import Kind

if TYPE_CHECKING:
    from mpkit.strategies.rank_context import Context


class Masters:
    """The parameters that the optimizer is given, one per piece.

    Args:
        fp32_params: whole parameters before they were cast to 16 bits.

    Attributes:
        narrow: whether the model computes in 16 bits.
        copies: whether the masters are copies, rather than the pieces themselves.
    """

    def __init__(
        self, context: Context, plan: Plan, pieces: list[Piece], fp32_params: Mapping[nn.Parameter, Tensor]
    ) -> None:
        self._record, self._device = context.record, context.device
        self._pieces = pieces
        self.narrow = plan.precision != "full"
        self._on_host = plan.offload != "none"
        self._offload = plan.offload == "optimizer"  # otherwise the pieces are on the host already
        self.copies = self.narrow or self._offload
        self._of = {piece: self._make(piece, fp32_params) for piece in pieces} if self.copies else {}

    def _make(self, piece: Piece, fp32_params: Mapping[nn.Parameter, Tensor]) -> nn.Parameter:
        source = piece.held.detach()
        if piece.parameter in fp32_params:
            whole = fp32_params[piece.parameter].reshape(-1)[piece.start : piece.end]
            source = whole.view(piece.held.shape)
        copy = source.to("cpu" if self._on_host else self._device, copy=True)
        if not self._on_host:
            self._record.ledger.track(copy, "optimizer")
        return nn.Parameter(copy)

    def master_of(self, piece: Piece) -> nn.Parameter:
        """Return the parameter that the optimizer updates in place of the piece."""
        return self._of[piece] if self.copies else piece.held

    def gradients(self) -> dict[Piece, Tensor]:
        """Give each master its gradient, and return the gradients that exist."""
        if self.copies:
            self._bring_gradients()
        gradients = ((piece, self.master_of(piece).grad) for piece in self._pieces)
        return {piece: gradient for piece, gradient in gradients if gradient is not None}

    def _bring_gradients(self) -> None:
        nbytes = sum(piece.held.grad.nbytes for piece in self._pieces if piece.held.grad is not None)
        op = self._record.begin(Kind.COPY_TO_HOST, nbytes=nbytes) if self._offload else -1
        for piece, master in self._of.items():
            gradient = piece.held.grad
            master.grad = None if gradient is None else gradient.to(master.device, master.dtype, copy=True)
            if master.grad is not None and not self._on_host:
                self._record.ledger.track(master.grad, "buffers")
        self._record.end(op)

    def drop_gradients(self) -> None:
        """Drop the masters' gradients, since the step is skipped."""
        if self.copies:
            for master in self._of.values():
                master.grad = None

    @torch.no_grad()
    def renew(self) -> None:
        """Copy the updated masters back into the pieces, cast if necessary."""
        if not self.copies:
            return
        nbytes = sum(piece.held.nbytes for piece in self._pieces)
        op = self._record.begin(Kind.COPY_TO_DEVICE, nbytes=nbytes) if self._offload else -1
        for piece, master in self._of.items():
            piece.held.copy_(master)
            master.grad = None
        self._record.end(op)


def narrow(plan: Plan, held: nn.Module) -> dict[nn.Parameter, Tensor]:
    """Cast a module to 16 bits, if the plan says so; return the fp32 parameters from before."""
    dtype = PRECISIONS.get(plan.precision)
    if dtype is None:
        return {}
    fp32_params = {p: p.detach().to(torch.float32) for p in held.parameters() if p.is_floating_point()}
    for parameter in held.parameters():
        parameter.data = parameter.data.to(dtype) if parameter in fp32_params else parameter.data
    cast_module(held, dtype)  # buffers too
    return fp32_params
