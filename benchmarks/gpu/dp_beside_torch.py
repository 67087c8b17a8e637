"""DP beside torch.nn.DataParallel itself, on a machine with several GPUs.

    python -m benchmarks.gpu.dp_beside_torch        on all GPUs, at least two

Both train the same GPT from the same weights on the same batches. Their losses have to agree, and the table shows the
time per step and the peak memory per GPU. nn.DataParallel is one process with a thread per GPU; mpkit's DP has one
process per GPU.
"""

from __future__ import annotations

import copy
import sys
import time
from typing import Any

import torch
from torch import nn

import mpkit as mk
from mpkit.data import text_batches
from mpkit.models import GPT, next_token_loss

STEPS, WARM_UP, LENGTH, BATCH = 20, 5, 128, 16


def sgd(params: Any) -> torch.optim.Optimizer:
    """Build SGD with momentum, so that rank 0 has states to hold."""
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


def theirs(model: nn.Module, data: list[Any], gpus: int) -> tuple[list[float], float, list[int]]:
    """Return the losses, seconds per step, and peak bytes per GPU of torch.nn.DataParallel."""
    replicas = nn.DataParallel(copy.deepcopy(model).cuda(), list(range(gpus)))
    optimizer = sgd(replicas.parameters())
    losses, start = [], 0.0
    for step in range(STEPS):
        if step == WARM_UP:
            start = time.perf_counter()
        inputs, targets = (part.cuda() for part in data[step % len(data)])
        optimizer.zero_grad()
        loss = next_token_loss(replicas(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    seconds = (time.perf_counter() - start) / (STEPS - WARM_UP)
    return losses, seconds, [torch.cuda.max_memory_allocated(gpu) for gpu in range(gpus)]


def main() -> None:
    """Run both, compare and print."""
    gpus = torch.cuda.device_count()
    if gpus < 2:
        sys.exit(f"torch.nn.DataParallel needs two GPUs to be compared with, and there are {gpus}")
    torch.manual_seed(0)
    model = GPT(layers=12, width=768, heads=12, length=LENGTH)
    data = text_batches(BATCH * gpus, LENGTH, 4)
    with mk.Cluster(ranks=gpus) as cluster:
        run = cluster.train(
            model, data, mk.Plan.dp(gpus), loss=next_token_loss, optimizer=sgd, steps=STEPS, show=False
        ).wait()
    timeline = run.timeline(clock="measured")
    own = [timeline.step(step).step_time for step in range(WARM_UP, STEPS)]
    losses, seconds, held = theirs(model, data, gpus)
    worst = max(abs(a - b) / abs(b) for a, b in zip(run.losses, losses, strict=True))
    print(f"losses agree to {worst:.1e} relative over {STEPS} steps")
    print(f"seconds per step: mpkit {sum(own) / len(own):.4f}, torch.nn.DataParallel {seconds:.4f}")
    for gpu, (ours, bytes_held) in enumerate(zip(timeline.peak_memory, held, strict=True)):
        print(
            f"GPU {gpu}: mpkit {ours['total'] / 2**20:.0f} MiB, nn.DataParallel {bytes_held / 2**20:.0f} MiB"
        )
    if worst > 1e-3:
        sys.exit("the losses part ways")


if __name__ == "__main__":
    main()
