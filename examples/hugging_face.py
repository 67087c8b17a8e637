"""The Hugging Face guide's experiment: DP against DDP, with NVLink and without, on two TITAN RTX.

Source: huggingface/transformers, docs "Efficient training on multiple GPUs" (perf_train_gpu_many): run_clm.py with
GPT-2 (124 M parameters), 4 samples of 1,024 tokens per GPU, fp32, 200 steps, PyTorch 1.8, CUDA 11.0.

    DP   with NVLink      110.6 s
    DDP  with NVLink      101.9 s
    DDP  without          131.4 s

Since these cards are not at hand, ranks run it on tensors without content (`mpkit.trace_fake`), and the replay puts it
on the hardware "2x-titan-rtx-nvlink" and "2x-titan-rtx". Two figures of the machine were fitted by bisection, so that
such a replay takes the guide's times: the share of the peak rate that a card reaches, to DDP with NVLink; then the
bandwidth without NVLink, to DDP without. How much slower DP is than DDP follows from these two and from the work that
DP does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from mpkit.common.display import data_frame
from mpkit.common.tracebacks import public
from mpkit.devices.catalogue import hardware
from mpkit.devices.hardware import Hardware
from mpkit.launch.session.cluster import Cluster, borrow_cluster
from mpkit.plan.plan import Plan
from mpkit.prediction.dry_run import trace_fake
from mpkit.strategies.models import GPT
from mpkit.timeline.timeline import Timeline
from mpkit.trace import Trace

if TYPE_CHECKING:
    import pandas as pd


BATCH, LENGTH, GPUS = 4, 1024, 2
NVLINK, NO_NVLINK = "2x-titan-rtx-nvlink", "2x-titan-rtx"
STEPS = 200
SECONDS = {("DP", True): 110.5948, ("DDP", True): 101.9003, ("DDP", False): 131.4367}
"""Seconds of `STEPS` steps by strategy, with NVLink and without: huggingface/transformers@0b3473ad,
docs/source/ko/perf_train_gpu_many.md (the English page was removed later)."""


class LanguageModel(nn.Module):
    """GPT-2 with its loss inside, like the guide's GPT2LMHeadModel.

    The head is tied to the token embedding. Attention is computed step by step, with its [batch, heads, time, time]
    scores in memory, as it was before PyTorch 2.0.

    >>> with torch.device("meta"):
    ...     model = LanguageModel()
    >>> sum(parameter.numel() for parameter in model.parameters())
    124439808
    """

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT(vocab=50257, length=LENGTH, layers=12, width=768, heads=12, dropout=0.1)
        head, embedding = self.gpt.get_submodule("head.logits"), self.gpt.get_submodule("embedding.tokens")
        head.weight = embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Map tokens and targets [batch, time] to losses by sample [batch] and logits [batch, time, vocab]."""
        with sdpa_kernel(SDPBackend.MATH):
            logits = self.gpt(tokens)
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return losses.view(targets.shape).mean(dim=1), logits


def mean_loss(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    """Return the mean loss over the batch; the logits, which are the second output, are not used."""
    return outputs[0].mean()


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Make the optimizer that is the default of run_clm.py."""
    return torch.optim.AdamW(params, lr=5e-5)


@dataclass(frozen=True)
class HFRow:
    """One of the three runs.

    Attributes:
        strategy: "DP" or "DDP".
        nvlink: whether the cards are connected by NVLink.
        seconds: the time of a step on the clock.
        published: the time of a step according to the guide.
        timeline: the timeline of the step.
    """

    strategy: str
    nvlink: bool
    seconds: float
    published: float
    timeline: Timeline

    @property
    def is_fitted(self) -> bool:
        """Whether a figure of the machine was chosen so that this row agrees with the guide."""
        return self.strategy == "DDP"


@dataclass(frozen=True)
class HFExperiment:
    """The three runs compared with the published ones; prints as a table.

    Attributes:
        rows: DDP with NVLink first; the other times are given as multiples of it.
    """

    rows: tuple[HFRow, ...]

    def ratio(self, row: HFRow) -> tuple[float, float]:
        """Return a row's time as a multiple of the first row's: on the clock, and as published."""
        return row.seconds / self.rows[0].seconds, row.published / self.rows[0].published

    def to_dataframe(self) -> pd.DataFrame:
        """Return a row per run: strategy, nvlink, seconds and ratio, both also as published, off, and fitted."""
        records = []
        for row in self.rows:
            mine, published = self.ratio(row)
            records.append(
                {
                    "strategy": row.strategy,
                    "nvlink": row.nvlink,
                    "seconds": row.seconds,
                    "published_seconds": row.published,
                    "ratio": mine,
                    "published_ratio": published,
                    "off": mine / published - 1,
                    "fitted": row.is_fitted,
                }
            )
        return data_frame(records)

    def __str__(self) -> str:
        lines = ["GPT-2 124M, 2x TITAN RTX, 4 samples per GPU     step   published   ratio   published"]
        for row in self.rows:
            mine, published = self.ratio(row)
            name = f"{row.strategy:4} {'with' if row.nvlink else 'without'} NVLink"
            times = f"{row.seconds * 1e3:5.0f} ms {row.published * 1e3:8.0f} ms {mine:7.3f} {published:9.3f}"
            lines.append(f"{name:44} {times}   {'fitted' if row.is_fitted else 'predicted'}")
        return "\n".join(lines)


@public
def hf_experiment(cluster: Cluster | None = None) -> HFExperiment:
    """Run the guide's three configurations on tensors without content, and put them on the clock of its machine.

    Args:
        cluster: any cluster, whose helper process to use; None: start one.

    Returns:
        The three rows, together with the published times: `print` it, or call `to_dataframe()`.
    """
    with borrow_cluster(cluster) as used:
        ddp = play(Plan.ddp(GPUS), hardware(NVLINK), used)
        dp = play(Plan(dp=GPUS, data_parallel="dp"), hardware(NVLINK), used)
    return HFExperiment(
        tuple(
            _row(strategy, nvlink, trace)
            for strategy, nvlink, trace in (("DDP", True, ddp), ("DP", True, dp), ("DDP", False, ddp))
        )
    )


def _row(strategy: str, nvlink: bool, trace: Trace) -> HFRow:
    timeline = Timeline.of(trace, hardware(NVLINK if nvlink else NO_NVLINK))
    return HFRow(strategy, nvlink, timeline.step_time, published_seconds(strategy, nvlink), timeline)


def published_seconds(strategy: str, nvlink: bool) -> float:
    """Return the seconds per step according to the guide.

    >>> round(published_seconds("DP", True) / published_seconds("DDP", True), 3)
    1.085
    """
    return SECONDS[strategy, nvlink] / STEPS


def play(plan: Plan, machine: Hardware, cluster: Cluster) -> Trace:
    """Record a step of the guide's training under this plan, on tensors without content."""
    tokens = torch.empty(BATCH * plan.ranks, LENGTH, dtype=torch.long, device="meta")
    return trace_fake(
        LanguageModel, plan, batch=((tokens, tokens), tokens), loss=mean_loss, optimizer=adamw,
        hardware=machine, cluster=cluster,
    )  # fmt: skip
