"""A small GPT: a chain of embedding, blocks and head."""

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpkit.common.calls import answers
from mpkit.common.tracebacks import public
from mpkit.strategies.models.experts import MixtureOfExperts

OF_EXPERTS = ("shared_experts", "aux_loss", "z_loss", "bias_rate")

INTO_STREAM = ("attention.out.weight", "mlp.out.weight", "mlp.experts.down", "mlp.shared.down.weight")
"""Parameters whose product is added to the residual stream."""


@dataclass(frozen=True)
class GPTConfig:
    """The sizes of a GPT.

    Attributes:
        vocab: V, the number of tokens; 256 for bytes.
        length: s, the longest sequence.
        layers: l, the number of blocks.
        width: h, the width of the residual stream.
        heads: a, the number of attention heads, which must divide the width.
        dropout: the dropout rate; with 0, a pipeline repeats results exactly.
        experts: E, the number of experts in place of each block's MLP; 0: an MLP.
        top_k: k, how many of them each token visits.
        shared_experts, aux_loss, z_loss, bias_rate: as in `MixtureOfExperts`.
    """

    vocab: int = 256
    length: int = 64
    layers: int = 4
    width: int = 64
    heads: int = 4
    dropout: float = 0.0
    experts: int = 0
    top_k: int = 2
    shared_experts: int = 0
    aux_loss: float = 0.0
    z_loss: float = 0.0
    bias_rate: float = 0.0

    def __post_init__(self) -> None:
        for name in ("vocab", "length", "layers", "width", "heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"GPTConfig({name}={getattr(self, name)}): {name} is 1 or more.")
        given = [name for name in OF_EXPERTS if getattr(self, name)]
        if given and not self.experts:
            name = given[0]
            raise ValueError(
                f"GPTConfig({name}={getattr(self, name)}) is for models with experts, and there are none: "
                f"experts=8, {name}={getattr(self, name)}"
            )
        if self.width % self.heads:
            heads = max(n for n in range(1, self.heads + 1) if self.width % n == 0)
            raise ValueError(
                f"GPTConfig(width={self.width}, heads={self.heads}): the heads share the width equally, so they must "
                f"divide it: heads={heads} does."
            )


ELSEWHERE = {
    "width= is the width of the residual stream.": ("d_model", "hidden_size", "n_embd", "hidden"),
    "layers= is the number of blocks.": ("n_layer", "n_layers", "num_layers", "num_hidden_layers"),
    "heads= is the number of them.": ("n_head", "n_heads", "num_heads", "num_attention_heads"),
    "length= is the longest sequence.": ("block_size", "n_positions", "seq_len", "sequence", "context"),
    "experts= is the number of them in each block.": ("n_experts", "num_experts"),
}
"""The name of each size of a GPT here, and its names in other libraries."""
answer_of = {name: answer for answer, names in ELSEWHERE.items() for name in names}
answered = answers("GPT(layers=8, width=128)", answer_of)(GPTConfig.__init__)
setattr(GPTConfig, "__init__", public(answered))  # noqa: B010


class GPT(nn.Sequential):
    """A decoder-only transformer: tokens [batch, time] to logits [batch, time, vocab].

    The nn.Sequential of `embedding`, `block0`, `block1`, ..., `head` can be cut into stages.
    Source: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019 (GPT-2: layer norms before
    attention and MLP, initialization scaled down by depth); the head is not tied to the embedding.

    >>> model = GPT(layers=2, width=32)
    >>> model(torch.zeros(3, 10, dtype=torch.long)).shape
    torch.Size([3, 10, 256])
    >>> GPT(layers=2, width=32, experts=8, top_k=2).block0.mlp.experts.up.shape
    torch.Size([8, 128, 32])

    Args:
        config: the sizes; individual sizes may be given by name instead.
    """

    def __init__(self, config: GPTConfig | None = None, **sizes: Any) -> None:
        if not isinstance(config, GPTConfig | None):
            raise ValueError(f"GPT({config!r:.40}): sizes are given by name: GPT(layers=8, width=128)")
        config = replace(config, **sizes) if config else GPTConfig(**sizes)
        blocks = ((f"block{i}", Block(config)) for i in range(config.layers))
        super().__init__(OrderedDict([("embedding", Embedding(config)), *blocks, ("head", Head(config))]))
        self.config = config
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() > 1:
                # The more blocks add to the residual stream, the smaller each contribution.
                into_stream = name.endswith(INTO_STREAM)
                nn.init.normal_(parameter, std=0.02 / (2 * config.layers) ** 0.5 if into_stream else 0.02)


class Embedding(nn.Module):
    """Map tokens [batch, time] to vectors [batch, time, width]: the token's embedding plus that of its position."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.length, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.pieces: tuple[int, ...] = (0,)  # which equally long pieces of the sequence the tokens are

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """[batch, time] -> [batch, time, width]; positions [batch, time], unless they are those of one text."""
        if positions is None:
            positions = self._count_positions(tokens)
        return self.dropout(self.tokens(tokens) + self.positions(positions))

    def _count_positions(self, tokens: Tensor) -> Tensor:
        piece, longest = tokens.shape[1] // len(self.pieces), self.positions.num_embeddings
        time = piece * (1 + max(self.pieces))
        if time > longest:
            raise ValueError(f"sequences of {time} tokens, and this GPT has length={longest}")
        spans = [torch.arange(i * piece, (i + 1) * piece, device=tokens.device) for i in self.pieces]
        return torch.cat(spans)


class Block(nn.Module):
    """Attention, then an MLP or experts, each added to the residual stream x [batch, time, width]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp: nn.Module
        if config.experts:
            options = {name: getattr(config, name) for name in ("dropout", *OF_EXPERTS)}
            self.mlp = MixtureOfExperts(config.width, config.experts, config.top_k, **options)
        else:
            self.mlp = FeedForward(config)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, width] -> the same."""
        x = x + self.attention(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return x


class Attention(nn.Module):
    """Causal self-attention: each position attends to itself and to earlier positions."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads, self.head_dim = config.heads, config.width // config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, width] -> the same."""
        batch, time, _ = x.shape
        # 3 of [batch, heads, time, width/heads]; a tensor-parallel rank has some of the heads
        q, k, v = self.qkv(x).view(batch, time, 3, -1, self.head_dim).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.dropout(self.out(y.transpose(1, 2).reshape(batch, time, -1)))


class FeedForward(nn.Module):
    """A linear map to four times the width, a GELU, and a linear map back."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.out = nn.Linear(4 * config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, width] -> the same."""
        return self.dropout(self.out(F.gelu(self.up(x))))


class Head(nn.Module):
    """Map vectors [batch, time, width] to logits [batch, time, vocab]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.logits = nn.Linear(config.width, config.vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, width] -> [batch, time, vocab]."""
        return self.logits(self.norm(x))


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats of logits [batch, time, vocab] against targets [batch, time].

    >>> round(next_token_loss(torch.zeros(1, 2, 256), torch.tensor([[7, 8]])).item(), 3)  # ln 256
    5.545
    """
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
