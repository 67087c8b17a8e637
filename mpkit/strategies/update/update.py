"""The update of a step: from gradients of the whole batch to new weights.

    rate        set the learning rate of this step, if there is a schedule
    sum         complete gradients that are partial sums over tensor-parallel ranks (sequence parallelism)
    unscale     undo the loss scale, which keeps small fp16 gradients from vanishing (Micikevicius et al., "Mixed
                Precision Training", ICLR 2018, section 3.2; growth and backoff as in torch.amp); if a gradient is not
                finite on any rank, all ranks skip the step
    count       divide by the count of the batch, if the loss returned (total, count)
    clip        scale all gradients down to the maximum global norm
    step        run the optimizer on this rank's pieces, or on copies of them: the *masters*
    renew       copy the updated masters into the parameters

Masters are copies in two cases; otherwise they are the pieces themselves.

    16 bits    a weight changes by less than fp16 can represent, so the optimizer keeps fp32 copies (Micikevicius et
               al., section 3.1)
    offload    the optimizer runs on copies on the host (Ren et al., "ZeRO-Offload", ATC 2021, section 4), or on the
               parameters if these are on the host anyway
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mpkit.plan.plan import Plan
from mpkit.strategies.comm.mesh_axes import MeshAxes
from mpkit.strategies.job.job import TrainJob
from mpkit.strategies.replicas.tied import TiedWeights
from mpkit.strategies.stage.gradient_sync import GradientSync, Piece
from mpkit.strategies.stage.stage import PRECISIONS, cast_module
from mpkit.strategies.update.optimizer import AVERAGE, UpdatedPart, WholeParameter, make_optimizer
from mpkit.trace import Kind
from mpkit.trace.record.hooks import watch_optimizer

if TYPE_CHECKING:
    from mpkit.strategies.rank_context import Context


@dataclass
class LossScaler:
    """The loss scale: halved after an overflow, doubled after `growth_interval` steps without one.

    >>> scaler = LossScaler(enabled=True, growth_interval=2)
    >>> scaler.update(finite=False); scaler.scale
    32768.0
    >>> scaler.update(finite=True); scaler.update(finite=True); scaler.scale
    65536.0
    """

    enabled: bool  # if not, the scale stays 1
    scale: float = 2.0**16
    good: int = 0  # steps without an overflow since the scale last changed
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        if not self.enabled:
            self.scale = 1.0

    def update(self, finite: bool) -> None:
        """Adjust the scale after a step."""
        if not self.enabled:
            return
        self.good = self.good + 1 if finite else 0
        if not finite:
            self.scale *= 0.5
        elif self.good == self.growth_interval:
            self.scale, self.good = self.scale * 2.0, 0


class Masters:
    """The parameters that the optimizer updates, one per piece.

    Args:
        fp32_params: whole parameters before they were cast to 16 bits.
    """

    def __init__(
        self, context: Context, plan: Plan, pieces: list[Piece], fp32_params: Mapping[nn.Parameter, Tensor]
    ) -> None:
        self._record, self._device = context.record, context.device
        self._pieces = pieces
        self.narrow = plan.precision != "full"
        self._on_host = plan.offload != "none"
        self._offload = plan.offload == "optimizer"  # otherwise the pieces are on the host already
        self._are_copies = self.narrow or self._offload
        self._of = {piece: self._make(piece, fp32_params) for piece in pieces} if self._are_copies else {}

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
        return self._of.get(piece, piece.held)

    def gradients(self) -> dict[Piece, Tensor]:
        """Give each master its gradient, and return the gradients that exist."""
        if self._are_copies:
            self._copy_gradients()
        gradients = ((piece, self.master_of(piece).grad) for piece in self._pieces)
        return {piece: gradient for piece, gradient in gradients if gradient is not None}

    def _copy_gradients(self) -> None:
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
        for master in self._of.values():
            master.grad = None

    @torch.no_grad()
    def renew(self) -> None:
        """Copy the updated masters back into the pieces, cast if necessary."""
        if not self._are_copies:
            return
        nbytes = sum(piece.held.nbytes for piece in self._pieces)
        op = self._record.begin(Kind.COPY_TO_DEVICE, nbytes=nbytes) if self._offload else -1
        for piece, master in self._of.items():
            piece.held.copy_(master)
            master.grad = None
        self._record.end(op)


def narrow(plan: Plan, held: nn.Module) -> dict[nn.Parameter, Tensor]:
    """Cast a module to 16 bits if the plan says so, and return its parameters from before in fp32."""
    dtype = PRECISIONS.get(plan.precision)
    if dtype is None:
        return {}
    fp32_params = {p: p.detach().to(torch.float32) for p in held.parameters() if p.is_floating_point()}
    for parameter in held.parameters():
        parameter.data = parameter.data.to(dtype) if parameter in fp32_params else parameter.data
    cast_module(held, dtype)  # buffers too
    return fp32_params


class Update:
    """The optimizer for one rank's pieces, and the other phases of an update.

    Args:
        fp32_params: whole parameters before they were cast to 16 bits.
        trained: result of `trained_parameters` for the whole model.
    """

    def __init__(
        self, context: Context, job: TrainJob, axes: MeshAxes, sync: GradientSync, tied: TiedWeights,
        fp32_params: Mapping[nn.Parameter, Tensor],
        trained: tuple[Sequence[WholeParameter], Mapping[str, str]],
    ) -> None:  # fmt: skip
        self._comm, self._device = context.comm, context.device
        self._sync, self._tied = sync, tied
        # The ranks that together update the model: those of one model, and those that share its shards or experts.
        self._together = axes.communicator_of(*job.plan.update_axes)
        self._tp, self._leads = axes.communicator_of("tp"), axes.leads
        # Among them, the first ones that hold the experts, and everything else.
        alike = (("edp",), ("dp_shard", "cp")) if job.plan.mesh.folds else ((), ("ep",))
        self._first_of_experts, self._first_of_rest = (
            sync.divided or axes.communicator_of(*along).index == 0 for along in alike
        )
        self._limit, self._schedule = job.how.max_grad_norm, job.how.lr_schedule
        self.masters = Masters(context, job.plan, sync.pieces, fp32_params)
        self.scaler = LossScaler(enabled=job.plan.precision == "fp16")
        self.skipped = 0  # steps that all ranks skipped because of an overflow
        self.optimizer = self._make(job, *trained)  # None if this rank updates nothing
        if self.optimizer is not None:
            watch_optimizer(context.record, self.optimizer, elsewhere=job.plan.offload != "none")

    def _make(
        self, job: TrainJob, whole: Sequence[WholeParameter], first_names: Mapping[str, str]
    ) -> torch.optim.Optimizer | None:
        """Make the user's optimizer for this rank's pieces, in the whole model's groups."""
        held = {}
        for piece in self._sync.pieces:
            part = None if piece.is_whole else piece.part(piece.held)
            held[first_names[piece.name]] = UpdatedPart(self.masters.master_of(piece), part)
        if job.plan.precision != "full":  # masters are in 32 bits
            whole = [w._replace(dtype=torch.float32) if w.dtype.is_floating_point else w for w in whole]
        optimizer = make_optimizer(job.how.optimizer, whole, held)
        if optimizer is not None and self._schedule is not None:
            for group in optimizer.param_groups:
                group["initial_lr"] = group["lr"]
        return optimizer

    def step(
        self,
        number: int,
        factor: float | None = None,
        look: Callable[[Mapping[Piece, Tensor]], None] = lambda _: None,
    ) -> None:
        """Update the parameters from the pieces' gradients.

        Args:
            factor: nominal / count, for a loss that returns (total, count).
            look: called with the gradients of the whole batch, before they are clipped.
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
        look(gradients)
        # ---- clip
        if self._limit is not None:
            self._clip(gradients, self._limit)
        # ---- step
        if self.optimizer is not None:
            self.optimizer.step()
        self.renew()

    def renew(self) -> None:
        """Bring the model's parameters up to date with the masters; every rank calls it."""
        self.masters.renew()
        self._tied.send_weights()
        self._sync.renew()

    @torch.no_grad()
    def take_average(self) -> None:
        """Replace the weights by their moving average; every rank calls it, after the last step."""
        for piece in self._sync.pieces:
            master = self.masters.master_of(piece)
            state = {} if self.optimizer is None else self.optimizer.state.get(master, {})
            if AVERAGE in state:
                master.copy_(state[AVERAGE])
        self.renew()

    def _sum(self, gradients: list[Tensor]) -> None:
        """Sum gradients over the tensor-parallel ranks, in one message per dtype."""
        if self._tp.size == 1 or not gradients:
            return
        for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
            those = [gradient for gradient in gradients if gradient.dtype == dtype]
            flat = torch.cat([gradient.reshape(-1) for gradient in those]).to(self._device)
            parts = self._tp.all_reduce(flat).split([gradient.numel() for gradient in those])
            for gradient, part in zip(those, parts, strict=True):
                gradient.copy_(part.view_as(gradient))

    def _finite_everywhere(self, gradients: Mapping[Piece, Tensor], factor: float | None) -> bool:
        # With its factor a gradient is that of the mean, which serial training has to represent.
        whole = (g if factor is None else (g * factor).to(torch.float16) for g in gradients.values())
        mine = (factor is None or isfinite(factor)) and all(bool(torch.isfinite(g).all()) for g in whole)
        flag = torch.tensor([0.0 if mine else 1.0], device=self._device)
        return self._comm.all_reduce(flag, op="max").item() == 0.0

    def _clip(self, gradients: Mapping[Piece, Tensor], limit: float) -> None:
        """Clip by global norm (Pascanu et al. 2013): multiply all gradients by min(1, limit / their joint norm).

        As in torch.nn.utils.clip_grad_norm_, 1e-6 is added to the norm. Replicated gradients count on the first of
        their ranks only.
        """
        square = torch.zeros(1, dtype=torch.float64, device=self._device)
        for piece, gradient in gradients.items():
            first = self._first_of_experts if piece.axis == "ep" else self._first_of_rest
            if first and self._leads(but=piece.axis):
                square += gradient.abs().to(torch.float64).square().sum().to(self._device)
        self._together.all_reduce(square)
        norm = square.sqrt().item()
        factor = limit / (norm + 1e-6)
        if isfinite(norm) and factor < 1.0:
            for gradient in gradients.values():
                gradient.mul_(factor)
