"""Loops of one's own around wrapped modules, right and with one mistake each, for `test_own_loops.py`."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import mpkit as mk

SAMPLES = 16


class Block(nn.Module):
    """Two layers with dropout between them, as a transformer's MLP, and a layer that some samples use."""

    def __init__(self, dropout: float = 0.25) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.drop, self.head = nn.Dropout(dropout), nn.Linear(8, 4)
        self.extra = nn.Linear(8, 4)

    def forward(self, x: Tensor, extra: bool = False) -> Tensor:
        hidden = self.down(self.drop(self.up(x).relu())) + x
        y: Tensor = self.head(hidden)
        return y + self.extra(hidden) if extra else y


class Normed(Block):
    """With a BatchNorm."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor, extra: bool = False) -> Tensor:
        return super().forward(self.norm(x), True)


def data(index: int, of: int, seed: int = 5) -> tuple[Tensor, Tensor]:
    """Return a part of the batch, which is the same on every rank."""
    source = torch.Generator().manual_seed(seed)
    x, y = torch.randn(SAMPLES, 8, generator=source), torch.randn(SAMPLES, 4, generator=source)
    return x.chunk(of)[index], y.chunk(of)[index]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def loop(
    ctx: Any, wrap: Callable[[Any], Any] = lambda module: module, make: Callable[[], nn.Module] = Block, *,
    seeds: tuple[int, int | None] = (0, None), proved: int = 2, tp: Any = None, dtype: torch.dtype | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd, batch: tuple[int, int] | None = None,
    microbatches: int = 1, extra: bool = True, clip: Callable[[nn.Module], Any] = lambda model: None,
    average: Callable[[nn.Module], None] = lambda model: None,
    no_sync: Callable[[Any, bool], Any] = lambda model, last: nullcontext(),
) -> str:  # fmt: skip
    """Train a model as `wrap` wraps it, and return the line of its proof.

    Args:
        seeds: of the model, the same on every rank, and of dropout, another on each.
        batch: which part of the batch this rank has, of how many.
    """
    torch.manual_seed(seeds[0])
    module = make()
    torch.manual_seed(100 + ctx.rank if seeds[1] is None else seeds[1])
    plain = copy.deepcopy(module)
    model = wrap(module)
    proof = mk.prove(model, plain, proved, tp=tp, dtype=dtype)
    updates = optimizer(model.parameters())
    for step in range(3):
        updates.zero_grad()
        x, y = data(*batch or (ctx.rank, ctx.world_size), seed=step)
        parts = list(zip(x.chunk(microbatches), y.chunk(microbatches), strict=True))
        for number, (a, b) in enumerate(parts):
            last = number + 1 == len(parts)
            with no_sync(model, last):
                (F.mse_loss(model(a, extra).to(b), b) / microbatches).backward()
            if last:
                average(model)
        clip(model)
        updates.step()
    return str(proof.line)


def clipped(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def averaged(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def mesh_of(*shape: int) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "other")[: len(shape)])


# ---- right


def ddp(ctx: Any) -> str:
    def no_sync(model: Any, last: bool) -> Any:
        return nullcontext() if last else model.no_sync()

    return loop(ctx, DistributedDataParallel, microbatches=2, clip=clipped, no_sync=no_sync)


def ddp_unused(ctx: Any) -> str:
    wrap = partial(DistributedDataParallel, find_unused_parameters=True)
    return loop(ctx, wrap, extra=ctx.rank > 0)


def ddp_batchnorm(ctx: Any) -> str:
    return loop(ctx, DistributedDataParallel, Normed)


def by_hand(ctx: Any) -> str:
    return loop(ctx, average=averaged, clip=clipped)


def zero(ctx: Any) -> str:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=0.01)

    return loop(ctx, DistributedDataParallel, optimizer=optimizer)


def sharded(module: Any, mesh: Any, **how: Any) -> Any:
    for layer in (module.up, module.down):
        fully_shard(layer, mesh=mesh, **how)
    return fully_shard(module, mesh=mesh, **how)


def fsdp(ctx: Any) -> str:
    def no_sync(model: Any, last: bool) -> Any:
        model.set_requires_gradient_sync(last)
        return nullcontext()

    wrap = partial(sharded, mesh=mesh_of(ctx.world_size))
    return loop(ctx, wrap, microbatches=2, clip=clipped, no_sync=no_sync)


def fsdp_bf16(ctx: Any) -> str:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    wrap = partial(sharded, mesh=mesh_of(ctx.world_size), mp_policy=policy)
    return loop(ctx, wrap, lambda: Block(0.0), dtype=torch.bfloat16)


def hybrid(ctx: Any) -> str:
    return loop(ctx, partial(sharded, mesh=mesh_of(2, ctx.world_size // 2)))


def in_width(module: Any, mesh: Any) -> Any:
    return parallelize_module(module, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def tensor_parallel(ctx: Any) -> str:
    mesh = mesh_of(ctx.world_size)
    return loop(ctx, partial(in_width, mesh=mesh), tp=mesh, batch=(0, 1))


def two_dimensions(ctx: Any) -> str:
    mesh = mesh_of(2, ctx.world_size // 2)

    def wrap(module: Any) -> Any:
        return sharded(in_width(module, mesh["other"]), mesh["dp"])

    return loop(ctx, wrap, tp=mesh["other"], batch=(mesh["dp"].get_local_rank(), 2))


def mpkit_ddp(ctx: Any) -> str:
    return loop(ctx, mk.ddp, Normed)


def mpkit_mesh(ctx: Any) -> str:
    """Data parallelism around tensor parallelism, with mpkit's wrappers."""
    torch.manual_seed(0)
    module = mk.models.MLP(8, 8)
    plain = copy.deepcopy(module)
    mesh = mesh_of(2, ctx.world_size // 2)
    model = mk.ddp(mk.tensor_parallel(module, group=mesh["other"]), group=mesh["dp"])
    proof, optimizer = mk.prove(model, plain, 2), sgd(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        x, _ = data(mesh["dp"].get_local_rank(), 2, seed=step)
        model(x).square().mean().backward()
        optimizer.step()
    return str(proof.line)


ON_TWO = (
    ddp, ddp_unused, ddp_batchnorm, by_hand, zero, fsdp, fsdp_bf16, tensor_parallel, mpkit_ddp,
)  # fmt: skip
ON_FOUR = (zero, hybrid, two_dimensions, mpkit_mesh)


# ---- with a mistake


def sum_for_mean(ctx: Any) -> None:
    """A communication hook of DDP that sums and does not divide."""

    def total(done: Any) -> Tensor:
        made: Tensor = done.value()[0]
        return made

    hook: Any = lambda _, bucket: dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(total)  # noqa: E731

    def wrap(module: nn.Module) -> nn.Module:
        model = DistributedDataParallel(module)
        model.register_comm_hook(None, hook)
        return model

    loop(ctx, wrap)


def no_reduction(ctx: Any) -> None:
    """Only backwards within no_sync()."""
    loop(ctx, DistributedDataParallel, no_sync=lambda model, last: model.no_sync())


def stale_shard(ctx: Any) -> None:
    """A ZeroRedundancyOptimizer that does not send what a rank has updated."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    with patch.object(ZeroRedundancyOptimizer, "_sync_params", lambda self: None):
        zero(ctx)


def stale_unsharded(ctx: Any) -> None:
    """FSDP2 that keeps gathered parameters over an update."""

    def wrap(module: Any) -> Any:
        model = sharded(module, mesh_of(ctx.world_size), reshard_after_forward=False)
        for inner in (model, model.up, model.down):
            inner.set_reshard_after_backward(False)
        return model

    loop(ctx, wrap)


def same_mask(ctx: Any) -> None:
    loop(ctx, DistributedDataParallel, seeds=(0, 0))


def same_mask_in_width(ctx: Any) -> None:
    """Tensor parallelism whose ranks drop out the same of different features."""
    mesh = mesh_of(ctx.world_size)
    loop(ctx, partial(in_width, mesh=mesh), tp=mesh, batch=(0, 1), seeds=(0, 0))


def skipped_unused(ctx: Any) -> None:
    """A mean by hand that leaves out what some ranks have not used."""

    def average(model: Any) -> None:
        for part in (model.up, model.down, model.head):
            averaged(part)

    loop(ctx, average=average, extra=ctx.rank > 0)


def wrong_accumulation(ctx: Any) -> None:
    """Sums over the ranks after each micro-batch, and divides at the end: the first one counts several times."""

    def no_sync(model: Any, last: bool) -> Any:
        for parameter in model.parameters() if last else ():
            dist.all_reduce(parameter.grad)
        return nullcontext()

    loop(ctx, microbatches=2, average=averaged, no_sync=no_sync)


def local_clip(ctx: Any) -> None:
    """Clips FSDP2's gradients by the norm of this rank's part."""

    def clip(model: nn.Module) -> None:
        parts = [p.grad.to_local() for p in model.parameters() if isinstance(p.grad, DTensor)]
        norm = torch.stack([part.norm() for part in parts]).norm()
        for part in parts:
            part.mul_(0.1 / norm)

    loop(ctx, partial(sharded, mesh=mesh_of(ctx.world_size)), clip=clip)


def other_seeds(ctx: Any) -> None:
    """FSDP2 of a model that each rank has drawn for itself."""
    loop(ctx, partial(sharded, mesh=mesh_of(ctx.world_size)), seeds=(ctx.rank, None))


def other_rates(ctx: Any) -> None:
    loop(ctx, DistributedDataParallel, optimizer=partial(torch.optim.SGD, lr=0.1 + 0.1 * ctx.rank))


def other_mode(ctx: Any) -> None:
    def enter(model: nn.Module, last: bool) -> Any:
        model.eval() if ctx.rank else model.train()
        return nullcontext()

    loop(ctx, DistributedDataParallel, no_sync=enter)


def some_ranks(ctx: Any) -> None:
    """The mean over pairs of ranks, where it is over all."""
    pairs = mesh_of(ctx.world_size // 2, 2)
    loop(ctx, partial(DistributedDataParallel, process_group=pairs["other"].get_group()))


class Partial(RowwiseParallel):
    """A row-parallel layer that takes its part of the sum for the whole."""

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Any, use_local_output: Any, mod: Any, outputs: Any, device_mesh: Any
    ) -> Any:
        return outputs.to_local()


def no_sum_in_forward(ctx: Any) -> None:
    class Net(nn.Sequential):
        def forward(self, x: Tensor, extra: bool = False) -> Tensor:
            made: Tensor = super().forward(x)
            return made

    mesh = mesh_of(ctx.world_size)
    layers: dict[str, Any] = {"0": ColwiseParallel(), "2": Partial()}
    loop(
        ctx, lambda module: parallelize_module(module, mesh, layers),
        lambda: Net(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4, bias=False)), tp=mesh, batch=(0, 1),
    )  # fmt: skip


MISTAKES: dict[Callable[[Any], None], str] = {
    sum_for_mean: "2 times as large: a sum in place of a mean",
    no_reduction: "this rank's own: the mean over the ranks is missing",
    stale_shard: "is not that of rank 0. The ranks' optimizers or hooks have made different updates, a shard that",
    stale_unsharded: "the weights from before the last update: the shards, or the copies",
    same_mask: "draw the same random numbers for different samples",
    same_mask_in_width: "draw the same random numbers for different activations",
    skipped_unused: "The gradient of extra.",
    wrong_accumulation: "of backwards that count 2, 1 times in place of once",
    local_clip: "each rank has clipped by the norm of its own part",
    other_seeds: "another seed per rank",
    other_rates: "have made different updates",
    other_mode: "evaluation mode",
    no_sum_in_forward: "the reduction over the ranks is missing in the forward",
}

MISTAKES_ON_FOUR: dict[Callable[[Any], None], str] = {
    some_ranks: "the mean over ranks [0, 1] alone, without [2, 3]"
}
