"""Programs for torchrun, and how they end: `torchrun ends.py PROGRAM`, or `ends.py NUMBER PROGRAM ...` for many ends.

The latter imports torch once. It forks two ranks per end, which train and end as a user's program does, through
Python's own end. The last thing that they run says how many threads of gloo are left.
"""
# ruff: noqa: E402

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path


def say_what_is_left() -> None:
    """Registered before torch and mpkit are imported, so that it runs after all that they register."""
    if program not in ("", "late"):  # which would let go of Python's lock here
        names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
        os.write(1, f"{program} {os.environ['RANK']}: {names.count('pt_gloo_runloop')} threads\n".encode())


program = ""  # the program that this forked process runs
atexit.register(say_what_is_left)

import gc
import importlib
import time
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import mpkit as mk
from mpkit.launch.process.group import as_torchrun
from mpkit.models import GPT

sys.path.insert(0, str(Path(__file__).parent))
from loops import Toy, data, mine, momentum

alive: list[Any] = []  # what a script holds in its variables until its end


def keep(wrapped: Any) -> Any:
    alive.append(wrapped)
    return wrapped


def first_step() -> None:
    """Import what the first step of an optimizer imports. It was imported before the fork, without a group."""
    importlib.reload(torch.distributed.nn.functional)


def begin() -> Any:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(dist.get_rank())  # the first rank's weights count
    first_step()
    return SimpleNamespace(rank=dist.get_rank(), world_size=dist.get_world_size())


def gpt() -> GPT:
    return GPT(layers=2, width=12, heads=2)


def loss_of(out: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out.flatten(0, 1), targets.flatten())


def step(model: Any, loss: torch.Tensor | None) -> None:
    """Take a step, which is compared with plain PyTorch."""
    if loss is not None:
        loss.backward()
    momentum(model.parameters()).step()
    assert "equal to plain PyTorch in step 1" in model._proof.line, model._proof.line


def average(ctx: Any, **how: Any) -> None:
    model, (x, y) = keep(mk.ddp(Toy(), prove=1, **how)), data()
    step(model, F.mse_loss(model(mine(ctx, x)), mine(ctx, y)))


def wrappers() -> None:
    """Train with every wrapper; all of them live until the end."""
    ctx, ids = begin(), torch.arange(32).view(4, 8)
    average(ctx, bucket_mb=1e-3)
    tensor = keep(mk.tensor_parallel(gpt(), prove=1))
    step(tensor, loss_of(tensor(ids), ids))
    pipe = keep(mk.pipeline(gpt(), "1f1b", example=(ids, ids), loss=loss_of, microbatches=4))
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


def pipeline() -> None:
    begin()
    ids = torch.arange(32).view(4, 8)
    pipe = keep(mk.pipeline(gpt(), "gpipe", example=(ids, ids), loss=loss_of, microbatches=2))
    pipe.step(ids, ids)
    momentum(pipe.parameters()).step()
    finish()


def torch_ddp() -> None:
    """What a user of torch writes: `mpkit watch` watches it."""
    dist.init_process_group()
    torch.set_num_threads(1)
    first_step()
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


def late() -> None:
    """A thread of gloo needs Python's lock only when the program is over, because the program does not let it go."""
    ctx = begin()
    keep(mk.ddp(nn.Linear(2, 2)))
    store, total = dist.distributed_c10d._get_default_store(), torch.ones(4)
    if ctx.rank:
        store.wait(["go"])
        dist.all_reduce(total)
        dist.destroy_process_group()
        return
    seen = total.detach().numpy()
    dist.all_reduce(total, async_op=True)
    del total
    dist.destroy_process_group()
    store.set("go", "")
    sys.setswitchinterval(1e6)
    begun = time.monotonic()
    while seen[0] != 2.0 and time.monotonic() < begun + 1.0:
        pass  # the thread may wait for the lock already, to drop something earlier
    begun = time.monotonic()
    while time.monotonic() < begun + 0.05:
        pass


def run(name: str) -> None:
    globals()[name]()


def serve() -> tuple[int, int]:
    """Fork a process that serves a store, as torchrun's agent does; return its port, and the pipe that keeps it."""
    port, tell = os.pipe()
    until, kept = os.pipe()
    if not os.fork():
        os.close(kept)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(tell, f"{store.port}".encode())
        os.read(until, 1)
        os._exit(0)
    number = int(os.read(port, 16))
    for end in (port, tell, until):
        os.close(end)
    return number, kept


def fork_ends(number: int, names: list[str]) -> None:
    """Fork two ranks for each end, and check that both exit with 0. In a rank this returns after the program."""
    global program
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    for end in range(number):
        name, ranks = names[end % len(names)], []
        if name != "late":  # what this imports lets go of Python's lock at exit
            weight = nn.Parameter(torch.ones(1))
            weight.grad = torch.ones(1)
            momentum([weight]).step()
        gc.freeze()  # ranks do not look through what is imported here
        port, kept = serve()
        for rank in range(2):
            ranks.append(os.fork())
            if not ranks[-1]:
                os.environ.update(as_torchrun(rank, 2, port) | {"TORCHELASTIC_RUN_ID": "ends"})
                program = name
                return run(name)
        for process in ranks:
            _, status = os.waitpid(process, 0)
            assert status == 0, f"end {end}, of {name}: exit status {os.waitstatus_to_exitcode(status)}"
        os.close(kept)
        os.wait()


if __name__ == "__main__":
    if "RANK" in os.environ:
        run(sys.argv[1])
    else:
        fork_ends(int(sys.argv[1]), sys.argv[2:])
