"""BatchNorm with statistics over the whole batch, as if the batch were not divided among ranks.

    forward     all-gathers the count, mean and sum of squared deviations of each rank
    backward    all-reduces the sums of dy and of dy x^ over the samples of each rank

Sources: Ioffe & Szegedy, "Batch Normalization", 2015, Algorithm 1 and section 3 for the backward; Chan, Golub &
LeVeque 1979 for combining the ranks' variances. torch.nn.SyncBatchNorm does the same, on GPUs only.

Symbols: x of shape (samples, channels, ...); N values per channel over all ranks, n of them on this one; mu and var
over all N values; x^ = (x - mu) / sqrt(var + eps); y = gamma x^ + beta.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mpkit.common.torch_private import FakeTensor, _BatchNorm, _get_dispatch_mode, _TorchDispatchModeKey
from mpkit.strategies.comm.communicator import Communicator

if TYPE_CHECKING:
    from mpkit.strategies.rank_context import Context


def over_whole_batch(module: nn.Module, comm: Communicator) -> None:
    """Let every BatchNorm in a module, which stays the same object, take its statistics over all ranks' samples."""
    for norm in batch_norms(module).values():
        # Another may compute anything.
        if type(norm).forward in (
            _BatchNorm.forward,
            nn.SyncBatchNorm.forward,
        ):
            norm.forward = partial(_forward, norm, comm)  # type: ignore[method-assign]


def batch_norms(module: nn.Module) -> dict[str, _BatchNorm]:
    """Return, by name, the BatchNorms in a module that take statistics of a batch."""
    return {
        name: norm
        for name, norm in module.named_modules()
        if isinstance(norm, _BatchNorm) and (norm.training or norm.running_mean is None)
    }


def _forward(norm: _BatchNorm, comm: Communicator, x: Tensor) -> Tensor:
    if not norm.training and norm.running_mean is not None:  # the model itself switched it to evaluation
        return type(norm).forward(norm, x)
    norm._check_input_dim(x)
    y, mu, var, total = _Normalize.apply(x, norm.weight, norm.bias, norm.eps, comm)  # type: ignore[no-untyped-call]
    if norm.training and norm.track_running_stats and norm.running_mean is not None:
        _track(norm, mu, var, total)
    return y  # type: ignore[no-any-return]


@torch.no_grad()
def _track(norm: _BatchNorm, mu: Tensor, var: Tensor, total: Tensor) -> None:
    """Move the running statistics towards the batch's; the running variance is unbiased."""
    assert norm.running_mean is not None and norm.running_var is not None
    assert norm.num_batches_tracked is not None
    norm.num_batches_tracked.add_(1)
    # Without a momentum, average over all batches so far.
    momentum = norm.momentum if norm.momentum is not None else 1.0 / norm.num_batches_tracked
    for running, new in ((norm.running_mean, mu), (norm.running_var, var * (total / (total - 1)))):
        running.add_(momentum * (new.to(running.dtype) - running))


class _Normalize(torch.autograd.Function):
    """(x, gamma, beta) -> (y, mu, var, N); only y has a gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gamma: Tensor | None, beta: Tensor | None, eps: float, comm: Communicator
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = _wide(x)
        over = [dim for dim in range(x.dim()) if dim != 1]
        # ---- this rank's statistics
        n = x.numel() // x.shape[1]
        mean = wide.mean(over)
        deviation = (wide - _channels(mean, x)).square().sum(over)
        # ---- combined with those of all ranks
        mine = torch.cat([mean, deviation, mean.new_full((1,), n)])
        ranks = comm.all_gather(mine[None])
        means, deviations, counts = ranks.split([x.shape[1], x.shape[1], 1], 1)
        total = counts.sum()
        if n <= 1 and not isinstance(total, FakeTensor) and total.item() <= 1:
            raise ValueError(
                f"Expected more than 1 value per channel when training, got input size {list(x.shape)} over all ranks: "
                "one value has no variance. Take a larger batch, or module.eval()"
            )
        mu = (counts * means).sum(0) / total
        var = (deviations + counts * (means - mu).square()).sum(0) / total
        # ---- normalize
        scale = (var + eps).rsqrt()
        hat = (wide - _channels(mu, x)) * _channels(scale, x)
        y = hat if gamma is None else hat * _channels(gamma.to(wide.dtype), x)
        y = y if beta is None else y + _channels(beta.to(wide.dtype), x)
        ctx.comm, ctx.over, ctx.has_beta = comm, over, beta is not None
        ctx.save_for_backward(x, gamma, mu, scale, total)
        ctx.mark_non_differentiable(mu, var, total)
        return y.to(x.dtype), mu, var, total

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, gamma, mu, scale, total = ctx.saved_tensors
        wide = _wide(dy)
        hat = (_wide(x) - _channels(mu, x)) * _channels(scale, x)
        # ---- this rank's sums, which are the gradients of beta and gamma
        sum_dy, sum_dy_hat = wide.sum(ctx.over), (wide * hat).sum(ctx.over)
        dgamma = None if gamma is None else sum_dy_hat.to(gamma.dtype)
        dbeta = None if gamma is None or not ctx.has_beta else sum_dy.to(gamma.dtype)
        if not ctx.needs_input_grad[0]:
            return None, dgamma, dbeta, None, None
        # ---- over all ranks: mu and var depend on every sample
        sums = ctx.comm.all_reduce(torch.cat([sum_dy, sum_dy_hat])) / total
        mean_dy, mean_dy_hat = sums.chunk(2)
        dx = (wide - _channels(mean_dy, x) - hat * _channels(mean_dy_hat, x)) * _channels(scale, x)
        dx = dx if gamma is None else dx * _channels(gamma.to(wide.dtype), x)
        return dx.to(x.dtype), dgamma, dbeta, None, None


def _wide(tensor: Tensor) -> Tensor:
    """Return a 16-bit tensor in float32, since 16 bits are too few to sum in."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _channels(values: Tensor, x: Tensor) -> Tensor:
    """Reshape (channels,) so that it broadcasts over x (samples, channels, ...)."""
    return values.view(1, -1, *[1] * (x.dim() - 2))


def announce_sync(context: Context, replicas: Communicator, model: nn.Module) -> None:
    """Print on rank 0 what synchronized BatchNorms cost; the timeline has each of their collectives."""
    played = _get_dispatch_mode(_TorchDispatchModeKey.FAKE) is not None
    if context.rank == 0 and not played and (norms := batch_norms(model)):
        print(
            f"The statistics of {len(norms)} BatchNorms are taken over the whole batch, as in serial training: "
            f"{replicas.size} replicas wait for each other at each of them, forward and backward. torch's DDP takes "
            "each rank's own: batchnorm='local' in the Plan."
        )
