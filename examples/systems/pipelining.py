"""torch.distributed.pipelining: two ranks, two or four stages, micro-batches of two samples.

torchrun --nproc-per-node 2 pipelining.py gpipe
torchrun --nproc-per-node 2 pipelining.py 1f1b
torchrun --nproc-per-node 2 pipelining.py interleaved     two stages per rank: 0 and 2, 1 and 3
torchrun --nproc-per-node 2 pipelining.py zbv             two stages per rank in a V: 0 and 3, 1 and 2
"""

import sys

import torch
import torch.distributed as dist
from tiny import STEPS, batch, build, loss_of, report
from torch.distributed import pipelining

MICROBATCHES = 8

dist.init_process_group()
rank, ranks = dist.get_rank(), dist.get_world_size()
variant = sys.argv[1] if len(sys.argv) > 1 else "1f1b"

# Which children of the model are in which stage, and which stages are on this rank?
if variant in ("gpipe", "1f1b"):
    cuts, mine = [0, 3, 6], [rank]
else:
    cuts, mine = [0, 2, 3, 4, 6], [rank, 3 - rank if variant == "zbv" else rank + 2]
model = build()
last = len(cuts) - 2
parts = {stage: model[cuts[stage] : cuts[stage + 1]] for stage in mine}
stages = [pipelining.PipelineStage(parts[stage], stage, last + 1, torch.device("cpu")) for stage in mine]
if variant == "gpipe":
    schedule = pipelining.ScheduleGPipe(stages[0], MICROBATCHES, loss_fn=loss_of)
elif variant == "1f1b":
    schedule = pipelining.Schedule1F1B(stages[0], MICROBATCHES, loss_fn=loss_of)
elif variant == "interleaved":
    schedule = pipelining.ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=loss_of)
else:
    schedule = pipelining.ScheduleZBVZeroBubble(stages, MICROBATCHES, loss_fn=loss_of)
optimizer = torch.optim.AdamW([p for part in parts.values() for p in part.parameters()], lr=1e-3)

losses = []
for step in range(STEPS):
    x, y = batch(step)
    of_microbatches: list[torch.Tensor] = []
    inputs = (x,) if 0 in mine else ()
    targets = {"target": y, "losses": of_microbatches} if last in mine else {}
    schedule.step(*inputs, **targets)
    optimizer.step()
    optimizer.zero_grad()
    if last in mine:
        losses.append(torch.stack(of_microbatches).mean().item())

weights = {name: weight for part in parts.values() for name, weight in part.named_parameters()}
report(losses, weights)
dist.destroy_process_group()
