"""Silent bug 5: dropout in a tensor-parallel group.

Two linear layers, cut as in Megatron: the first by columns, the second by rows, one all-reduce after it. What comes out
is whole on every rank, and all ranks do the same with it: dropout, and a last layer of which each has a copy.

    every rank      x → columns → tanh → rows ─all-reduce─▶ whole → dropout → head → loss
                        its part         its part           the same on all ranks

"Each rank should have random numbers of its own", somebody thought; which is right in data parallelism. The loss falls.

In serial training the mask of step i is what `F.dropout` draws after `torch.manual_seed(seed + i)`. Use
`mk.compare("dropout-in-a-group", train)`, and look at one row: what should the loss of all ranks of a
tensor-parallel group be? Which weights are wrong first: those that are cut, or those of which each rank has a copy?

Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", 2021; Shoeybi et al.,
"Megatron-LM", 2019, appendix B.2, on random numbers in and outside of the parallel regions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.course.framework import serial
from mpkit.course.framework.exercise import Case, Mistake
from mpkit.course.framework.on_ranks import OnRanks


# %% given
class SumOverGroup(torch.autograd.Function):
    """Megatron's g: an all-reduce in the forward, nothing in the backward."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, comm: Any) -> Tensor:
        """Return the sum of all ranks' partial results, (B, D)."""
        return comm.all_reduce(partial.clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the gradient as it is: every rank has the whole gradient already."""
        return gradient, None


# %% answer
def train(ctx: mk.Context, model: nn.Module, batches: list[tuple[Tensor, Tensor]], seed: int) -> list[float]:
    """Train for one step per batch; return the losses. `batches` are whole, and the same on all ranks.

    model: columns (6 to its n-th of 12), rows (its n-th of 12 to 5), head (5 to 3), which is whole on every rank.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.05)
    losses = []
    for step, (inputs, targets) in enumerate(batches):
        optimizer.zero_grad()
        whole = SumOverGroup.apply(model.rows(torch.tanh(model.columns(inputs))), ctx.comm)
        ### BEGIN SOLUTION
        # instead: torch.manual_seed(seed + step + 1000 * ctx.rank)
        torch.manual_seed(seed + step)
        ### END SOLUTION
        kept = F.dropout(whole, 0.25)
        loss = F.mse_loss(model.head(kept), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# %% checks
SAMPLES, HIDDEN, WIDTH = 32, 12, 5


class Part(nn.Module):
    """The part of the model that each of n ranks holds; n = 1: the whole model."""

    def __init__(self, n: int = 1) -> None:
        super().__init__()
        self.columns = nn.Linear(6, HIDDEN // n, bias=False)
        self.rows = nn.Linear(HIDDEN // n, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, 3)


def part(weights: dict[str, Tensor], rank: int, n: int) -> dict[str, Tensor]:
    """Return a rank's part of the whole weights."""
    return {
        **weights,
        "columns.weight": weights["columns.weight"].chunk(n, 0)[rank],
        "rows.weight": weights["rows.weight"].chunk(n, 1)[rank],
    }


def play(ctx: mk.Context, answer: object, case: Case) -> object:
    """Return the losses and this rank's weights."""
    assert callable(answer)
    whole, model = serial.fill(Part(), case.seed), Part(ctx.world_size).double()
    model.load_state_dict(part(whole.state_dict(), ctx.rank, ctx.world_size))
    losses = answer(ctx, model, serial.batches(case, SAMPLES, case["steps"]), 50 * case.seed)
    return serial.outcome(losses, model)


def expected(case: Case) -> list[serial.Outcome]:
    """Return what serial training gives, with the weights cut into each rank's part."""
    model = serial.fill(Part(), case.seed)
    optimizer = serial.sgd(model)
    losses = []
    with torch.random.fork_rng(devices=[]):
        for step, (x, y) in enumerate(serial.batches(case, SAMPLES, case["steps"])):
            optimizer.zero_grad()
            torch.manual_seed(50 * case.seed + step)
            kept = F.dropout(model.rows(torch.tanh(model.columns(x))), 0.25)
            loss = serial.mse(model.head(kept), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    whole = serial.weights(model)
    return [{"losses": losses, "weights": part(whole, rank, case.ranks)} for rank in range(case.ranks)]


EXERCISE = OnRanks(
    solution=train,
    cases=(Case(2, 1, {"steps": 5}), Case(3, 2, {"steps": 5}), Case(4, 3, {"steps": 6})),
    play=play,
    expected=expected,
    result="losses and weights",
    after="06-tensor-parallel",
    place=50,
    start="Run the program as it is, with `mk.compare`. All ranks of a tensor-parallel group compute one "
    "and the same loss. Do they?",
    mistakes=(
        Mistake(
            "still-a-seed-for-each-rank",
            (
                "The ranks of a group work on the same samples, and their losses differ. Where in the program do "
                "they first have different numbers, though they should have the same?",
                "After the all-reduce all ranks hold the same values, as if one device had computed them. Each then "
                "drops others of them: the copies of the head get different gradients, and part, and nobody computes "
                "the model's loss.",
                "Where the activations are whole, all ranks of the group need the same mask, and so the same seed: "
                "leave the rank out of it. (Where they are cut, each needs a mask of its own.)",
            ),
            [("torch.manual_seed(seed + step)", "torch.manual_seed(seed + step + 1000 * ctx.rank)")],
        ),
        Mistake(
            "averages-the-head",
            (
                "The copies of the head agree now. Do the ranks' losses?",
                "Averaging the head's gradients keeps its copies together, and hides that each rank still has a "
                "mask, and so a loss, of its own. The parts that are cut get gradients of different losses. Look at "
                "the masks.",
            ),
            [
                ("torch.manual_seed(seed + step)", "torch.manual_seed(seed + step + 1000 * ctx.rank)"),
                (
                    "        optimizer.step()\n",
                    "        for parameter in model.head.parameters():\n"
                    '            ctx.comm.all_reduce(parameter.grad, op="mean")\n        optimizer.step()\n',
                ),
            ],
        ),
        Mistake(
            "without-dropout",
            (
                "All ranks agree now. With which model?",
                "Without dropout there is nothing to disagree about; but serial training drops a quarter of the "
                "values, and this no longer does.",
            ),
            [("F.dropout(whole, 0.25)", "whole")],
        ),
        Mistake(
            "one-mask-for-all-steps",
            (
                "The first loss is right, the later ones are not. Which mask does the second step use?",
                "With the same seed in each step the same values are dropped for ever. The step belongs into the "
                "seed; the rank does not.",
            ),
            [("torch.manual_seed(seed + step)", "torch.manual_seed(seed)")],
        ),
        Mistake(
            "drops-before-the-sum",
            (
                "Where does the dropout come now: before the all-reduce, or after it? With which masks?",
                "What a rank drops of its partial result is still there in the others': the sum of differently "
                "dropped parts is not a dropped sum. Drop what is whole, and everywhere the same.",
            ),
            [
                (
                    "        whole = SumOverGroup.apply(model.rows(torch.tanh(model.columns(inputs))), ctx.comm)\n"
                    "        torch.manual_seed(seed + step)\n        kept = F.dropout(whole, 0.25)\n",
                    "        torch.manual_seed(seed + step + 1000 * ctx.rank)\n"
                    "        partial = F.dropout(model.rows(torch.tanh(model.columns(inputs))), 0.25)\n"
                    "        kept = SumOverGroup.apply(partial, ctx.comm)\n",
                )
            ],
        ),
    ),
    otherwise=(
        "Print the first row of `kept` on every rank, in the first step. These are activations that all ranks have "
        "whole: what should they be?",
    ),
)
