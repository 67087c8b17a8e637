"""Loops of one's own around wrapped modules, right and with one mistake each, for `test_own_loops.py`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
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


def seeded(ctx: Any, make: Callable[[], nn.Module] = Block, *, by_rank: bool = False) -> nn.Module:
    """Return a model that is the same on every rank, and seed dropout by rank."""
    torch.manual_seed(ctx.rank if by_rank else 0)
    module = make()
    torch.manual_seed(100 + ctx.rank)
    return module


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def steps(
    model: nn.Module, proof: Any, optimizer: torch.optim.Optimizer, index: int, of: int, *, count: int = 3,
    microbatches: int = 1, extra: bool = True, clip: Callable[[nn.Module], Any] = lambda model: None,
    average: Callable[[nn.Module], None] = lambda model: None,
    no_sync: Callable[[nn.Module, bool], Any] = lambda model, last: nullcontext(),
) -> str:  # fmt: skip
    """Train, and return the proof's line."""
    for step in range(count):
        optimizer.zero_grad()
        x, y = data(index, of, seed=step)
        parts = list(zip(x.chunk(microbatches), y.chunk(microbatches), strict=True))
        for number, (a, b) in enumerate(parts):
            with no_sync(model, number + 1 == len(parts)):
                (F.mse_loss(model(a, extra), b) / microbatches).backward()
            if number + 1 == len(parts):
                average(model)
        clip(model)
        optimizer.step()
    return str(proof.line)


# ---- right


def ddp(ctx: Any) -> str:
    module = seeded(ctx)
    plain = copy.deepcopy(module)
    model = DistributedDataParallel(module)

    def no_sync(model: Any, last: bool) -> Any:
        return nullcontext() if last else model.no_sync()

    def clip(model: nn.Module) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    proof = mk.prove(model, plain, 2)
    return steps(
        model, proof, sgd(model), ctx.rank, ctx.world_size, microbatches=2, clip=clip, no_sync=no_sync
    )


def ddp_unused(ctx: Any) -> str:
    module = seeded(ctx, Block)
    plain = copy.deepcopy(module)
    model = DistributedDataParallel(module, find_unused_parameters=True)
    proof = mk.prove(model, plain, 2)
    return steps(model, proof, sgd(model), ctx.rank, ctx.world_size, extra=ctx.rank > 0)


def ddp_batchnorm(ctx: Any) -> str:
    module = seeded(ctx, Normed)
    plain = copy.deepcopy(module)
    model = DistributedDataParallel(module)
    return steps(model, mk.prove(model, plain, 2), sgd(model), ctx.rank, ctx.world_size)


def by_hand(ctx: Any) -> str:
    model = seeded(ctx)
    proof = mk.prove(model, copy.deepcopy(model), 2)

    def average(model: nn.Module) -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= ctx.world_size

    def clip(model: nn.Module) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    return steps(model, proof, sgd(model), ctx.rank, ctx.world_size, average=average, clip=clip)


def zero(ctx: Any) -> str:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    module = seeded(ctx)
    plain = copy.deepcopy(module)
    model = DistributedDataParallel(module)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    return steps(model, mk.prove(model, plain, 2), optimizer, ctx.rank, ctx.world_size)


def sharded(module: Any, mesh: Any, **how: Any) -> Any:
    for layer in (module.up, module.down):
        fully_shard(layer, mesh=mesh, **how)
    return fully_shard(module, mesh=mesh, **how)


def fsdp(ctx: Any) -> str:
    module = seeded(ctx)
    plain = copy.deepcopy(module)
    model = sharded(module, init_device_mesh("cpu", (ctx.world_size,)))

    def clip(model: nn.Module) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    def no_sync(model: Any, last: bool) -> Any:
        model.set_requires_gradient_sync(last)
        return nullcontext()

    proof = mk.prove(model, plain, 2)
    return steps(
        model, proof, sgd(model), ctx.rank, ctx.world_size, microbatches=2, clip=clip, no_sync=no_sync
    )


def fsdp_bf16(ctx: Any) -> str:
    module = seeded(ctx, lambda: Block(0.0))
    plain = copy.deepcopy(module)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = sharded(module, init_device_mesh("cpu", (ctx.world_size,)), mp_policy=policy)
    proof = mk.prove(model, plain, 2, dtype=torch.bfloat16)
    return steps(model, proof, sgd(model), ctx.rank, ctx.world_size)


def hybrid(ctx: Any) -> str:
    module = seeded(ctx)
    plain = copy.deepcopy(module)
    model = sharded(module, init_device_mesh("cpu", (2, ctx.world_size // 2), mesh_dim_names=("dp", "shard")))
    return steps(model, mk.prove(model, plain, 2), sgd(model), ctx.rank, ctx.world_size)


def in_width(module: Any, mesh: Any) -> Any:
    return parallelize_module(module, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def tensor_parallel(ctx: Any) -> str:
    module = seeded(ctx)
    plain = copy.deepcopy(module)
    mesh = init_device_mesh("cpu", (ctx.world_size,))
    model = in_width(module, mesh)
    return steps(model, mk.prove(model, plain, 2, tp=mesh), sgd(model), 0, 1)


def two_dimensions(ctx: Any) -> str:
    module = seeded(ctx)
    plain = copy.deepcopy(module)
    mesh = init_device_mesh("cpu", (2, ctx.world_size // 2), mesh_dim_names=("dp", "tp"))
    model = in_width(module, mesh["tp"])
    for layer in (model.up, model.down):
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    proof = mk.prove(model, plain, 2, tp=mesh["tp"])
    return steps(model, proof, sgd(model), mesh["dp"].get_local_rank(), 2)


def mpkit_ddp(ctx: Any) -> str:
    module = seeded(ctx, Normed)
    plain = copy.deepcopy(module)
    model = mk.ddp(module)
    return steps(model, mk.prove(model, plain, 2), sgd(model), ctx.rank, ctx.world_size)


def mpkit_mesh(ctx: Any) -> str:
    """Data parallelism around tensor parallelism, with mpkit's wrappers."""
    torch.manual_seed(0)
    module = mk.models.MLP(8, 8)
    plain = copy.deepcopy(module)
    mesh = init_device_mesh("cpu", (2, ctx.world_size // 2), mesh_dim_names=("dp", "tp"))
    model = mk.ddp(mk.tensor_parallel(module, group=mesh["tp"]), group=mesh["dp"])
    proof, optimizer = mk.prove(model, plain, 2), sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        x, _ = data(mesh["dp"].get_local_rank(), 2, seed=step)
        model(x).square().mean().backward()
        optimizer.step()
    return str(proof.line)


ON_TWO = (
    ddp, ddp_unused, ddp_batchnorm, by_hand, zero, fsdp, fsdp_bf16, tensor_parallel, mpkit_ddp,
)  # fmt: skip
ON_FOUR = (ddp, zero, fsdp, hybrid, two_dimensions, mpkit_mesh)


# ---- with a mistake


def sum_for_mean(ctx: Any) -> None:
    """A communication hook of DDP that sums and does not divide."""
    module = seeded(ctx)
    plain = copy.deepcopy(module)
    model = DistributedDataParallel(module)

    def total(done: Any) -> Tensor:
        made: Tensor = done.value()[0]
        return made

    hook: Any = lambda _, bucket: dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(total)  # noqa: E731
    model.register_comm_hook(None, hook)
    steps(model, mk.prove(model, plain), sgd(model), ctx.rank, ctx.world_size)


def no_reduction(ctx: Any) -> None:
    """Only backwards within no_sync()."""
    module = seeded(ctx)
    plain = copy.deepcopy(module)
    model = DistributedDataParallel(module)
    proof = mk.prove(model, plain)
    steps(model, proof, sgd(model), ctx.rank, ctx.world_size, no_sync=lambda model, last: model.no_sync())


def stale_shard(ctx: Any) -> None:
    """A ZeroRedundancyOptimizer that does not send what a rank has updated."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    module = seeded(ctx)
    plain = copy.deepcopy(module)
    model = DistributedDataParallel(module)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with patch.object(ZeroRedundancyOptimizer, "_sync_params", lambda self: None):
        steps(model, mk.prove(model, plain), optimizer, ctx.rank, ctx.world_size)


def stale_unsharded(ctx: Any) -> None:
    """FSDP2 that keeps gathered parameters over an update."""
    module = seeded(ctx)
    plain = copy.deepcopy(module)
    model = sharded(module, init_device_mesh("cpu", (ctx.world_size,)), reshard_after_forward=False)
    for inner in (model, model.up, model.down):
        inner.set_reshard_after_backward(False)
    steps(model, mk.prove(model, plain, 2), sgd(model), ctx.rank, ctx.world_size)


def same_mask(ctx: Any) -> None:
    module = seeded(ctx)
    torch.manual_seed(0)
    plain = copy.deepcopy(module)
    model = DistributedDataParallel(module)
    steps(model, mk.prove(model, plain), sgd(model), ctx.rank, ctx.world_size)


def same_mask_in_width(ctx: Any) -> None:
    """Tensor parallelism whose ranks drop out the same of different features."""
    module = seeded(ctx)
    torch.manual_seed(0)
    plain = copy.deepcopy(module)
    mesh = init_device_mesh("cpu", (ctx.world_size,))
    model = in_width(module, mesh)
    steps(model, mk.prove(model, plain, tp=mesh), sgd(model), 0, 1)


def skipped_unused(ctx: Any) -> None:
    """A mean by hand that leaves out what some ranks have not used."""
    model = seeded(ctx)
    proof = mk.prove(model, copy.deepcopy(model))

    def average(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if not name.startswith("extra"):
                dist.all_reduce(parameter.grad)
                parameter.grad /= ctx.world_size

    steps(model, proof, sgd(model), ctx.rank, ctx.world_size, average=average, extra=ctx.rank > 0)


def wrong_accumulation(ctx: Any) -> None:
    """Sums over the ranks after each micro-batch, and divides at the end: the first one counts several times."""
    model = seeded(ctx)
    proof = mk.prove(model, copy.deepcopy(model))
    optimizer = sgd(model)
    x, y = data(ctx.rank, ctx.world_size)
    for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
        F.mse_loss(model(a, True), b).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
    for parameter in model.parameters():
        parameter.grad /= ctx.world_size
    optimizer.step()
    assert not proof.active


def local_clip(ctx: Any) -> None:
    """Clips FSDP2's gradients by the norm of this rank's part."""
    module = seeded(ctx)
    plain = copy.deepcopy(module)
    model = sharded(module, init_device_mesh("cpu", (ctx.world_size,)))

    def clip(model: nn.Module) -> None:
        parts = [p.grad.to_local() for p in model.parameters() if isinstance(p.grad, DTensor)]
        norm = torch.stack([part.norm() for part in parts]).norm()
        for part in parts:
            part.mul_(0.1 / norm)

    steps(model, mk.prove(model, plain), sgd(model), ctx.rank, ctx.world_size, clip=clip)


def other_seeds(ctx: Any) -> None:
    """FSDP2 of a model that each rank has drawn for itself."""
    module = seeded(ctx, by_rank=True)
    plain = copy.deepcopy(module)
    model = sharded(module, init_device_mesh("cpu", (ctx.world_size,)))
    steps(model, mk.prove(model, plain), sgd(model), ctx.rank, ctx.world_size)


def other_rates(ctx: Any) -> None:
    module = seeded(ctx)
    plain = copy.deepcopy(module)
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 + 0.1 * ctx.rank)
    steps(model, mk.prove(model, plain), optimizer, ctx.rank, ctx.world_size)


def other_mode(ctx: Any) -> None:
    module = seeded(ctx)
    plain = copy.deepcopy(module)
    model = DistributedDataParallel(module)
    proof = mk.prove(model, plain)
    model.eval() if ctx.rank else model.train()
    steps(model, proof, sgd(model), ctx.rank, ctx.world_size)


def some_ranks(ctx: Any) -> None:
    """The mean over pairs of ranks, where it is over all."""
    module = seeded(ctx)
    plain = copy.deepcopy(module)
    pairs = init_device_mesh("cpu", (ctx.world_size // 2, 2), mesh_dim_names=("other", "pair"))
    model = DistributedDataParallel(module, process_group=pairs["pair"].get_group())
    steps(model, mk.prove(model, plain), sgd(model), ctx.rank, ctx.world_size)


class Partial(RowwiseParallel):
    """A row-parallel layer that takes its part of the sum for the whole."""

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Any, use_local_output: Any, mod: Any, outputs: Any, device_mesh: Any
    ) -> Any:
        return outputs.to_local()


def no_sum_in_forward(ctx: Any) -> None:
    module = seeded(ctx, lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4, bias=False)))
    plain = copy.deepcopy(module)
    mesh = init_device_mesh("cpu", (ctx.world_size,))
    model = parallelize_module(module, mesh, {"0": ColwiseParallel(), "2": Partial()})
    proof, optimizer = mk.prove(model, plain, tp=mesh), sgd(model)
    model(data(0, 1)[0]).square().mean().backward()
    optimizer.step()
    assert not proof.active


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
