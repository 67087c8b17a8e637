"""torch's DistributedDataParallel.

torchrun --nproc-per-node 2 ddp.py              buckets of 0.2 MB, gradients as views of them
torchrun --nproc-per-node 2 ddp.py static       static_graph=True
torchrun --nproc-per-node 2 ddp.py unused       find_unused_parameters=True: each step leaves another block out
torchrun --nproc-per-node 2 ddp.py hook         a communication hook: all-reduce
torchrun --nproc-per-node 2 ddp.py fp16         a communication hook: all-reduce in 16 bits
torchrun --nproc-per-node 2 ddp.py compiled     the same under torch.compile
"""

import sys

import torch
import torch.distributed as dist
from tiny import STEPS, batch, build, loss_of, report
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group()
rank, ranks = dist.get_rank(), dist.get_world_size()
variant = sys.argv[1] if len(sys.argv) > 1 else ""

ddp = DistributedDataParallel(
    build(),
    bucket_cap_mb=1 if variant == "compiled" else 0.2,  # what torch.compile takes for the first one is 1 MB
    gradient_as_bucket_view=True,
    static_graph=variant == "static",
    find_unused_parameters=variant == "unused",
)
if variant in ("hook", "fp16"):
    ddp.register_comm_hook(None, allreduce_hook if variant == "hook" else fp16_compress_hook)
model = torch.compile(ddp, backend="aot_eager") if variant == "compiled" else ddp
optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)

losses = []
for step in range(STEPS):
    x, y = batch(step, rank, ranks)
    loss = loss_of(model(x, without=1 + step % 4 if variant == "unused" else -1), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())

report(losses, dict(ddp.module.named_parameters()))
dist.destroy_process_group()
