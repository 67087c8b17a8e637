"""Hugging Face's Trainer with a small GPT-2: torchrun's environment makes it data parallel.

torchrun --nproc-per-node 2 trainer.py
"""

import tempfile

import torch
from tiny import BATCH, STEPS, TIME, WORDS, batch, loss_of, report
from torch import nn
from torch.utils.data import Dataset, SequentialSampler


class GPT2(nn.Module):
    """transformers' GPT-2, with a loss over given targets."""

    def __init__(self) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        super().__init__()
        self.gpt2 = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=WORDS, n_positions=TIME, n_embd=64, n_layer=4, n_head=4,
                resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
                bos_token_id=None, eos_token_id=None,
            )
        )  # fmt: skip

    def forward(self, input_ids: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.gpt2(input_ids=input_ids).logits
        return {"loss": loss_of(logits, targets), "logits": logits}


def build() -> GPT2:
    torch.manual_seed(0)
    return GPT2()


class Sequences(Dataset):
    """The sequences of all steps, in order."""

    def __init__(self) -> None:
        self.x, self.y = (torch.cat(parts) for parts in zip(*map(batch, range(STEPS)), strict=True))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.x[i], "targets": self.y[i]}


def main() -> None:
    from transformers import Trainer, TrainingArguments

    losses: list[float] = []

    class InOrder(Trainer):
        """Trainer, with samples in their order and each rank's own losses kept."""

        def _get_train_sampler(self, *_: object) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

        def compute_loss(self, *args: object, **kwargs: object) -> torch.Tensor:
            loss = super().compute_loss(*args, **kwargs)
            losses.append(loss.item())
            return loss

    model = build()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, use_cpu=True, max_steps=STEPS, per_device_train_batch_size=BATCH // 2, learning_rate=1e-3,
            lr_scheduler_type="constant", weight_decay=0.01, max_grad_norm=0.0, optim="adamw_torch",
            save_strategy="no", report_to=[], logging_strategy="no", disable_tqdm=True,
            ddp_find_unused_parameters=False,
        )  # fmt: skip
        InOrder(model, arguments, train_dataset=Sequences()).train()
    report(losses, dict(model.named_parameters()))


if __name__ == "__main__":
    main()
