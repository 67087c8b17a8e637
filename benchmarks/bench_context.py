"""Context parallelism beside PyTorch's ring attention, step by step in the same processes.

On each rank both sides train a GPT with 4 M parameters on sequences of 1,024 tokens, of which each rank has the k-th
piece from the front and from the back; gradients are averaged as in DDP. A pair's ratio is that of the slowest rank's
times. mpkit records all the while, the other side does not. Before anything is timed, both train 3 steps to the same
losses.

torch's `context_parallel` does not run on a CPU: torch 2.13 has no sharding strategy for
`_scaled_dot_product_flash_attention_for_cpu`. The ring inside of it takes any kernel. So the other side calls that
ring with the kernel of CPUs, which both sides use, and the rest is plain PyTorch with DistributedDataParallel.

Each side's peak memory is measured as `benchmarks.pairing` says.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import cloudpickle
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from benchmarks.pairing import Step, compared, compared_peaks, pairs, peak_memory
from mpkit.data import text_batches
from mpkit.models import GPT, next_token_loss
from mpkit.strategies.job.job import TrainJob
from mpkit.strategies.prepare.prepare import prepare
from mpkit.strategies.runtime.train import Training

ROUNDS, WARM_UP = 9, 2
LENGTH, BATCH = 1024, 2
AGAINST = "torch's ring attention"
PLANS = {f"cp={n}": mk.Plan(cp=n, cp_order="zigzag") for n in (2, 4)}

aten = torch.ops.aten


def model() -> GPT:
    """Build a GPT with 4 M parameters."""
    torch.manual_seed(0)
    return GPT(layers=2, width=384, heads=6, length=LENGTH)


def adamw(params: Any) -> torch.optim.Optimizer:
    """Build the optimizer that both sides use."""
    return torch.optim.AdamW(params, lr=1e-4)


# ---------------------------------------------------------------- one side on one rank


def prepared(name: str) -> TrainJob:
    """Prepare the job for the ranks of mpkit; in `Cluster.train` the caller's process does so."""
    job = prepare(
        model(), text_batches(BATCH, LENGTH, 4), PLANS[name],
        loss=next_token_loss, optimizer=adamw, steps=1000, ranks=PLANS[name].cp,
    )  # fmt: skip
    return job.with_model(nn.Module())  # so that the memory of the prepared model is freed


def trained(ctx: Any, job: TrainJob) -> Step:
    """Return a function that runs one training step of a job, on a model that is made here as theirs is."""
    return Training(ctx, job.with_model(model())).step


class Ring(torch.autograd.Function):
    """torch's ring around the kernel of CPUs: causal attention of tensors [batch, heads, time / n, width]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from torch.distributed.tensor.experimental._context_parallel import _attention

        def attend(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> tuple[Tensor, Tensor]:
            return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal)

        out, lse = _attention._templated_ring_attention(dist.group.WORLD, 2, attend, q, k, v, is_causal=True)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, ...]:
        from torch.distributed.tensor.experimental._context_parallel import _attention

        def differentiate(
            *, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
            is_causal: bool,
        ) -> tuple[Tensor, ...]:  # fmt: skip
            return aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad_out, query, key, value, out, logsumexp, 0.0, is_causal
            )

        q, k, v, out, lse = ctx.saved_tensors
        return _attention._templated_ring_attention_backward(
            dist.group.WORLD, 2, differentiate, grad_out, "grad_out", q, k, v, out, lse, is_causal=True
        )[:3]


class Theirs:
    """A rank's part of a training with PyTorch alone.

    Attributes:
        losses: the losses of the rank's share of each sequence.
    """

    def __init__(self, ctx: Any) -> None:
        from torch.nn.parallel import DistributedDataParallel

        n, net = ctx.world_size, model()
        pieces = (ctx.rank, 2 * n - 1 - ctx.rank)
        net.embedding.pieces = pieces
        self._net = DistributedDataParallel(net, gradient_as_bucket_view=True)
        self._optimizer = adamw(self._net.parameters())

        def mine(tokens: Tensor) -> Tensor:
            parts = tokens.chunk(2 * n, 1)
            return torch.cat([parts[i] for i in pieces], 1)

        self._batches = [(mine(x), mine(y)) for x, y in text_batches(BATCH, LENGTH, 4)]
        self.losses: list[float] = []

    def step(self, number: int) -> None:
        """Run one training step."""
        inputs, targets = self._batches[number % len(self._batches)]
        self._optimizer.zero_grad()
        with patch.object(F, "scaled_dot_product_attention", lambda q, k, v, **_: Ring.apply(q, k, v)):
            loss = next_token_loss(self._net(inputs), targets)
        loss.backward()
        self.losses.append(loss.item())
        self._optimizer.step()


# ---------------------------------------------------------------- measuring


def both(ctx: Any, name: str) -> list[tuple[float, float]]:
    """Return the seconds of a step of ours and of theirs, one pair per round."""
    return pairs(trained(ctx, prepared(name)), Theirs(ctx).step, ROUNDS, WARM_UP)


def their_losses(ctx: Any, steps: int) -> list[float]:
    """Return the losses of their first steps."""
    training = Theirs(ctx)
    for number in range(steps):
        training.step(number)
    return training.losses


def check_same(cluster: mk.Cluster, name: str, steps: int = 3) -> None:
    """Check that both sides compute the same losses."""
    run = cluster.train(
        model(), text_batches(BATCH, LENGTH, 4), PLANS[name],
        loss=next_token_loss, optimizer=adamw, steps=steps,
    )  # fmt: skip
    mine = torch.tensor(run.wait().losses)
    other = torch.tensor(cluster.run(their_losses, steps)).mean(0)
    torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


def peak(ctx: Any, name: str, side: str) -> int:
    """Return the most bytes that the allocator held on this rank."""
    if side == "theirs":
        return peak_memory(lambda: Theirs(ctx).step)
    job = cloudpickle.dumps(prepared(name))
    return peak_memory(lambda: trained(ctx, cloudpickle.loads(job)))


def measure() -> Iterator[dict[str, Any]]:
    """Yield the rows of the table; those of the pairs that are named on the command line, if any is."""
    for name in [name for name in PLANS if name in sys.argv] or list(PLANS):
        with mk.Cluster(PLANS[name].cp, device="cpu") as cluster:
            check_same(cluster, name)
            title = f"context parallel: a step of {name}"
            yield compared(title, AGAINST, cluster.run(both, name))
            title = f"context parallel: peak memory of {name}"
            yield compared_peaks(title, AGAINST, cluster, peak, name)
