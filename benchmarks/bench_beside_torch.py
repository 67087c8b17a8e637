"""mpkit's strategies beside PyTorch's own (`benchmarks.torch_sides`), step by step in the same processes.

On each rank both sides train the same GPT, alternating step by step, with all ranks starting together; a pair's ratio
is that of the slowest rank's times. mpkit records all the while, the other side does not. Before anything is timed,
both train 3 steps to the same losses. Each side's peak memory is measured as `benchmarks.pairing` says.

`python -m benchmarks beside "data parallel"` measures the pairs whose title has these words.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

import mpkit as mk
from benchmarks import torch_sides
from benchmarks.pairing import compared, compared_peaks, pairs, peak_memory
from benchmarks.torch_sides import Batches, Step, adamw
from mpkit.data import text_batches
from mpkit.models import GPT, next_token_loss
from mpkit.strategies.job.job import TrainJob
from mpkit.strategies.prepare.prepare import prepare
from mpkit.strategies.runtime.train import Training

SAME_STEPS = 3


@dataclass(frozen=True)
class Pair:
    """One plan of mpkit and the same training in PyTorch alone.

    Attributes:
        title: what the table calls it.
        plan: mpkit's plan.
        theirs: makes the other side's step.
        against: what the other side is.
        model: the arguments of the GPT that both sides train.
        length: tokens of a sequence.
        batch: sequences of a batch.
        memory: whether peak memory is measured too.
        rounds: how many pairs of steps are timed.
    """

    title: str
    plan: mk.Plan
    theirs: Callable[[Any, mk.Plan, Any, Batches], Step]
    against: str
    model: dict[str, Any]
    length: int = 64
    batch: int = 8
    memory: bool = True
    rounds: int = 15

    def build(self) -> nn.Module:
        """Build the model, with the same weights each time."""
        torch.manual_seed(0)
        return GPT(length=self.length, **self.model)

    def batches(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the batches of both sides."""
        return list(text_batches(self.batch, self.length, 4))

    def job(self) -> TrainJob:
        """Prepare mpkit's side, which in `Cluster.train` the caller's process does."""
        job = prepare(
            self.build(), text_batches(self.batch, self.length, 4), self.plan,
            loss=next_token_loss, optimizer=adamw, steps=1000, ranks=self.plan.ranks,
        )  # fmt: skip
        return job.with_model(nn.Module())  # so that the memory of the prepared model is freed

    def ours(self, ctx: Any, job: TrainJob) -> Callable[[int], None]:
        """Return mpkit's step, on a model that is made here as theirs is."""
        return Training(ctx, job.with_model(self.build())).step

    def other(self, ctx: Any) -> Step:
        """Return the other side's step."""
        return self.theirs(ctx, self.plan, self.build(), self.batches())


WIDE = {"layers": 6, "width": 384, "heads": 6}  # 11 M parameters
FSDP = "FSDP2, reshard_after_forward="


def _data_parallel(ranks: int) -> Iterator[Pair]:
    family = (
        ("DDP", mk.Plan.ddp(ranks), "torch's DistributedDataParallel"),
        ("ZeRO-1", mk.Plan.zero(1, ranks), "torch's ZeroRedundancyOptimizer"),
        ("ZeRO-2", mk.Plan.zero(2, ranks), f"{FSDP}False"),
        ("ZeRO-3", mk.Plan.zero(3, ranks), f"{FSDP}True"),
    )
    for name, plan, against in family:
        yield Pair(f"data parallel: {name} on {ranks} ranks", plan, torch_sides.data_parallel, against, WIDE)
    if ranks == 4:  # two ranks would be one group
        plan = mk.Plan.zero(3, ranks, dp_shard=2)
        title = f"data parallel: hybrid on {ranks} ranks"
        yield Pair(title, plan, torch_sides.data_parallel, "FSDP2 on a mesh of two axes", WIDE)


def _pipelines() -> Iterator[Pair]:
    for name, torchs in torch_sides.SCHEDULES.items():
        v = 2 if name in ("looped_bfs", "interleaved_1f1b", "interleaved_zb") else 1
        plan = mk.Plan(pp=4, schedule=name, microbatches=8, virtual_stages=v)
        each = 8 // plan.stages  # 6 blocks, an embedding and a head
        plan = replace(plan, cut=tuple(range(each, 8, each)))
        title = f"pipeline: {name} on 4 ranks"
        yield Pair(title, plan, torch_sides.pipeline, f"torch's {torchs}", WIDE, batch=16, memory=False)


def _tensor_parallel() -> Iterator[Pair]:
    family = (
        ("TP", mk.Plan.tp(4), "torch's parallelize_module"),
        ("TP + SP", mk.Plan.tp(4, sequence_parallel=True), "parallelize_module with SequenceParallel"),
        ("ZeRO-3 x TP", mk.Plan(zero=3, dp=2, tp=2), "FSDP2 of torch's parallelize_module"),
    )
    for name, plan, against in family:
        model = {**WIDE, "heads": 8}
        yield Pair(f"tensor parallel: {name} on 4 ranks", plan, torch_sides.tensor_parallel, against, model)


def _others() -> Iterator[Pair]:
    small = {"layers": 2, "width": 384, "heads": 6}
    for n in (2, 4):
        plan = mk.Plan(cp=n, cp_order="zigzag")
        title, against = f"context parallel: cp={n}", "torch's ring attention"
        yield Pair(title, plan, torch_sides.ring, against, small, length=1024, batch=2, rounds=9)
    mixture = {"layers": 6, "width": 256, "heads": 4, "experts": 8, "top_k": 2}
    against = "DistributedDataParallel with all-to-alls by hand"
    yield Pair("experts: ep=4 on 4 ranks", mk.Plan(dp=4, ep=4), torch_sides.experts, against, mixture)


PAIRS = (*_data_parallel(2), *_data_parallel(4), *_pipelines(), *_tensor_parallel(), *_others())


# ---------------------------------------------------------------- on a rank


def _times(ctx: Any, pair: Pair) -> list[tuple[float, float]]:
    theirs = pair.other(ctx)
    return pairs(pair.ours(ctx, pair.job()), lambda number: (theirs(number), None)[1], pair.rounds, 3)


def _losses(ctx: Any, pair: Pair) -> list[float | None]:
    step = pair.other(ctx)
    return [step(number) for number in range(SAME_STEPS)]


def _peak(ctx: Any, pair: Pair, side: str) -> int:
    if side == "theirs":
        return peak_memory(lambda: pair.other(ctx))
    job = pair.job()
    return peak_memory(lambda: pair.ours(ctx, job))


# ---------------------------------------------------------------- measuring


def check_same(cluster: mk.Cluster, pair: Pair) -> None:
    """Check that both sides compute the same losses.

    Raises:
        AssertionError: they do not.
    """
    run = cluster.train(
        pair.build(), text_batches(pair.batch, pair.length, 4), pair.plan,
        loss=next_token_loss, optimizer=adamw, steps=SAME_STEPS,
    ).wait()  # fmt: skip
    by_rank = cluster.run(_losses, pair)
    with_loss = [losses for losses in by_rank if losses[0] is not None]
    torch.testing.assert_close(
        torch.tensor(run.losses), torch.tensor(with_loss).mean(0), rtol=1e-5, atol=1e-5
    )


def measure() -> Iterator[dict[str, Any]]:
    """Yield the rows of the table; those of the pairs that are named on the command line, if any is."""
    chosen = [pair for pair in PAIRS if any(word in pair.title for word in sys.argv[1:])] or PAIRS
    for pair in chosen:
        with mk.Cluster(pair.plan.ranks, device="cpu") as cluster:
            check_same(cluster, pair)
            kind, _, rest = pair.title.partition(": ")
            yield compared(f"{kind}: a step of {rest}", pair.against, cluster.run(_times, pair))
            if pair.memory:
                title = f"{kind}: peak memory of {rest}"
                yield compared_peaks(title, pair.against, cluster, _peak, pair)
