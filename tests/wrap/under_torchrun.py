"""A program for torchrun: the wrappers in a process group that the program makes itself. It has no ctx."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.nn import functional as F

import mpkit as mk
from mpkit.models import GPT

sys.path.insert(0, str(Path(__file__).parent))
from loops import adamw, apart, data, mine, models, momentum, side_by_side


def optimizer_of(parameters: object) -> torch.optim.Optimizer:
    return mk.zero_optimizer(torch.optim.AdamW, parameters, lr=0.01)  # type: ignore[arg-type]


def gpt() -> GPT:
    return GPT(layers=2, width=12, heads=2)


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    ctx = SimpleNamespace(rank=dist.get_rank(), world_size=dist.get_world_size())
    assert side_by_side(ctx, lambda module: mk.ddp(module, bucket_mb=1e-3)) < 1e-6
    for stage in (1, 2, 3):
        assert side_by_side(ctx, partial(mk.fully_shard, stage=stage), max_norm=0.5) < 1e-6
    assert side_by_side(ctx, lambda module: mk.fully_shard(module, 3, precision="fp16")) < 2e-3

    module, plain = models(ctx)
    model = mk.ddp(module)
    optimizer, its = optimizer_of(model.parameters()), torch.optim.AdamW(plain.parameters(), lr=0.01)
    x, y = data()
    for _ in range(3):
        optimizer.zero_grad()
        its.zero_grad()
        F.mse_loss(plain(x), y).backward()
        F.mse_loss(model(mine(ctx, x)), mine(ctx, y)).backward()
        its.step()
        optimizer.step()
    assert apart(model, plain) < 1e-6

    module, plain = models(ctx, gpt)
    ids = torch.arange(32).view(4, 8)
    tensor = mk.tensor_parallel(module)
    optimizer, its = momentum(tensor.parameters()), momentum(plain.parameters())
    for each, its_optimizer in ((tensor, optimizer), (plain, its)):
        F.cross_entropy(each(ids).flatten(0, 1), ids.flatten()).backward()
        its_optimizer.step()
    assert apart(tensor, plain) < 1e-6

    def loss(out: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(out.flatten(0, 1), targets.flatten())

    module, plain = models(ctx, gpt)
    pipe = mk.pipeline(module, "1f1b", example=(ids, ids), loss=loss, microbatches=4)
    optimizer, its = adamw(pipe.parameters()), adamw(plain.parameters())
    expected = loss(plain(ids), ids)
    expected.backward()
    assert abs(pipe.step(ids, ids) - expected.item()) < 1e-5
    optimizer.step()
    its.step()
    assert apart(pipe, plain) < 1e-5
    dist.barrier()
    dist.destroy_process_group()
    print(f"rank {ctx.rank} of {ctx.world_size}: equal")


if __name__ == "__main__":
    main()
