"""The pipeline runtime: whatever the schedule, on real ranks, training equals serial training."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.plan.schedule import NAMES, Action, Schedule
from mpkit.strategies.job.job import TrainJob
from mpkit.strategies.prepare.prepare import prepare
from mpkit.strategies.runtime.train import Training
from tests.schedule.orders import in_random_order, random_holders
from tests.serial import EXACT, Train, same

LOOPS = ("looped_bfs", "interleaved_1f1b", "interleaved_zb")


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def plan_of(name: str, p: int, m: int, **how: Any) -> mk.Plan:
    """A plan of a schedule; with two stages per rank where it can have several."""
    v = {"virtual_stages": 2} if name in LOOPS else {}
    return mk.Plan(pp=p, schedule=name, microbatches=m, **v, **how)


# ---------------------------------------------------------------- every schedule, every model of the kit


# ---------------------------------------------------------------- 200 random schedules, backwards whole and split


def random_schedule(stages: int, ranks: int, m: int, rng: random.Random) -> Schedule:
    """Everything after what it needs, in a random order, dealt out to the ranks; some backwards are split."""
    holders = random_holders(stages, ranks, rng)
    share = rng.random()
    actions = {Action("F", s, i) for s in range(stages) for i in range(m)}
    for s in range(stages):
        for i in range(m):
            actions |= {Action(kind, s, i) for kind in ("IW" if rng.random() < share else "B")}
    return in_random_order(actions, holders, rng)


def gradients(ctx: Any, jobs: list[TrainJob]) -> list[tuple[float, dict[str, Tensor]]]:
    """Of each job, what this rank knows after the backwards of its first step."""
    found = []
    for job in jobs:
        (ctx.record.folder / f"rank{ctx.rank}.taken").unlink(
            missing_ok=True
        )  # a launch has one training otherwise
        training = Training(ctx, job)
        training.sync.begin_step()
        with ctx.record.step(0):
            (loss,) = training.pipeline.step(0, training.feed.take(0))
        found.append((loss, {piece.name: piece.parameter.grad for piece in training.sync.pieces}))
    return found


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_random_valid_schedules_run_and_give_serial_gradients(
    clusters: Callable[[int], mk.Cluster], ranks: int
) -> None:
    """50 for each number of ranks, 200 in all, in one launch each."""
    rng = random.Random(ranks)
    torch.manual_seed(3)
    layers = [nn.Sequential(nn.Linear(3, 3, bias=i % 3 > 0), nn.Tanh()) for i in range(7)]
    model = nn.Sequential(*layers).double()
    data = [(normal(5, 3), normal(5, 3))]
    how: dict[str, Any] = {"loss": F.mse_loss, "optimizer": sgd, "steps": 1, "ranks": ranks}
    cuts = {s: [f"{i}.0" for i in range(1, s)] for s in range(ranks, 8)}
    prepared: dict[tuple[int, int], TrainJob] = {}
    jobs = []
    for _ in range(50):
        stages, m = rng.randint(ranks, 7), rng.choice([1, 2, 4])
        schedule = random_schedule(stages, ranks, m, rng)
        plan = mk.Plan(pp=ranks, schedule=schedule, microbatches=m, cut=cuts[stages])
        if (stages, m) not in prepared:
            prepared[stages, m] = prepare(model, data, plan, **how)
        recompute = rng.choice(["none", "none", "full"])
        job = prepared[stages, m].with_model(copy.deepcopy(model))
        where = replace(job.where, plan=replace(plan, recompute=recompute), schedule=schedule)
        jobs.append(replace(job, where=where))
    split = Counter(a.kind for job in jobs for row in job.where.schedule.rows for a in row)
    assert split["B"] > 100
    assert split["I"] == split["W"] > 100
    by_rank = clusters(ranks).run(gradients, jobs)
    loss = F.mse_loss(model(data[0][0]), data[0][1])
    loss.backward()
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    for i in range(len(jobs)):
        made = {name: grad for found in by_rank for name, grad in found[i][1].items()}
        assert made.keys() == wanted.keys()
        for found in by_rank:  # the loss is known on every rank
            assert found[i][0] == pytest.approx(loss.item(), rel=1e-10)
        for name, grad in made.items():
            torch.testing.assert_close(grad, wanted[name], **EXACT)


# ---------------------------------------------------------------- loss, clipping, 16 bits, checkpoints


# ---------------------------------------------------------------- random state


# ---------------------------------------------------------------- memory


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "recompute"),
    [*((name, "none") for name in NAMES), ("gpipe", "full"), ("1f1b", "full"), ("looped_bfs", "full")],
)
def test_peak_live_activations_are_the_schedules(train: Train, name: str, recompute: str) -> None:
    """In bytes: k layers hold 2k inputs a micro-batch, and from I to W k inputs and k gradients.

    Recomputing, a micro-batch holds its stage's input, and the one at work the 2k.
    """
    k, width, rows = 8, 16, 32
    plan = plan_of(name, 4, 8)
    torch.manual_seed(8)
    layers = [layer for _ in range(k * plan.stages) for layer in (nn.Linear(width, width), nn.GELU())]
    data = [(torch.randn(8 * rows, width), torch.randn(8 * rows, width))]
    cut = [2 * k * s for s in range(1, plan.stages)]
    live = [held["activations"] for held in mk.simulate(plan).peak_memory]
    plan = replace(plan, cut=cut, recompute=recompute)
    run = train(nn.Sequential(*layers), data, plan, loss=F.mse_loss, optimizer=sgd, steps=2)
    measured = [held["activations"] / (rows * width * 4) for held in run.timeline().peak_memory]
    for found, want in zip(measured, live, strict=True):
        # More than that are the messages on their way and what is being computed: about one micro-batch more.
        if recompute == "none":
            assert 2 * k * want <= found <= 2 * k * (want + 1.5) + 1, (measured, live)
        else:
            assert want + 2 * k - 1 <= found <= want + 2 * k + 8, (measured, live)


class Attend(nn.Module):
    """Attention with dropout within, and for the first half of the heads a mask, by position and by name."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mask = torch.ones(x.shape[1], x.shape[1]).tril().bool()
        y = F.scaled_dot_product_attention(q[:, :1], k[:, :1], v[:, :1], mask, 0.3)
        z = F.scaled_dot_product_attention(
            query=q[:, 1:], key=k[:, 1:], value=v[:, 1:], dropout_p=0.3, is_causal=True
        )
        return self.out(torch.cat([y, z], 1).transpose(1, 2).flatten(2)).tanh()


@pytest.mark.parametrize("name", [pytest.param("1f1b", marks=pytest.mark.soak), "zbv"])
def test_selective_recomputation_keeps_no_scores_and_changes_nothing(train: Train, name: str) -> None:
    """Korthikanti et al. 2023, section 5: what a layer keeps of the scores grows with the square of the length."""
    torch.manual_seed(9)
    time, width = 64, 8
    model = nn.Sequential(*(Attend(width) for _ in range(4))).double()
    data = [(normal(8, time, width), normal(8, time, width))]
    how: dict[str, Any] = {"loss": F.mse_loss, "optimizer": sgd, "steps": 3}
    plan = plan_of(name, 2, 4)
    all_kept = train(model, data, plan, **how)
    run = train(model, data, replace(plan, recompute="selective"), **how)
    same(run, all_kept.losses, all_kept.state_dict(), rtol=1e-12, atol=1e-14)
    scores = 2 * 2 * time**2 * 8  # of a micro-batch of 2, of 2 heads
    held = zip(run.timeline().peak_memory, all_kept.timeline().peak_memory, strict=True)
    for less, more in held:
        assert more["activations"] - less["activations"] > 4 * scores
        assert less["activations"] < 0.6 * more["activations"]
