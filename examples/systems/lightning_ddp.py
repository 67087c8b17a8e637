"""PyTorch Lightning with its DDP strategy, on ranks that torchrun has started.

torchrun --nproc-per-node 2 lightning_ddp.py
"""

import warnings

import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.environments import TorchElasticEnvironment
from pytorch_lightning.strategies import DDPStrategy
from tiny import BATCH, STEPS, batch, build, loss_of, report
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

warnings.filterwarnings("ignore", message=".*does not have many workers.*")


class Tiny(pl.LightningModule):
    """The model, its loss and its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = build()
        self.losses: list[float] = []

    def training_step(self, sample: list[torch.Tensor], _index: int) -> torch.Tensor:
        x, y = sample
        loss = loss_of(self.gpt(x), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


trainer = pl.Trainer(
    accelerator="cpu",
    devices=2,
    max_epochs=1,
    strategy=DDPStrategy(process_group_backend="gloo"),
    plugins=[TorchElasticEnvironment()],
    use_distributed_sampler=False,  # Lightning's own shuffles
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
x, y = (torch.cat(parts) for parts in zip(*map(batch, range(STEPS)), strict=True))
samples = TensorDataset(x, y)
mine = DistributedSampler(samples, trainer.world_size, trainer.global_rank, shuffle=False)
model = Tiny()
trainer.fit(model, DataLoader(samples, batch_size=BATCH // 2, sampler=mine))
report(model.losses, dict(model.gpt.named_parameters()))
