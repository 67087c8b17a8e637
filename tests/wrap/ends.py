"""Programs for torchrun, and how they end: `torchrun ends.py PROGRAM`.

Each trains and ends as a user's program does, through Python's own end. The last thing that it runs says how many
threads of gloo are left.
"""
# ruff: noqa: E402

import atexit
import os
import sys
from pathlib import Path


def say_what_is_left(program: str) -> None:
    """Registered before torch and mpkit are imported, so that it runs after all that they register."""
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    os.write(1, f"{program} {os.environ['RANK']}: {names.count('pt_gloo_runloop')} threads\n".encode())


if __name__ == "__main__":
    atexit.register(say_what_is_left, sys.argv[1])

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import mpkit as mk
from mpkit.models import GPT, next_token_loss

sys.path.insert(0, str(Path(__file__).parent))
from loops import Toy, data, mine, momentum, proved

alive: list[Any] = []  # what a script holds in its variables until its end


def keep(wrapped: Any) -> Any:
    alive.append(wrapped)
    return wrapped


def begin() -> Any:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(dist.get_rank())  # the first rank's weights count
    return SimpleNamespace(rank=dist.get_rank(), world_size=dist.get_world_size())


def gpt() -> GPT:
    return GPT(layers=2, width=12, heads=2)


def step(model: Any, loss: torch.Tensor | None) -> None:
    """Take a step, which is compared with plain PyTorch."""
    if loss is not None:
        loss.backward()
    momentum(model.parameters()).step()
    assert "equal to plain PyTorch in step 1" in model._proof.line, model._proof.line


def average(ctx: Any, **how: Any) -> None:
    model, (x, y) = keep(proved(partial(mk.ddp, **how), Toy())), data()
    step(model, F.mse_loss(model(mine(ctx, x)), mine(ctx, y)))


def wrappers() -> None:
    """Train with every wrapper; all of them live until the end."""
    ctx, ids = begin(), torch.arange(32).view(4, 8)
    average(ctx, bucket_mb=1e-3)
    tensor = keep(proved(mk.tensor_parallel, gpt()))
    step(tensor, next_token_loss(tensor(ids), ids))
    pipe = keep(mk.pipeline(gpt(), "1f1b", example=(ids, ids), loss=next_token_loss, microbatches=4))
    pipe.step(ids, ids)
    step(pipe, None)
    finish()


def finish() -> None:
    dist.barrier()
    dist.destroy_process_group()
    print(f"rank {os.environ['RANK']} of 2: equal", flush=True)


def ddp() -> None:
    """In a group of its own, which the communicator has adopted; nobody destroys it."""
    ctx = begin()
    average(ctx, group=dist.new_group([0, 1]))


def torch_ddp() -> None:
    """What a user of torch writes: `mpkit watch` watches it."""
    dist.init_process_group()
    torch.set_num_threads(1)
    model = DistributedDataParallel(nn.Linear(10, 5))
    optimizer = momentum(model.parameters())
    x, y = data()
    for _ in range(2):
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    dist.destroy_process_group()


def from_env() -> None:
    cluster = keep(mk.Cluster.from_env("cpu"))
    cluster.run(lambda ctx: torch_ddp())
    assert cluster.run(lambda ctx: ctx.comm.all_reduce(torch.ones(1)).item()) == [2.0, 2.0]


def watched() -> None:
    from mpkit.cli.watch import CommandProgram, watch

    watch(CommandProgram(__file__, ("torch_ddp",)), device="cpu")


if __name__ == "__main__":
    globals()[sys.argv[1]]()
