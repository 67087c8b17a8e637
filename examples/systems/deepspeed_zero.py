"""DeepSpeed's ZeRO on CPUs.

torchrun --nproc-per-node 2 deepspeed_zero.py 1        or 2, or 3
"""

import os
import sys

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
from tiny import BATCH, STEPS, batch, build, loss_of, report

# An all-reduce of its own through shared memory, which DeepSpeed would compile for a minute; gloo's serves as well.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

stage = int(sys.argv[1]) if len(sys.argv) > 1 else 1
deepspeed.init_distributed(dist_backend="gloo")
rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
config = {
    "train_micro_batch_size_per_gpu": BATCH // ranks,
    "zero_optimization": {
        "stage": stage,
        "reduce_bucket_size": 100_000,  # elements; the default takes 2 GB
        "stage3_prefetch_bucket_size": 50_000,
        "stage3_param_persistence_threshold": 0,  # small parameters are sharded as well,
        "stage3_max_live_parameters": 0,  # and none stays whole after its forward
        "stage3_max_reuse_distance": 0,
    },
    "zero_allow_untested_optimizer": True,
    "wall_clock_breakdown": False,
}
model = build()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

losses = []
for step in range(STEPS):
    x, y = batch(step, rank, ranks)
    loss = loss_of(engine(x), y)
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())

with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
    report(losses, {name: p.detach().clone() for name, p in engine.module.named_parameters()})
