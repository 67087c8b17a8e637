"""Accelerate: `prepare` wraps the model for DDP and gives each rank its share of a DataLoader.

torchrun --nproc-per-node 2 accelerated.py        or: accelerate launch --cpu --num_processes 2 accelerated.py
"""

import torch
from accelerate import Accelerator
from tiny import BATCH, STEPS, batch, build, loss_of, report
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True)
x, y = (torch.cat(parts) for parts in zip(*map(batch, range(STEPS)), strict=True))
loader = DataLoader(TensorDataset(x, y), batch_size=BATCH // accelerator.num_processes)
model = build()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

losses = []
for x, y in loader:
    loss = loss_of(model(x), y)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())

report(losses, dict(accelerator.unwrap_model(model).named_parameters()))
accelerator.end_training()
