"""fully_shard: each child of the model is a unit, its parameters are DTensors sharded along their first dimension.

torchrun --nproc-per-node 2 fsdp2.py             reshard_after_forward=True, which is ZeRO-3
torchrun --nproc-per-node 2 fsdp2.py keep        reshard_after_forward=False: gathered once a step, as in ZeRO-2
torchrun --nproc-per-node 2 fsdp2.py offload     shards and optimizer in host memory, where there is a device
"""

import sys

import torch
import torch.distributed as dist
from tiny import STEPS, batch, build, loss_of, report
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

dist.init_process_group()
rank, ranks = dist.get_rank(), dist.get_world_size()
variant = sys.argv[1] if len(sys.argv) > 1 else ""

model = build()
offload = CPUOffloadPolicy(pin_memory=False) if variant == "offload" else OffloadPolicy()
for child in model:
    fully_shard(child, reshard_after_forward=variant != "keep", offload_policy=offload)
fully_shard(model, offload_policy=offload)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

losses = []
for step in range(STEPS):
    x, y = batch(step, rank, ranks)
    loss = loss_of(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())

report(losses, get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)))
dist.destroy_process_group()
