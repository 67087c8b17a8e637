"""Peak memory of training steps: predicted on tensors without content, beside torch.profiler's account of real ranks.

Eight models, each plain, recomputed and under ZeRO-3 on 2 ranks: tests/dry_run holds each to 3 % (`make soak`; two of
them in `make test`). Both are peaks over the same three steps of AdamW, from when a rank's part of the model is placed,
without the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from benchmarks.allocator import Peak, peak_of
from mpkit.models import GPT, next_token_loss
from mpkit.strategies.prepare.prepare import prepare
from mpkit.strategies.runtime.train import Training

STEPS, LIMIT = 3, 0.03
VOCAB, LENGTH, BATCH, WIDTH, HEADS, LAYERS = 2048, 128, 8, 128, 4, 4


# ---- models


class ResNet(nn.Module):
    """Groups of residual blocks with BatchNorm, each group of half the size: He et al., CVPR 2016, section 4.2."""

    def __init__(
        self, channels: int, outputs: int, *, width: int, groups: tuple[int, ...] = (2, 2, 2)
    ) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        wide = [width * 2**i for i in range(len(groups))]
        self.groups = nn.ModuleList(
            nn.Sequential(
                Basic(before, after, 1 if before == after else 2),
                *(Basic(after, after) for _ in range(n - 1)),
            )
            for before, after, n in zip([width, *wide], wide, groups, strict=False)
        )
        self.head = nn.Linear(wide[-1], outputs)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, channels, height, width] -> [batch, outputs]."""
        x = F.relu(self.norm(self.stem(x)))
        for group in self.groups:
            x = group(x)
        scores: Tensor = self.head(x.mean(dim=(2, 3)))
        return scores


class Basic(nn.Module):
    """relu(x + two normalized convolutions of x)."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm1, self.norm2, self.relu = (
            nn.BatchNorm2d(outputs),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        )
        short = nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential(*(short if inputs != outputs else ()))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, inputs, h, w] -> [batch, outputs, h/stride, w/stride]."""
        y: Tensor = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        total: Tensor = self.relu(y + self.shortcut(x))
        return total


def built(kind: str, config: str, **sizes: Any) -> Callable[[], nn.Module]:
    """Return what makes a model of transformers with random weights."""

    def build() -> nn.Module:
        import transformers

        made: nn.Module = getattr(transformers, kind)(getattr(transformers, config)(**sizes))
        return made

    return build


OF_LAYERS = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
OF_TOKENS = {"vocab_size": VOCAB, "max_position_embeddings": LENGTH}


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
    "GPT": Case(
        lambda: GPT(vocab=VOCAB, length=LENGTH, layers=LAYERS, width=WIDTH, heads=HEADS), tokens, next_token_loss
    ),
    "HF GPT-2": Case(  # whose head is tied to its embedding
        built(
            "GPT2LMHeadModel", "GPT2Config", vocab_size=VOCAB, n_positions=LENGTH, n_embd=WIDTH, n_layer=LAYERS,
            n_head=HEADS, use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None,
            eos_token_id=None,
        ), tokens, of_logits,
    ),
    "HF Llama": Case(  # with grouped-query attention
        built(
            "LlamaForCausalLM", "LlamaConfig", **OF_LAYERS, **OF_TOKENS, intermediate_size=352, num_key_value_heads=2,
            use_cache=False,
        ), tokens, of_logits,
    ),
    "HF BERT": Case(
        built("BertForMaskedLM", "BertConfig", **OF_LAYERS, **OF_TOKENS, **NO_DROPOUT, intermediate_size=4 * WIDTH),
        tokens, of_logits,
    ),
    "ResNet": Case(lambda: ResNet(3, 10, width=32), lambda: pictures(32), F.cross_entropy),
    "HF ViT": Case(
        built(
            "ViTForImageClassification", "ViTConfig", **OF_LAYERS, **NO_DROPOUT, intermediate_size=4 * WIDTH,
            image_size=64, patch_size=8, num_labels=100,
        ), lambda: pictures(64), of_logits,
    ),
    "HF Mixtral": Case(  # whose experts are one grouped product
        built(
            "MixtralForCausalLM", "MixtralConfig", **(OF_LAYERS | {"num_hidden_layers": 2}), **OF_TOKENS,
            intermediate_size=2 * WIDTH, num_key_value_heads=2, num_local_experts=4, use_cache=False,
        ), tokens, of_logits,
    ),
    "LSTM": Case(LSTM, tokens, next_token_loss),
}  # fmt: skip
PLANS = {"plain": mk.Plan.serial(), "recomputed": mk.Plan(recompute="full"), "zero3": mk.Plan.zero(3, 2)}


# ---- predicted and real


def errors(case: Case, plan: mk.Plan, cluster: mk.Cluster) -> list[float]:
    """Return by how much each rank's predicted peak is off, relative to torch.profiler's.

    Args:
        case: what is trained.
        plan: how.
        cluster: real ranks for the plan.
    """
    real = cluster.run(_profiled, case, plan)
    shapes = tuple(torch.empty_like(tensor, device="meta") for tensor in case.batch())
    trace = mk.trace_fake(
        case.model_fn, plan, batch=shapes, loss=case.loss, optimizer=adamw, steps=STEPS, hardware="cpu", cluster=cluster
    )  # fmt: skip
    predicted = [sum(held.values()) for held in mk.Timeline.of(trace).memory]
    return [
        nbytes / min(max(nbytes, peak.least), peak.most) - 1
        for nbytes, peak in zip(predicted, real, strict=True)
    ]


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
