"""Data parallelism with Horovod's ring all-reduce (Sergeev and Del Balso 2018), by hand: sends and receives only.

reduce-scatter    n - 1 times: send a part to the right, receive one from the left and add it
all-gather        n - 1 times: send the part that is complete, receive another one

torchrun --nproc-per-node 2 ring.py
"""

import torch
import torch.distributed as dist
from tiny import STEPS, batch, build, loss_of, report

dist.init_process_group()
rank, ranks = dist.get_rank(), dist.get_world_size()
left, right = (rank - 1) % ranks, (rank + 1) % ranks


def ring_all_reduce(parts: list[torch.Tensor]) -> None:
    """Sum `parts`, one per rank, over all ranks, in place."""
    received = torch.empty_like(parts[0])
    for i in range(ranks - 1):  # reduce-scatter
        sending = dist.isend(parts[(rank - i) % ranks], right)
        dist.recv(received, left)
        sending.wait()
        parts[(rank - i - 1) % ranks] += received
    for i in range(ranks - 1):  # all-gather
        sending = dist.isend(parts[(rank + 1 - i) % ranks], right)
        dist.recv(parts[(rank - i) % ranks], left)
        sending.wait()


model = build()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
parameters = list(model.parameters())
size = sum(p.numel() for p in parameters)
buffer = torch.zeros(-(-size // ranks) * ranks)  # all gradients, padded to equal parts

losses = []
for step in range(STEPS):
    x, y = batch(step, rank, ranks)
    loss = loss_of(model(x), y)
    loss.backward()
    torch.cat([p.grad.flatten() for p in parameters], out=buffer[:size])
    ring_all_reduce(list(buffer.chunk(ranks)))
    buffer /= ranks
    for p, part in zip(parameters, buffer[:size].split([p.numel() for p in parameters]), strict=True):
        p.grad.copy_(part.view_as(p))
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())

report(losses, dict(model.named_parameters()))
dist.destroy_process_group()
