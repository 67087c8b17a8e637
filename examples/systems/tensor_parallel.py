"""DTensor's tensor parallelism, with sequence parallelism: between the divided layers each rank has half of the words.

torchrun --nproc-per-node 2 tensor_parallel.py            Megatron's, with sequence parallelism
torchrun --nproc-per-node 2 tensor_parallel.py whole      without: every rank has all words between layers
"""

import sys

import torch
import torch.distributed as dist
from tiny import STEPS, batch, build, loss_of, report
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

dist.init_process_group()
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
words, everything = Shard(1), Replicate()

plan = {name: ColwiseParallel() for name in ("attention.q", "attention.k", "attention.v", "mlp.up")}
plan |= {name: RowwiseParallel() for name in ("attention.out", "mlp.down")}
# q, k and v read one DTensor, so that the gradients of their inputs are added before they are reduced, once.
plan["attention"] = PrepareModuleInput(input_layouts=everything, desired_input_layouts=everything)
model = build()
if sys.argv[1:] != ["whole"]:
    gather = PrepareModuleInput(input_layouts=words, desired_input_layouts=everything)
    scatter = RowwiseParallel(output_layouts=words)
    plan |= {"norm1": SequenceParallel(), "norm2": SequenceParallel(), "attention": gather, "mlp": gather}
    plan |= {"attention.out": scatter, "mlp.down": scatter}
    split = PrepareModuleOutput(
        output_layouts=everything, desired_output_layouts=words, use_local_output=True
    )
    parallelize_module(model[0], mesh, split)
    head = {
        "norm": SequenceParallel(),
        "logits": ColwiseParallel(input_layouts=words, output_layouts=everything),
    }
    parallelize_module(model[-1], mesh, head)
for block in model[1:-1]:
    parallelize_module(block, mesh, plan)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)

losses = []
for step in range(STEPS):
    loss = loss_of(model(batch(step)[0]), batch(step)[1])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())

report(losses, {name: getattr(p, "full_tensor", lambda p=p: p)() for name, p in model.named_parameters()})
dist.destroy_process_group()
