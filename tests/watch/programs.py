"""Programs that know nothing of mpkit, as people have them: each returns numbers that watching must not change."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 3
WEIGHTS = 4 * (64 * 64 + 64) + 64 * 8 + 8  # of `mlp`


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)], nn.Linear(64, 8))


def batch(seed: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1 + dist.get_rank() if seed is None else seed)
    return torch.randn(8, 64), torch.randint(0, 8, (8,))


def loop(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int | None = None) -> list[float]:
    x, y = batch(seed)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def collectives() -> list[float]:
    """Each kind of communication once; 17 collectives and messages."""
    rank, t = dist.get_rank(), torch.ones(4) * (dist.get_rank() + 1)
    dist.all_reduce(t)
    work = dist.all_reduce(torch.ones(4), async_op=True)
    work.wait()
    parts = [torch.empty(4) for _ in range(2)]
    dist.all_gather(parts, t)
    dist.broadcast(t, 0)
    dist.barrier()
    whole, part = torch.empty(8), torch.empty(4)
    dist.all_gather_into_tensor(whole, t)
    dist.reduce_scatter_tensor(part, whole)
    dist.all_to_all_single(torch.empty(4), t)
    if rank == 0:
        dist.send(t, 1)
    else:
        dist.recv(t, 0)
    objects: list[object] = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    ops = [dist.P2POp(dist.isend, t, 1 - rank), dist.P2POp(dist.irecv, torch.empty(4), 1 - rank)]
    for handle in dist.batch_isend_irecv(ops):
        handle.wait()
    dist.reduce(t, 0)
    dist.scatter(part, [t, t] if rank == 0 else None, src=0)
    dist.gather(t, [torch.empty(4), torch.empty(4)] if rank == 0 else None, dst=0)
    return [float(t.sum()), float(whole.sum()), float(part.sum())]


def ddp() -> list[float]:
    model = DistributedDataParallel(mlp(), bucket_cap_mb=0.02)
    return loop(model, torch.optim.SGD(model.parameters(), lr=0.1))


def late_states() -> list[float]:
    """The optimizer makes most states in the second step."""
    model = mlp()
    late = model[:3].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.register_step_post_hook(lambda *_: [p.requires_grad_() for p in late.parameters()] and None)
    return loop(model, optimizer)


def ddp_static_with_hook() -> list[float]:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model = DistributedDataParallel(mlp(), static_graph=True)
    model.register_comm_hook(None, fp16_compress_hook)
    return loop(model, torch.optim.SGD(model.parameters(), lr=0.1))


def fsdp2() -> list[float]:
    from torch.distributed.fsdp import fully_shard

    model = mlp()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return loop(model, torch.optim.AdamW(model.parameters(), lr=0.01))


def fsdp1() -> list[float]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(mlp(), device_id=torch.device("cpu"))
    return loop(model, torch.optim.AdamW(model.parameters(), lr=0.01))


def zero_optimizer() -> list[float]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(mlp())
    return loop(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01))


def tensor_parallel() -> list[float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return loop(model, torch.optim.SGD(model.parameters(), lr=0.1), seed=1)


def pipeline() -> list[float]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank = dist.get_rank()
    part = mlp()[:2] if rank == 0 else mlp()[2:]
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=F.cross_entropy)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    x, y = batch(1)
    if rank:
        del x
    losses: list[torch.Tensor] = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses = []
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=losses)
        optimizer.step()
    return [float(p.detach().double().sum()) for p in part.parameters()] + [float(v.detach()) for v in losses]


def compiled() -> list[float]:
    model = DistributedDataParallel(mlp())
    return loop(torch.compile(model, backend="aot_eager"), torch.optim.SGD(model.parameters(), lr=0.1))


PROGRAMS = (
    collectives, ddp, ddp_static_with_hook, fsdp2, fsdp1, zero_optimizer, tensor_parallel, pipeline, compiled,
)  # fmt: skip
