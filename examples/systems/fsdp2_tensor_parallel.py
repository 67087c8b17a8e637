"""Two dimensions on four ranks: fully_shard over dp, tensor parallelism over tp.

torchrun --nproc-per-node 4 fsdp2_tensor_parallel.py
"""

import torch
import torch.distributed as dist
from tiny import STEPS, batch, build, loss_of, report
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

dist.init_process_group()
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

plan = {name: ColwiseParallel() for name in ("attention.q", "attention.k", "attention.v", "mlp.up")}
plan |= {name: RowwiseParallel() for name in ("attention.out", "mlp.down")}
# q, k and v read one DTensor, so that the gradients of their inputs are added before they are reduced, once.
plan["attention"] = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
model = build()
for block in model[1:-1]:
    parallelize_module(block, mesh["tp"], plan)
for child in model:
    fully_shard(child, mesh=mesh["dp"])
fully_shard(model, mesh=mesh["dp"])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)

losses = []
for step in range(STEPS):
    x, y = batch(step, mesh["dp"].get_local_rank(), 2)
    loss = loss_of(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())

report(losses, get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)))
dist.destroy_process_group()
