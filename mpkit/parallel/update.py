"""The update of a step: from gradients of the whole batch to new weights.

    rate        the learning rate of this step, where it changes from step to step
    sum         gradients that are partial sums over tensor-parallel ranks (sequence parallelism)
    unscale     undo the loss scale; a gradient that is not finite, on whichever rank, skips the step on all
    count       divide by the count of the batch, where the loss returned (total, count)
    clip        scale all gradients down to the global norm that is allowed
    step        the optimizer, on what this rank updates
    renew       the parameters from what the optimizer changed

In 16 bits, and where the optimizer works on the host, it works on copies of its own (`masters`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mpkit.parallel.axis import MeshAxes
from mpkit.parallel.job import TrainJob
from mpkit.parallel.masters import Masters
from mpkit.parallel.optimizer import Held, Take, Whole, make_optimizer
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
        trained: what `trained_parameters` says of the whole model.

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
        trained: tuple[Sequence[Whole], Mapping[str, str]],
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
        self.optimizer = self._make(job, *trained)
        if self.optimizer is not None:
            watch_optimizer(context.record, self.optimizer, elsewhere=job.plan.offload != "none")

    def _make(
        self, job: TrainJob, whole: Sequence[Whole], first_names: Mapping[str, str]
    ) -> torch.optim.Optimizer | None:
        """Make the user's optimizer of this rank's pieces, grouped as the whole model's."""
        held = {
            first_names[piece.name]: Held(self.masters.of(piece), _taking(piece))
            for piece in self._replica.pieces
        }
        if job.plan.precision != "full":  # masters are wide
            whole = [w._replace(dtype=torch.float32) if w.dtype.is_floating_point else w for w in whole]
        optimizer = make_optimizer(job.optimizer, whole, held)
        if optimizer is not None and self._schedule is not None:
            for group in optimizer.param_groups:
                group["initial_lr"] = group["lr"]
        return optimizer

    def step(self, number: int, factor: float | None = None) -> None:
        """Update from the pieces' gradients.

        Args:
            number: of the step, for the learning rate.
            factor: nominal / count, of a loss that returns (total, count).
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
            finite = self._finite_everywhere(gradients, factor)
            scale = self.scaler.scale
            self.scaler.update(finite)
            if not finite:
                self.skipped += 1
                self.masters.drop_gradients()
                return
            for gradient in gradients.values():
                gradient.div_(scale)
        # ---- count
        if factor is not None:
            for gradient in gradients.values():
                gradient.mul_(factor)
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

    def _finite_everywhere(self, gradients: Mapping[Piece, Tensor], factor: float | None) -> bool:
        mine = (factor is None or isfinite(factor)) and all(
            bool(torch.isfinite(gradient).all()) for gradient in gradients.values()
        )
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


def _taking(piece: Piece) -> Take | None:
    """What makes a tensor like the whole parameter one like the piece; None where the piece is all of it."""
    shape = piece.held.shape
    if piece.shard is None and piece.held is piece.parameter:
        return None

    def take(whole: Tensor) -> Tensor:
        local = whole if piece.shard is None else piece.shard.take(whole)
        return local.reshape(-1)[piece.start : piece.end].view(shape)

    return take
