"""The update of a step: from gradients of the whole batch to new weights.

    rate        the learning rate of this step, where it changes from step to step
    sum         gradients that are partial sums over tensor-parallel ranks (sequence parallelism)
    unscale     undo the loss scale; a gradient that is not finite, on whichever rank, skips the step on all
    clip        scale all gradients down to the global norm that is allowed
    step        the optimizer, on what this rank updates
    renew       the parameters from what the optimizer changed

In 16 bits, and where the optimizer works on the host, it works on copies of its own (`masters`).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mpkit.parallel.axis import MeshAxes
from mpkit.parallel.job import TrainJob
from mpkit.parallel.masters import Masters
from mpkit.parallel.replica import Piece, Replica
from mpkit.parallel.scaler import LossScaler
from mpkit.record.hooks import watch_optimizer

if TYPE_CHECKING:
    from mpkit.launch.context import Context

__all__ = ["Update"]


class Update:
    """The optimizer of what one rank updates, and what goes around it.

    Args:
        context: of this rank.
        job: its optimizer, plan, max_grad_norm and lr_schedule.
        axes: of the mesh.
        replica: whose pieces are updated.
        wide: parameters as they were before they were cast to 16 bits, whole.

    Attributes:
        optimizer: None if this rank updates nothing.
        scaler: of the loss; its scale is 1 unless the plan computes in fp16.
        norm: of the gradients of the last step, before they were clipped; None if nobody asked.
        skipped: steps that an overflow made everybody skip.
    """

    def __init__(
        self,
        context: Context,
        job: TrainJob,
        axes: MeshAxes,
        replica: Replica,
        wide: Mapping[nn.Parameter, Tensor],
    ) -> None:
        self._comm, self._device = context.comm, context.device
        self._replica = replica
        # Who together updates each element of the model once: the ranks of one model, of all if replicas divide it.
        self._together = axes.of("pp", "tp", *(("dp", "cp") if replica.divided else ()))
        self._tp, self._first_of_tp = axes.of("tp"), axes.place.tp == 0
        self._limit, self._schedule = job.max_grad_norm, job.lr_schedule
        self.masters = Masters(context, job.plan, replica.pieces, wide)
        self.scaler = LossScaler(enabled=job.plan.precision == "fp16")
        self.norm: float | None = None
        self.skipped = 0
        self.optimizer = self._make(job)
        if self.optimizer is not None:
            watch_optimizer(context.record, self.optimizer, elsewhere=job.plan.offload != "none")

    def _make(self, job: TrainJob) -> torch.optim.Optimizer | None:
        """The user's optimizer: made of whole parameters, so that it can group them by shape, then given the parts."""
        pieces = self._replica.pieces
        if not pieces:
            return None
        held = [self.masters.of(piece) for piece in pieces]
        whole = [_stand_in(part, piece.shape) for part, piece in zip(held, pieces, strict=True)]
        parts = {id(p): (part, piece) for p, part, piece in zip(whole, held, pieces, strict=True)}
        optimizer = job.optimizer(whole)
        for stand_in, state in list(
            optimizer.state.items()
        ):  # that there is before the first step: Adagrad's
            del optimizer.state[stand_in]
            part, piece = parts[id(stand_in)]
            optimizer.state[part] = {
                name: value if name == "step" else _part(value, part, piece) for name, value in state.items()
            }
        for group in optimizer.param_groups:
            group["params"] = [parts[id(p)][0] for p in group["params"] if parts[id(p)][0].numel()]
            group["initial_lr"] = group["lr"]
        optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
        return optimizer if optimizer.param_groups else None

    def step(self, number: int) -> None:
        """Update from the pieces' gradients.

        Args:
            number: of the step, for the learning rate.
        """
        # ---- rate
        if self.optimizer is not None and self._schedule is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = group["initial_lr"] * self._schedule(number)
        # ---- sum
        gradients = self.masters.gradients()
        self._sum([gradient for piece, gradient in gradients.items() if piece.partial])
        # ---- unscale
        if self.scaler.enabled:
            finite = self._finite_everywhere(gradients)
            scale = self.scaler.scale
            self.scaler.update(finite)
            if not finite:
                self.skipped += 1
                self.masters.drop_gradients()
                return
            for gradient in gradients.values():
                gradient.div_(scale)
        # ---- clip
        if self._limit is not None:
            self._clip(gradients, self._limit)
        # ---- step
        if self.optimizer is not None:
            self.optimizer.step()
        # ---- renew
        self.masters.renew()
        self._replica.updated()

    def _sum(self, gradients: list[Tensor]) -> None:
        """Over the tensor-parallel ranks, in one message a dtype."""
        if self._tp.size == 1 or not gradients:
            return
        for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
            those = [gradient for gradient in gradients if gradient.dtype == dtype]
            flat = torch.cat([gradient.reshape(-1) for gradient in those]).to(self._device)
            parts = self._tp.all_reduce(flat).split([gradient.numel() for gradient in those])
            for gradient, part in zip(those, parts, strict=True):
                gradient.copy_(part.view_as(gradient))

    def _finite_everywhere(self, gradients: Mapping[Piece, Tensor]) -> bool:
        mine = all(bool(torch.isfinite(gradient).all()) for gradient in gradients.values())
        flag = torch.tensor([0.0 if mine else 1.0], device=self._device)
        return self._comm.all_reduce(flag, op="max").item() == 0.0

    def _clip(self, gradients: Mapping[Piece, Tensor], limit: float) -> None:
        """Global norm clipping (Pascanu et al. 2013): all gradients times min(1, limit / their norm together).

        With the 1e-6 that torch.nn.utils.clip_grad_norm_ adds to the norm. What all tensor-parallel ranks hold alike
        counts on the first of them.
        """
        square = torch.zeros(1, dtype=torch.float64, device=self._device)
        for piece, gradient in gradients.items():
            if piece.shard is not None or self._first_of_tp:
                square += gradient.to(torch.float64).square().sum().to(self._device)
        self._together.all_reduce(square)
        self.norm = square.sqrt().item()
        factor = limit / (self.norm + 1e-6)
        if isfinite(self.norm) and factor < 1.0:
            for gradient in gradients.values():
                gradient.mul_(factor)


def _stand_in(part: Tensor, shape: torch.Size) -> nn.Parameter:
    """Like the whole parameter, and takes no memory: all its elements are the same zero."""
    return nn.Parameter(torch.zeros((), dtype=part.dtype, device=part.device).expand(shape))


def _part(value: Any, part: Tensor, piece: Piece) -> Any:
    """Of a state that is like the whole parameter this rank's part."""
    if not isinstance(value, Tensor) or value.shape != piece.shape:
        return value
    return value.reshape(-1)[piece.start : piece.end].clone().view(part.shape)
