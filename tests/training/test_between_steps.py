"""What happens between steps: evaluation, averages of weights, callbacks. Parallel training does what serial does."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mpkit as mk
from mpkit.models import GPT, next_token_loss
from tests.recipes import adamw
from tests.serial import Train

pytestmark = pytest.mark.filterwarnings("ignore::mpkit.errors.UnwisePlan")

VOCAB, LENGTH, DECAY = 32, 8, 0.8


def tokens(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    """Batches of these sizes, and what comes next in them."""
    torch.manual_seed(sum(sizes))
    ids = [torch.randint(0, VOCAB, (size, LENGTH + 1)) for size in sizes]
    return [(x[:, :-1], x[:, 1:]) for x in ids]


DATA, HELD_OUT = tokens(8, 8), tokens(8, 5, 1)  # the last are fewer than ranks and micro-batches


def gpt(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return GPT(vocab=VOCAB, layers=4, width=16, heads=4, length=LENGTH, dropout=dropout).double()


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(-1) == targets).double().mean()


def two_optimizers(params: Any) -> list[torch.optim.Optimizer]:
    """A rate for the matrices and another for the rest; both elementwise."""
    return [
        torch.optim.SGD([p for p in params if p.ndim > 1], lr=0.05, momentum=0.9),
        adamw([p for p in params if p.ndim < 2]),
    ]


def evaluated(model: nn.Module, data: Any, loss: Any, metric: Any) -> tuple[float, float]:
    """The means over the samples of all batches, in plain PyTorch."""
    model.eval()
    with torch.no_grad():
        each = [(loss(model(x), y).item(), metric(model(x), y).item(), len(y)) for x, y in data]
    model.train()
    samples = sum(n for _, _, n in each)
    return sum(a * n for a, _, n in each) / samples, sum(b * n for _, b, n in each) / samples


# ---- every family of plans ----------------------------------------------------------------------------------------


def words(plan: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in plan.items())


HOW: dict[str, Any] = {"loss": next_token_loss, "optimizer": two_optimizers, "steps": 5}


@pytest.mark.parametrize("plan", [{"pp": 2, "schedule": "1f1b", "microbatches": 4}], ids=words)
def test_training_goes_on_as_if_there_had_been_no_evaluation(train: Train, plan: dict[str, Any]) -> None:
    """Bit by bit, with dropout, and with a metric that draws random numbers."""

    def noisy(outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.rand(()) + outputs.mean() * 0

    how = HOW | {"optimizer": adamw, "steps": 4}
    alone = train(gpt(0.3), DATA, mk.Plan(**plan), **how)
    beside = train(
        gpt(0.3), DATA, mk.Plan(**plan), **how, evaluate=(HELD_OUT, noisy), on_step=lambda ctx, step: None
    )
    assert beside.losses == alone.losses
    assert all(torch.equal(beside.state_dict()[name], value) for name, value in alone.state_dict().items())
    assert list(beside.metrics["eval noisy"]) == [0, 1, 2, 3]


@pytest.mark.parametrize("plan", [{"dp": 2, "batchnorm": "local"}], ids=words)
def test_evaluation_uses_running_statistics_and_leaves_them(train: Train, plan: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()
    data = [(torch.randn(8, 6).double(), torch.randint(0, 3, (8,))) for _ in range(2)]
    how: dict[str, Any] = {"loss": F.cross_entropy, "optimizer": adamw, "steps": 3}
    alone = train(model, data, mk.Plan(**plan), **how)
    run = train(
        model,
        data,
        mk.Plan(**plan),
        **how,
        evaluate=(data, lambda out, y: (out.argmax(1) == y).double().mean()),
    )
    assert run.losses == alone.losses
    for name, value in alone.state_dict().items():
        assert torch.equal(run.state_dict()[name], value), name
    trained = copy.deepcopy(model)
    trained.load_state_dict(run.state_dict())
    loss, right = evaluated(trained, data, F.cross_entropy, accuracy)
    assert run.metrics["eval loss"][2] == pytest.approx(loss)
    assert run.metrics["eval metric"][2] == pytest.approx(right)


class Skips(nn.Module):
    """No chain: its blocks' outputs go past each other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        a = torch.tanh(self.first(x))
        return self.third(a + torch.tanh(self.second(a)))


def test_a_partitioned_model_and_a_loss_that_counts(train: Train) -> None:
    torch.manual_seed(0)
    model = Skips().double()
    data = [(torch.randn(n, 6).double(), torch.randint(0, 3, (n,))) for n in (8, 8, 5)]
    for _, y in data:
        y[::3] = -100
    run = train(
        model, data[:2], mk.Plan(pp=2, dp=2, schedule="gpipe", microbatches=2), steps=3, optimizer=adamw,
        loss=lambda out, y: (F.cross_entropy(out, y, reduction="sum"), (y != -100).sum()),
        evaluate=(data, lambda out, y: {"right": ((out.argmax(1) == y).sum(), (y != -100).sum())}), every=3,
    )  # fmt: skip
    trained = copy.deepcopy(model)
    trained.load_state_dict(run.state_dict())
    outputs, targets = trained(torch.cat([x for x, _ in data])), torch.cat([y for _, y in data])
    assert run.metrics["eval loss"] == {2: pytest.approx(F.cross_entropy(outputs, targets).item())}
    right = (outputs.argmax(1) == targets).sum() / (targets != -100).sum()
    assert run.metrics["eval right"] == {2: pytest.approx(right.item())}


# ---- on_step ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [{"pp": 2, "schedule": "gpipe", "microbatches": 2}], ids=words)
def test_callbacks_log_and_any_rank_may_end_the_training(
    train: Train, plan: dict[str, Any], tmp_path: Path
) -> None:
    def on_step(ctx: Any, step: int) -> bool | None:
        ctx.log("loss again", ctx.loss)
        norm = torch.tensor([sum(w.square().sum() for w in ctx.weights.values())])
        ctx.log("norm here", norm)
        assert (ctx.evaluation is None) == (step % 2 == 0)
        return True if step == 3 and ctx.rank == 1 else None

    run = train(
        gpt(), DATA, mk.Plan(**plan), **(HOW | {"steps": 9}), on_step=on_step, evaluate=HELD_OUT, every=2
    )
    assert run.status == "finished" and len(run.losses) == 4
    assert run.stopped_early == (3, 1, "on_step returned True")
    assert "finished, step 4 of 9" in repr(
        run
    ) and "ended by on_step on rank 1: on_step returned True" in repr(run)
    assert list(run.metrics["loss again"].values()) == pytest.approx(run.losses)
    assert list(run.metrics["eval loss"]) == [1, 3]
    assert len(run.metrics.by_rank("norm here")) == run.plan.ranks
    short = train(gpt(), DATA, mk.Plan(**plan), **(HOW | {"steps": 4}))
    assert all(torch.equal(run.state_dict()[name], value) for name, value in short.state_dict().items())
    # Saved traces keep what was logged; one without is one from before.
    loaded = mk.Trace.load(run.trace.save(tmp_path / "logged"))
    assert loaded.metrics == run.metrics and loaded.stop == run.stopped_early
    assert not mk.Trace.load(short.trace.save(tmp_path / "not")).metrics
    frame = run.metrics.to_dataframe()
    assert list(frame.columns) == ["name", "step", "rank", "value"] and set(frame["rank"]) == set(
        range(run.plan.ranks)
    )


def test_logged_outside_of_a_training(cluster: mk.Cluster) -> None:
    def measure(ctx: Any) -> None:
        for i in range(3):
            ctx.log("seconds", torch.tensor([i + ctx.rank]))
        with ctx.record.step(7):
            ctx.log("bytes", 2**20)

    cluster.run(measure)
    metrics = cluster.trace.metrics
    assert metrics["seconds"] == {0: 0, 1: 1, 2: 2} and metrics["bytes"] == {7: 2**20}
    assert metrics.by_rank("seconds")[3] == {0: 3, 1: 4, 2: 5}
    with pytest.raises(KeyError, match="'seconds', 'bytes' was logged"):
        metrics["second"]
    with pytest.raises(mk.RankFailed, match=r"a Tensor of shape \[3\]; one number is wanted"):
        cluster.run(lambda ctx: ctx.log("grads", torch.ones(3)))


# ---- refused, before a rank starts --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"on_step": lambda step: None}, r"on_step=lambda ctx, step"),
        ({"on_step": "log"}, r"it is a function of a context and a step"),
        ({"every": 5}, r"on_step is called after each step"),
        ({"evaluate": HELD_OUT, "every": 0}, r"every=10"),
        ({"evaluate": accuracy}, r"evaluate is a function; it needs data"),
        ({"evaluate": (b for b in HELD_OUT)}, r"list\(itertools.islice"),
        ({"evaluate": HELD_OUT[0]}, r"evaluate: data is a pair of tensors, one batch"),
        ({"evaluate": []}, r"evaluate: data is empty"),
        ({"evaluate": (HELD_OUT, lambda out: 1)}, r"metric were tried on 2 samples"),
        ({"evaluate": (HELD_OUT, lambda out, y: out)}, r"returns a number, the mean over samples"),
        ({"ema": 1.5}, r"ema=0.999"),
        ({"ema": 1.0}, r"ema=0.999"),
        ({"optimizer": lambda p: [adamw(p), adamw(p)]}, r"more than one parameter group"),
        ({"optimizer": lambda p: [adamw(p), "sgd"]}, r"or a list of several"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value),
)  # fmt: skip
def test_what_cannot_work_is_refused_with_what_would(train: Train, wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        train(gpt(), DATA, mk.Plan.serial(), **(HOW | wrong))


def test_a_value_that_on_step_returns_is_no_answer(train: Train) -> None:
    with pytest.raises(mk.RankFailed, match=r"on_step returned 0\.5: True ends the training"):
        train(gpt(), DATA, mk.Plan.serial(), **HOW, on_step=lambda ctx, step: 0.5)


@pytest.mark.parametrize("plan", [mk.Plan(pp=2, dp=2, schedule="gpipe", microbatches=2)], ids=repr)
def test_the_loss_of_unevenly_masked_batches_weighs_targets(train: Train, plan: mk.Plan) -> None:
    """Whatever the plan makes of the training's loss, and although nothing is masked in training."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    data = [(torch.randn(8, 6).double(), torch.randint(0, 3, (8,))) for _ in range(2)]
    held_out = [(torch.randn(8, 6).double(), torch.randint(0, 3, (8,))) for _ in range(3)]
    held_out[0][1][1:] = -100
    held_out[1][1][:3] = -100
    run = train(model, data, plan, loss=F.cross_entropy, optimizer=adamw, steps=1, evaluate=held_out)
    trained = copy.deepcopy(model)
    trained.load_state_dict(run.state_dict())
    outputs, targets = trained(torch.cat([x for x, _ in held_out])), torch.cat([y for _, y in held_out])
    assert run.metrics["eval loss"] == {0: pytest.approx(F.cross_entropy(outputs, targets).item())}
