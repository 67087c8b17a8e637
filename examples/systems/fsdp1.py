"""FullyShardedDataParallel, the first: each child of the model is a unit with one flat parameter.

torchrun --nproc-per-node 2 fsdp1.py             FULL_SHARD, which is ZeRO-3
torchrun --nproc-per-node 2 fsdp1.py zero2       SHARD_GRAD_OP: parameters stay whole until the backward is over
"""

import functools
import sys

import torch
import torch.distributed as dist
from tiny import STEPS, Block, Embed, Head, batch, build, loss_of, report
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

dist.init_process_group()
rank, ranks = dist.get_rank(), dist.get_world_size()
zero2 = sys.argv[1:] == ["zero2"]

model = FullyShardedDataParallel(
    build(),
    auto_wrap_policy=ModuleWrapPolicy({Embed, Block, Head}),
    sharding_strategy=ShardingStrategy.SHARD_GRAD_OP if zero2 else ShardingStrategy.FULL_SHARD,
    use_orig_params=True,
    device_id=torch.device("cpu"),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

losses = []
for step in range(STEPS):
    x, y = batch(step, rank, ranks)
    loss = loss_of(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())

whole = functools.partial(FullyShardedDataParallel.summon_full_params, model, writeback=False)
with whole():
    weights = {
        name.replace("_fsdp_wrapped_module.", ""): weight.detach().clone()
        for name, weight in model.named_parameters()
    }
report(losses, weights)
dist.destroy_process_group()
