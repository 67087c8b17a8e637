"""Pipelines beside torch.distributed.pipelining, step by step in the same processes; measured bubbles beside simulated
ones; and the speed of `simulate`.

On each of 4 ranks both sides train the same GPT, cut at the same layers, with the same schedule, alternating step by
step, with all ranks starting together; a pair's ratio is that of the slowest rank's times. mpkit records all the while
and sends the loss to every rank; the other side does neither.

PyTorch has no naive schedule, no ZB-H1 and no ZB-H2.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch
from torch import nn

import mpkit as mk
from benchmarks.pairing import Step, compared, pairs
from mpkit.data import text_batches
from mpkit.models import GPT, chain, next_token_loss
from mpkit.plan.schedule import NAMES
from mpkit.strategies.prepare.prepare import prepare
from mpkit.strategies.runtime.train import Training

RANKS, MICROBATCHES = 4, 8
ROUNDS, WARM_UP = 15, 2
LENGTH, BATCH = 64, 16


THEIRS = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "looped_bfs": "ScheduleLoopedBFS",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "interleaved_zb": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
"""For each of our schedule names, PyTorch's name."""

LOOPS = ("looped_bfs", "interleaved_1f1b", "interleaved_zb")


def model() -> nn.Module:
    """Build a GPT with 11 M parameters: 6 blocks between an embedding and a head, so 8 stages at most."""
    torch.manual_seed(0)
    return GPT(layers=6, width=384, heads=6, length=LENGTH)


def adamw(params: Any) -> torch.optim.Optimizer:
    """Build the optimizer that both sides use."""
    return torch.optim.AdamW(params, lr=1e-4)


def plan_of(name: str) -> mk.Plan:
    """Return the plan for a schedule, with the same number of layers in every stage."""
    v = 2 if name in LOOPS else 1
    plan = mk.Plan(pp=RANKS, schedule=name, microbatches=MICROBATCHES, virtual_stages=v)
    each = 8 // plan.stages
    return mk.Plan(
        pp=RANKS, schedule=name, microbatches=MICROBATCHES, virtual_stages=v,
        cut=list(range(each, 8, each)),
    )  # fmt: skip


# ---------------------------------------------------------------- one side on one rank


def ours(ctx: Any, name: str) -> Step:
    """Return a function that runs one training step with mpkit."""
    job = prepare(
        model(), text_batches(BATCH, LENGTH, 4), plan_of(name),
        loss=next_token_loss, optimizer=adamw, steps=1000, ranks=ctx.world_size,
    )  # fmt: skip
    return Training(ctx, job).step


def theirs(ctx: Any, name: str) -> Step:
    """Return a function that runs one training step with PyTorch alone."""
    from torch.distributed import pipelining
    from torch.distributed.pipelining.stage import PipelineStage

    plan = plan_of(name)
    holders = plan.build().stage_to_rank
    layers, each = [layer for _, layer in chain(model())], 8 // plan.stages
    mine = [s for s in range(plan.stages) if holders[s] == ctx.rank]
    parts = [nn.Sequential(*layers[s * each : (s + 1) * each]) for s in mine]
    device = torch.device("cpu")
    stages = [PipelineStage(part, s, plan.stages, device) for part, s in zip(parts, mine, strict=True)]
    kind = getattr(pipelining.schedules, THEIRS[name])
    single = name in ("gpipe", "1f1b")
    schedule = kind(stages[0] if single else stages, MICROBATCHES, loss_fn=next_token_loss)
    optimizer = adamw(nn.ModuleList(parts).parameters())
    batches = text_batches(BATCH, LENGTH, 4)
    first, last = 0 in mine, plan.stages - 1 in mine

    def step(number: int) -> None:
        inputs, targets = batches[number % len(batches)]
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        with_loss = {"target": targets, "losses": losses} if last else {}
        schedule.step(*([inputs] if first else []), **with_loss)
        if last:
            torch.stack(losses).mean().item()
        optimizer.step()

    return step


# ---------------------------------------------------------------- measuring


def both(ctx: Any, name: str) -> list[tuple[float, float]]:
    """Return the seconds of a step of ours and of theirs, one pair per round."""
    return pairs(ours(ctx, name), theirs(ctx, name), ROUNDS, WARM_UP)


def bubble(cluster: mk.Cluster, name: str) -> dict[str, Any]:
    """Measure a schedule's bubble, beside that of a simulation with the means of each step's own times.

    Actions vary from one to the next, which adds about 0.02 to the measured one. The median of 5 steps.
    """
    plan = plan_of(name)
    data = text_batches(BATCH, LENGTH, 1)
    how: dict[str, Any] = {"loss": next_token_loss, "optimizer": adamw, "steps": 6, "show": False}
    timeline = cluster.train(model(), data, plan, **how).wait().timeline()
    steps = [timeline.step(number) for number in range(1, 6)]
    measured = statistics.median(step.bubble for step in steps)
    expected = statistics.median(mk.simulate(plan, **step.stage_times()).bubble for step in steps)
    return {
        "name": f"pipeline: bubble of {name} on {RANKS} ranks, {MICROBATCHES} micro-batches",
        "value": 100 * measured,
        "unit": "%",
        "ratio": measured / expected,
        "against": f"simulated with its own times: {100 * expected:.3g} %",
    }


def simulated(p: int, m: int) -> dict[str, Any]:
    """Measure the actions per second of `simulate` for 1F1B."""
    plan = mk.Plan(pp=p, schedule="1f1b", microbatches=m)
    actions = sum(map(len, plan.build().rows))
    times = []
    for _ in range(20):
        start = time.perf_counter()
        mk.simulate(plan, hop=0.1)
        times.append(time.perf_counter() - start)
    seconds = statistics.median(times)
    return {
        "name": f"pipeline: simulate 1F1B of {p} stages and {m} micro-batches",
        "value": actions / seconds,
        "unit": "actions/s",
        "against": f"{actions:,} actions in {seconds * 1e3:.3g} ms",
    }


def explored(p: int, m: int) -> dict[str, Any]:
    """Measure how long the schedule explorer takes to follow a slider while it shows two schedules."""
    explorer = mk.explore("1f1b", "zb_h1", ranks=p, microbatches=m)
    times = []
    for number in range(21):
        start = time.perf_counter()
        explorer.sliders["hop"].value = 0.05 * (1 + number % 20)
        times.append(time.perf_counter() - start)
    return {
        "name": f"explorer: a slider moves, two schedules of {p} stages and {m} micro-batches",
        "value": statistics.median(times) * 1e3,
        "unit": "ms",
        "ratio": statistics.median(times) / 0.1,
        "against": "of the 100 ms that it may take",
    }


def measure() -> list[dict[str, Any]]:
    """Return the rows of the table."""
    rows = []
    chosen = [name for name in THEIRS if name in sys.argv] or list(THEIRS)
    with mk.Cluster(RANKS, device="cpu") as cluster:
        for name in chosen:
            by_rank = cluster.run(both, name)
            title = f"pipeline: a step of {name} on {RANKS} ranks"
            rows.append(compared(title, f"torch's {THEIRS[name]}", by_rank))
        rows += [bubble(cluster, name) for name in NAMES]
    rows += [simulated(4, 8), simulated(16, 64), explored(16, 64)]
    return rows
