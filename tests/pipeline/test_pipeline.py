"""The pipeline runtime: whatever the schedule, on real ranks, training equals serial training."""

import copy
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.models import GPT, next_token_loss
from mpkit.plan.schedule import NAMES, Action, Schedule
from mpkit.plan.schedule.catalogue import has_pairs
from mpkit.strategies.job.job import TrainJob
from mpkit.strategies.prepare.prepare import prepare
from mpkit.strategies.runtime.train import Training
from mpkit.trace import Kind
from tests.mesh.test_mesh_training import tokens
from tests.recipes import adamw, normal, sgd
from tests.schedule.orders import in_random_order, random_holders
from tests.serial import EXACT, Clusters, Train

LOOPS = ("looped_bfs", "interleaved_1f1b", "interleaved_zb")


def plan_of(name: str, p: int, m: int, **how: Any) -> mk.Plan:
    """A plan of a schedule; with two stages per rank where it can have several."""
    v = {"virtual_stages": 2} if name in LOOPS else {}
    return mk.Plan(pp=p, schedule=name, microbatches=m, **v, **how)


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
def test_random_valid_schedules_run_and_give_serial_gradients(clusters: Clusters, ranks: int) -> None:
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


# ---- what it records and says


def test_a_loss_that_is_nan_is_said_once_with_its_step(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(15)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).double()
    good, bad = (normal(4, 3), normal(4, 2)), (normal(4, 3) * torch.nan, normal(4, 2))
    run = train(model, [good, good, bad], mk.Plan.gpipe(2, 2), loss=F.mse_loss, optimizer=sgd, steps=5)
    said = [line for line in capsys.readouterr().out.splitlines() if "the loss is nan" in line]
    assert len(said) == 1
    assert "step 2" in said[0]
    assert [loss == loss for loss in run.losses] == [True, True, False, False, False]


ONE_STAGE = [name for name in NAMES if mk.Plan(schedule=name).stages == 1 and not has_pairs(name)]
"""Not that of pairs, whose forwards run with the backward of the micro-batch before."""


@pytest.mark.parametrize("name", ONE_STAGE)
def test_with_one_stage_every_schedule_goes_back_before_the_next_micro_batch(name: str) -> None:
    assert str(mk.Plan(schedule=name, microbatches=3).build()) == "rank 0 | F0 B0 -- F1 B1 -- F2 B2 --"


# ---- Recomputation block by block: what is held, and that nothing else changes.

S, H = 16, 16
"""Bytes between two blocks: of 4 sequences, in fp64."""


def gpt(layers: int = 4, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return GPT(vocab=32, layers=layers, width=H, heads=2, length=S, dropout=dropout).double()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*_token_id.*")
@pytest.mark.filterwarnings("ignore::mpkit.errors.UnwisePlan")
def test_the_recomputation_is_seen(train: Train, clusters: Clusters) -> None:
    """A RECOMPUTE within the backward for each block, with its FLOPs, which the backward's count too."""
    how: dict[str, Any] = {"loss": next_token_loss, "optimizer": adamw}
    data, plan = tokens(4, S, 32), mk.Plan(recompute="full", microbatches=2)
    real = train(gpt(), data, plan, steps=1, **how).trace.ranks[0]
    fake = mk.trace_fake(gpt, plan, batch=data[0], cluster=clusters(1), **how).ranks[0]
    for rank in (real, fake):
        again = rank.ops[rank.ops["kind"] == Kind.RECOMPUTE]
        assert [rank.name(op["name"]) for op in again] == [f"block{i}" for i in (3, 2, 1, 0)] * 2
        assert set(again["depth"]) == {1}
    for kind in (Kind.RECOMPUTE, Kind.BACKWARD):
        flops = [rank.ops["flops"][rank.ops["kind"] == kind].tolist() for rank in (real, fake)]
        assert flops[0] == flops[1]


class Writing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x += 1
        return self.linear(x)


@pytest.mark.filterwarnings("ignore:.*_token_id.*")
@pytest.mark.filterwarnings("ignore::mpkit.errors.UnwisePlan")
def test_a_block_that_writes_into_its_input_is_refused(train: Train) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Writing(), Writing())
    data = [(torch.randn(2, 4), torch.randn(2, 4))]
    with pytest.raises(mk.RankFailed, match="writes into its input"):
        train(model, data, mk.Plan(recompute="full"), loss=F.mse_loss, optimizer=adamw, steps=1)


def test_what_says_nothing_to_recompute_is_refused() -> None:
    for given in ("every=0", "every=two", "every", 2):
        with pytest.raises(ValueError, match=r"Did you mean Plan\(recompute='every=2'\)"):
            mk.Plan(recompute=given)  # type: ignore[arg-type]
    assert mk.Plan.from_json(mk.Plan(pp=2, recompute="every=2").to_json()).recompute == "every=2"
