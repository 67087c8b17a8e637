"""ZeroRedundancyOptimizer: DDP's gradients, but each rank keeps the optimizer states of its parameters only: ZeRO-1.

torchrun --nproc-per-node 2 zero_optimizer.py
"""

import torch
import torch.distributed as dist
from tiny import STEPS, batch, build, loss_of, report
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group()
rank, ranks = dist.get_rank(), dist.get_world_size()

model = DistributedDataParallel(build(), gradient_as_bucket_view=True)
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)

losses = []
for step in range(STEPS):
    x, y = batch(step, rank, ranks)
    loss = loss_of(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())

report(losses, dict(model.module.named_parameters()))
dist.destroy_process_group()
