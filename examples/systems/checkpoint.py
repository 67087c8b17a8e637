"""torch.distributed.checkpoint: FSDP2 is saved after two steps, and another model goes on from the files.

torchrun --nproc-per-node 2 checkpoint.py
"""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tiny import STEPS, batch, build, loss_of, report
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

dist.init_process_group()
rank, ranks = dist.get_rank(), dist.get_world_size()


def sharded() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build()
    for child in model:
        fully_shard(child)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        x, y = batch(step, rank, ranks)
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


folder = [tempfile.mkdtemp() if rank == 0 else ""]
dist.broadcast_object_list(folder)
path = os.path.join(folder[0], "step2")

model, optimizer = sharded()
losses = train(model, optimizer, range(2))
weights, states = get_state_dict(model, optimizer)
dcp.save({"weights": weights, "states": states}, checkpoint_id=path)

model, optimizer = sharded()
with torch.no_grad():
    for weight in model.parameters():
        weight.zero_()
weights, states = get_state_dict(model, optimizer)
dcp.load({"weights": weights, "states": states}, checkpoint_id=path)
set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
losses += train(model, optimizer, range(2, STEPS))

report(losses, get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)))
dist.destroy_process_group()
