"""What every script here trains: a GPT of four blocks on sequences that count, in plain torch.

Scripts import it as any script imports its neighbour: `torchrun --nproc-per-node 2 ddp.py` finds it beside itself.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

STEPS, BATCH, TIME, WIDTH, HEADS, WORDS = 4, 16, 64, 64, 4, 64


class Embed(nn.Module):
    """Words and positions to vectors: [batch, time] to [batch, time, width]."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(TIME, WIDTH)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.words(words) + self.positions(torch.arange(words.shape[1]))


class Attention(nn.Module):
    """Causal attention. How many heads there are follows from the width of `q`, which tensor parallelism divides."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two layers, four times as wide inside."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.mlp = nn.LayerNorm(WIDTH), MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Head(nn.Module):
    """Vectors to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.logits = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.logits(self.norm(x))


class GPT(nn.Sequential):
    """Embed, blocks, head: words [batch, time] to logits [batch, time, words]."""

    def forward(self, x: torch.Tensor, without: int = -1) -> torch.Tensor:
        for i, child in enumerate(self):
            x = x if i == without else child(x)
        return x


def build() -> GPT:
    """Return the model, with the same weights in every process."""
    torch.manual_seed(0)
    return GPT(Embed(), *(Block() for _ in range(4)), Head())


def batch(step: int, rank: int = 0, ranks: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a rank's share of a step's batch: words and the words that follow, each [batch / ranks, time]."""
    random = torch.Generator().manual_seed(step)
    begin, stride = (torch.randint(1, high, (BATCH, 1), generator=random) for high in (WORDS, 8))
    words = (begin + stride * torch.arange(TIME + 1)) % WORDS
    mine = words[rank * BATCH // ranks : (rank + 1) * BATCH // ranks]
    return mine[:, :-1], mine[:, 1:]


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy over all words."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def report(losses: list[float], weights: Mapping[str, torch.Tensor]) -> None:
    """Print this rank's losses, and the norms of the weights that it knows; or write both to the folder $REPORT.

    Args:
        losses: by step; empty on a rank that sees none.
        weights: whole weights by the model's names; of some, or none, on ranks that hold no others.
    """
    rank = int(os.environ.get("RANK", 0))
    if folder := os.environ.get("REPORT"):
        norms = {name: weight.detach().double().norm().item() for name, weight in weights.items()}
        Path(folder, f"{rank}.json").write_text(json.dumps({"losses": losses, "norms": norms}))
    else:
        print(f"rank {rank}: losses {[round(loss, 4) for loss in losses]}")
