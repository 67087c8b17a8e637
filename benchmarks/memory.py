"""Peak memory of training steps: predicted on tensors without content, beside torch.profiler's account of real ranks.

python -m benchmarks.memory            eight models, each plain, recomputed and under ZeRO-3 on 2 ranks: a table
python -m benchmarks.memory ViT zero3  those with one of these words in their model's or plan's name

Ends with exit code 1 where a prediction is more than 3 % off. Both are peaks over the same three steps of AdamW, from
when a rank's part of the model is placed, without the batch; of a plan with several ranks the worst one is shown.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from benchmarks.allocator import Peak, peak_of
from mpkit.models import GPT, ResNet, next_token_loss
from mpkit.prediction.dry_run.trace import played_memory
from mpkit.strategies.prepare.prepare import prepare
from mpkit.strategies.runtime.train import Training

__all__ = ["CASES", "PLANS", "Case", "Row", "compare"]

STEPS, LIMIT = 3, 0.03
VOCAB, LENGTH, BATCH, WIDTH, HEADS, LAYERS = 2048, 128, 8, 128, 4, 4


# ---- models


def gpt() -> nn.Module:
    """Return the kit's GPT."""
    return GPT(vocab=VOCAB, length=LENGTH, layers=LAYERS, width=WIDTH, heads=HEADS)


def gpt2() -> nn.Module:
    """Return transformers' GPT-2, whose head is tied to its embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB, n_positions=LENGTH, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def llama() -> nn.Module:
    """Return transformers' Llama, with grouped-query attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=352, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=2, max_position_embeddings=LENGTH, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def bert() -> nn.Module:
    """Return transformers' BERT."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH, max_position_embeddings=LENGTH, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForMaskedLM(config)


def resnet() -> nn.Module:
    """Return the kit's ResNet."""
    return ResNet(3, 10, width=32)


def vit() -> nn.Module:
    """Return transformers' ViT."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS, intermediate_size=4 * WIDTH,
        image_size=64, patch_size=8, num_labels=100, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return ViTForImageClassification(config)


def mixtral() -> nn.Module:
    """Return transformers' Mixtral, whose experts are one grouped product."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=2,
        num_attention_heads=HEADS, num_key_value_heads=2, num_local_experts=4, max_position_embeddings=LENGTH,
        use_cache=False,
    )  # fmt: skip
    return MixtralForCausalLM(config)


class LSTM(nn.Module):
    """A language model of two recurrent layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of a batch of tokens."""
        logits: Tensor = self.head(self.layers(self.embedding(x))[0])
        return logits


# ---- data and losses


def tokens() -> tuple[Tensor, Tensor]:
    """Return a batch of tokens and their targets."""
    return torch.zeros(BATCH, LENGTH, dtype=torch.long), torch.zeros(BATCH, LENGTH, dtype=torch.long)


def pictures(size: int) -> tuple[Tensor, Tensor]:
    """Return a batch of pictures and their classes."""
    return torch.randn(32, 3, size, size), torch.zeros(32, dtype=torch.long)


def of_logits(output: Any, targets: Tensor) -> Tensor:
    """Return the cross entropy of a transformers model's output."""
    return F.cross_entropy(output.logits.reshape(targets.numel(), -1), targets.flatten())


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Return the optimizer."""
    return torch.optim.AdamW(parameters, lr=1e-3)


class Case(NamedTuple):
    """What is trained."""

    model_fn: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[Any, Any], Tensor]


CASES = {
    "GPT": Case(gpt, tokens, next_token_loss),
    "HF GPT-2": Case(gpt2, tokens, of_logits),
    "HF Llama": Case(llama, tokens, of_logits),
    "HF BERT": Case(bert, tokens, of_logits),
    "ResNet": Case(resnet, lambda: pictures(32), F.cross_entropy),
    "HF ViT": Case(vit, lambda: pictures(64), of_logits),
    "HF Mixtral": Case(mixtral, tokens, of_logits),
    "LSTM": Case(LSTM, tokens, next_token_loss),
}
PLANS = {"plain": mk.Plan.serial(), "recomputed": mk.Plan(recompute="full"), "zero3": mk.Plan.zero(3, 2)}


# ---- predicted and real


class Row(NamedTuple):
    """The peaks of a rank.

    Attributes:
        predicted: bytes.
        real: torch.profiler's.
        off: by how much the prediction is off, relative to the real peak.
    """

    predicted: int
    real: Peak
    off: float


def compare(case: Case, plan: mk.Plan, cluster: mk.Cluster) -> list[Row]:
    """Return the peaks of each rank.

    Args:
        case: what is trained.
        plan: how.
        cluster: real ranks for the plan.
    """
    real = cluster.run(_profiled, case, plan)
    shapes = tuple(torch.empty_like(tensor, device="meta") for tensor in case.batch())
    held = played_memory(
        case.model_fn, plan, shapes, case.loss, adamw, steps=STEPS, hardware="cpu", cluster=cluster
    )
    rows = []
    for rank, peak in enumerate(real):
        predicted = sum(held[rank].values())
        nearest = min(max(predicted, peak.least), peak.most)
        rows.append(Row(predicted, peak, predicted / nearest - 1))
    return rows


def _profiled(ctx: mk.Context, case: Case, plan: mk.Plan) -> Peak:
    """Return the peak of this rank's allocator in the steps of a training."""
    torch.manual_seed(0)
    job = prepare(
        case.model_fn(), [case.batch()], plan,
        loss=case.loss, optimizer=adamw, steps=STEPS, ranks=plan.ranks,
    )  # fmt: skip

    def run() -> None:
        training = Training(ctx, job.with_model(case.model_fn()))
        with torch.profiler.record_function("steps"):
            for step in range(STEPS):
                training.step(step)

    return peak_of(run, during="steps")


def main(words: list[str]) -> int:
    """Print the table; return 1 if a prediction is more than 3 % off."""
    table = Table(title=f"Peak memory of a rank, torch {torch.__version__}")
    for column in ("model", "plan", "predicted MB", "torch.profiler MB", "off"):
        table.add_column(column, justify="left" if column in ("model", "plan") else "right")
    worst = 0.0
    for name, plan in PLANS.items():
        with mk.Cluster(plan.ranks, device="cpu") as cluster:
            for model, case in CASES.items():
                if words and not any(word in f"{model} {name}" for word in words):
                    continue
                row = max(compare(case, plan, cluster), key=lambda row: abs(row.off))
                worst = max(worst, abs(row.off))
                real = " to ".join(
                    dict.fromkeys(f"{nbytes / 1e6:.2f}" for nbytes in (row.real.least, row.real.most))
                )
                table.add_row(model, name, f"{row.predicted / 1e6:.2f}", real, f"{row.off:+.2%}")
    Console().print(table)
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
