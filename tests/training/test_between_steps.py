"""What happens between steps: evaluation, averages of weights, callbacks. Parallel training does what serial does."""

from pathlib import Path
from typing import Any

import pytest
import torch
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


HOW: dict[str, Any] = {"loss": next_token_loss, "optimizer": two_optimizers, "steps": 5}


def test_training_goes_on_as_if_there_had_been_no_evaluation(train: Train) -> None:
    """Bit by bit, with dropout, and with a metric that draws random numbers."""

    def noisy(outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.rand(()) + outputs.mean() * 0

    how, plan = HOW | {"optimizer": adamw, "steps": 4}, mk.Plan.pipeline("1f1b", 2, 4)
    alone = train(gpt(0.3), DATA, plan, **how)
    beside = train(gpt(0.3), DATA, plan, **how, evaluate=(HELD_OUT, noisy), on_step=lambda ctx, step: None)
    assert beside.losses == alone.losses
    assert all(torch.equal(beside.state_dict()[name], value) for name, value in alone.state_dict().items())
    assert list(beside.metrics["eval noisy"]) == [0, 1, 2, 3]


def test_callbacks_log_and_any_rank_may_end_the_training(train: Train, tmp_path: Path) -> None:
    def on_step(ctx: Any, step: int) -> bool | None:
        ctx.log("loss again", ctx.loss)
        norm = torch.tensor([sum(w.square().sum() for w in ctx.weights.values())])
        ctx.log("norm here", norm)
        assert (ctx.evaluation is None) == (step % 2 == 0)
        return True if step == 3 and ctx.rank == 1 else None

    plan, nine, four = mk.Plan.gpipe(2, 2), HOW | {"steps": 9}, HOW | {"steps": 4}
    run = train(gpt(), DATA, plan, **nine, on_step=on_step, evaluate=HELD_OUT, every=2)
    assert run.status == "finished" and len(run.losses) == 4
    assert run.stopped_early == (3, 1, "on_step returned True")
    shown = repr(run)
    assert "finished, step 4 of 9" in shown and "ended by on_step on rank 1: on_step returned True" in shown
    assert list(run.metrics["loss again"].values()) == pytest.approx(run.losses)
    assert list(run.metrics["eval loss"]) == [1, 3]
    assert len(run.metrics.by_rank("norm here")) == run.plan.ranks
    short = train(gpt(), DATA, plan, **four)
    assert all(torch.equal(run.state_dict()[name], value) for name, value in short.state_dict().items())
    # Saved traces keep what was logged; one without is one from before.
    loaded = mk.Trace.load(run.trace.save(tmp_path / "logged"))
    assert loaded.metrics == run.metrics and loaded.stop == run.stopped_early
    assert not mk.Trace.load(short.trace.save(tmp_path / "not")).metrics
    frame = run.metrics.to_dataframe()
    assert list(frame.columns) == ["name", "step", "rank", "value"] and set(frame["rank"]) == {0, 1}


@pytest.mark.parametrize(("wrong", "says"), [
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
], ids=lambda value: "" if isinstance(value, str) else "-".join(value))  # fmt: skip
def test_what_cannot_work_is_refused_with_what_would(train: Train, wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        train(gpt(), DATA, mk.Plan.serial(), **(HOW | wrong))


def test_a_value_that_on_step_returns_is_no_answer(train: Train) -> None:
    with pytest.raises(mk.RankFailed, match=r"on_step returned 0\.5: True ends the training"):
        train(gpt(), DATA, mk.Plan.serial(), **HOW, on_step=lambda ctx, step: 0.5)
