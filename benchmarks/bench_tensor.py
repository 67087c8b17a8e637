"""Tensor parallelism beside PyTorch's parallelize_module, step by step in the same processes.

    TP             4 ranks: column and row layers of every block, embedding, head and cross-entropy by tokens; beside
                   ColwiseParallel and RowwiseParallel, and loss_parallel
    TP + SP        the same with everything between these layers divided by sequence; beside SequenceParallel
    ZeRO-3 x TP    2 replicas of 2 ranks; beside FSDP2's fully_shard of every block over the replicas of the same

On each rank both sides train the kit's own GPT with 11 M parameters, alternating step by step, with all ranks starting
together; a pair's ratio is that of the slowest rank's times, and may be 1.1 at most. mpkit records all the while, the
other side does not. Before anything is timed, both train 3 steps to the same losses.

PyTorch cuts the rows of a weight into equal parts, which for a fused q, k, v would give a rank rows of q alone. So on
its side the rows are in another order, with the heads of rank 0 first. Each rank computes the same on both sides.

Each side's peak memory is measured as `benchmarks.pairing` says. A rank of mpkit begins by reading what the caller has
prepared, including the whole model; a rank of PyTorch begins by making the model.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn

import mpkit as mk
from benchmarks.pairing import Step, compared, compared_peaks, pairs, peak_memory
from mpkit.data import text_batches
from mpkit.models import GPT, next_token_loss
from mpkit.strategies.prepare.prepare import TrainJob, prepare
from mpkit.strategies.runtime.train import Training

RANKS = 4
ROUNDS, WARM_UP = 15, 3
LENGTH, BATCH = 64, 8

PLANS = {
    "TP": mk.Plan.tp(4),
    "TP + SP": mk.Plan.tp(4, sequence_parallel=True),
    "ZeRO-3 x TP": mk.Plan(zero=3, dp=2, tp=2),
}
THEIRS = {
    "TP": "torch's parallelize_module",
    "TP + SP": "torch's parallelize_module with SequenceParallel",
    "ZeRO-3 x TP": "FSDP2 of torch's parallelize_module",
}


def model() -> GPT:
    """Build a GPT with 11 M parameters, whose heads can be divided among 4 ranks."""
    torch.manual_seed(0)
    return GPT(layers=6, width=384, heads=8, length=LENGTH)


def adamw(params: Any) -> torch.optim.Optimizer:
    """Build the optimizer that both sides use."""
    return torch.optim.AdamW(params, lr=1e-4)


# ---------------------------------------------------------------- one side on one rank


def prepared(name: str) -> TrainJob:
    """Prepare the job for the ranks of mpkit; in `Cluster.train` the caller's process does so."""
    return prepare(
        model(), text_batches(BATCH, LENGTH, 4), PLANS[name],
        loss=next_token_loss, optimizer=adamw, steps=1000, ranks=RANKS,
    )  # fmt: skip


def ours(ctx: Any, name: str) -> Step:
    """Return a function that runs one training step with mpkit."""
    return Training(ctx, prepared(name)).step


class Theirs:
    """A rank's part of a training with PyTorch alone.

    Attributes:
        losses: the losses of the rank's share of each batch.
    """

    def __init__(self, ctx: Any, name: str) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import parallelize_module

        plan = PLANS[name]
        mesh = init_device_mesh("cpu", (plan.dp, plan.tp), mesh_dim_names=("dp", "tp"))
        self._net = model()
        by_rank(self._net, plan.tp)
        parallelize_module(self._net, mesh["tp"], layers_of(self._net, sequence=plan.sequence_parallel))
        if plan.zero:
            for layer in self._net.children():
                fully_shard(layer, mesh=mesh["dp"])
            fully_shard(self._net, mesh=mesh["dp"])
        self._optimizer = adamw(self._net.parameters())
        i = mesh["dp"].get_local_rank()
        self._batches = [(x[i :: plan.dp], y[i :: plan.dp]) for x, y in text_batches(BATCH, LENGTH, 4)]
        self.losses: list[float] = []

    def step(self, number: int) -> None:
        """Run one training step."""
        from torch.distributed.tensor.parallel import loss_parallel

        inputs, targets = self._batches[number % len(self._batches)]
        self._optimizer.zero_grad()
        with loss_parallel():
            loss = next_token_loss(self._net(inputs), targets)
            loss.backward()
        self.losses.append(loss.item())
        self._optimizer.step()


def theirs(ctx: Any, name: str) -> Step:
    """Return a function that runs one training step with PyTorch alone."""
    return Theirs(ctx, name).step


def by_rank(net: GPT, t: int) -> None:
    """Put the rows of each fused q, k, v in order of ranks: q, k, v of the first rank's heads, then the next's."""
    for layer in net.modules():
        fused = getattr(layer, "qkv", None)
        if isinstance(fused, nn.Linear):
            for parameter in fused.parameters():
                parameter.data = _in_order_of_ranks(parameter.data, t)


def _in_order_of_ranks(rows: Tensor, t: int) -> Tensor:
    return rows.view(3, t, -1, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)


def layers_of(net: GPT, *, sequence: bool) -> dict[str, Any]:
    """Return the plan for `parallelize_module`: the parallel style of each layer."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    between = Shard(1) if sequence else Replicate()
    found: dict[str, Any] = {
        "embedding.tokens": RowwiseParallel(input_layouts=Replicate()),
        "head.logits": ColwiseParallel(input_layouts=between, use_local_output=False),
    }
    if sequence:
        found["head.norm"] = SequenceParallel()
    for name, _ in net.named_children():
        if not name.startswith("block"):
            continue
        found |= {
            f"{name}.attention.qkv": ColwiseParallel(),
            f"{name}.attention.out": RowwiseParallel(output_layouts=between),
            f"{name}.mlp.up": ColwiseParallel(),
            f"{name}.mlp.out": RowwiseParallel(output_layouts=between),
        }
        if sequence:
            for norm, layer in (("norm1", "attention"), ("norm2", "mlp")):
                found[f"{name}.{norm}"] = SequenceParallel()
                found[f"{name}.{layer}"] = PrepareModuleInput(
                    input_layouts=Shard(1), desired_input_layouts=Replicate()
                )
    if sequence:
        found["block0"] = PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True
        )
    return found


# ---------------------------------------------------------------- measuring


def both(ctx: Any, name: str) -> list[tuple[float, float]]:
    """Return the seconds of a step of ours and of theirs, one pair per round."""
    return pairs(ours(ctx, name), theirs(ctx, name), ROUNDS, WARM_UP)


def their_losses(ctx: Any, name: str, steps: int) -> list[float]:
    """Return the losses of their first steps."""
    training = Theirs(ctx, name)
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
    other = torch.tensor(cluster.run(their_losses, name, steps)).mean(0)  # mean over the replicas
    torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


def peak(ctx: Any, name: str, side: str) -> int:
    """Return the most bytes that the allocator held on this rank."""
    if side == "theirs":
        return peak_memory(lambda: theirs(ctx, name))
    job = cloudpickle.dumps(prepared(name))
    return peak_memory(lambda: Training(ctx, cloudpickle.loads(job)).step)


def measure() -> Iterator[dict[str, Any]]:
    """Yield the rows of the table; those of the pairs that are named on the command line, if any is."""
    chosen = [name for name in PLANS if name in sys.argv] or list(PLANS)
    with mk.Cluster(RANKS, device="cpu") as cluster:
        for name in chosen:
            check_same(cluster, name)
            title = f"tensor parallel: a step of {name} on {RANKS} ranks"
            yield compared(title, THEIRS[name], cluster.run(both, name))
            title = f"tensor parallel: peak memory of {name} on {RANKS} ranks"
            yield compared_peaks(title, THEIRS[name], cluster, peak, name)
