"""DP, as torch.nn.DataParallel does it: five exchanges a batch, rank 0 busier and fuller, serial training's numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.data import text_batches
from mpkit.launch.session.run import Run
from mpkit.models import GPT, next_token_loss
from tests.serial import check_equal

Train = Callable[..., Run]


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


# ---------------------------------------------------------------- what it is known for


def test_five_exchanges_a_batch(train: Train) -> None:
    torch.manual_seed(1)
    model = GPT(layers=2, width=16, heads=2, length=12)
    data = text_batches(8, 12, 3)
    run = train(model, data, mk.Plan.dp(4), loss=next_token_loss, optimizer=adamw, steps=3)
    frame = run.timeline().to_dataframe()
    frame = frame[(frame["step"] == 2) & (frame["lane"] != "host")]
    psi = 4 * sum(parameter.numel() for parameter in model.parameters())
    inputs, outputs = data[0][0].nbytes, 8 * 12 * 256 * 4
    shared = [
        ("scatter", inputs),
        ("broadcast", psi),
        ("forward", None),
        ("gather", outputs),
        ("scatter", outputs),
        ("backward", None),
        ("reduce", psi),
    ]
    alone = [("forward", None), ("backward", None)]  # of the loss
    for rank in range(4):
        mine = frame[frame["rank"] == rank]
        found = [
            (kind, None if lane == "compute" else nbytes)
            for kind, lane, nbytes in zip(mine["kind"], mine["lane"], mine["bytes"], strict=True)
        ]
        assert found == (shared if rank else [*shared[:4], *alone, *shared[4:], ("optimizer", None)])


def test_rank_0_is_fuller_than_the_rest(train: Train) -> None:
    torch.manual_seed(2)
    model = GPT(layers=2, width=16, heads=2, length=12)
    run = train(model, text_batches(8, 12, 1), mk.Plan.dp(2), loss=next_token_loss, optimizer=adamw, steps=3)
    timeline = run.timeline()
    psi = 4 * sum(parameter.numel() for parameter in model.parameters())
    first, second = timeline.peak_memory
    assert (first["params"], first["grads"], first["optimizer"]) == (psi, psi, 2 * psi)
    assert (second["params"], second["grads"], second["optimizer"]) == (psi, psi, 0)
    assert first["activations"] > 1.5 * second["activations"]  # all outputs, and what the loss makes of them
    # Between two batches the others have nothing.
    held = timeline.held[timeline.held["rank"] == 1]
    assert [int(held["total"][held["category"] == number][-1]) for number in (0, 1)] == [0, 0]


# ---------------------------------------------------------------- equal to serial training


class Two(nn.Module):
    """Two inputs by name, two outputs, a buffer that each forward changes, and whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.linear, self.norm = nn.Embedding(5, 4), nn.Linear(4, 2), nn.BatchNorm1d(4)

    def forward(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        h = self.norm(x + self.embed(tokens))
        return self.linear(h), h


def test_several_inputs_and_outputs_micro_batches_and_evaluation(train: Train) -> None:
    torch.manual_seed(3)
    data = [({"x": normal(8, 4), "tokens": torch.randint(5, (8,))}, normal(8, 2))]

    def loss(outputs: Any, targets: Tensor) -> Tensor:
        return F.mse_loss(outputs[0], targets) + outputs[1].square().mean()

    two = Two().double()
    check_equal(train, two, data, mk.Plan.dp(4), loss=loss, optimizer=adamw)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    plan = mk.Plan.dp(2, microbatches=2)
    check_equal(
        train,
        model,
        [(normal(size, 3), normal(size, 2)) for size in (4, 12)],
        plan,
        loss=F.mse_loss,
        optimizer=adamw,
    )


# ---------------------------------------------------------------- what it refuses


class Summary(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x).mean(0)


class Named(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return {"logits": super().forward(x)}


def test_outputs_that_cannot_be_gathered(train: Train) -> None:
    data = [(torch.zeros(6, 3), torch.zeros(6, 2))]
    with pytest.raises(ValueError, match=r"of 3 samples the model makes \[2\] float32.*Plan.ddp\(2\)"):
        train(Summary(3, 2), data, mk.Plan.dp(2), loss=lambda o, t: (o - t).mean(), optimizer=adamw, steps=1)
    with pytest.raises(ValueError, match="the model makes neither a tensor nor a tuple"):
        train(
            Named(3, 2),
            data,
            mk.Plan.dp(2),
            loss=lambda o, t: (o["logits"] - t).mean(),
            optimizer=adamw,
            steps=1,
        )


def test_parts_that_are_not_equal(train: Train) -> None:
    with pytest.raises(ValueError, match=r"2 ranks do not divide a batch of 7. Plan.ddp\(2\)"):
        train(
            nn.Linear(3, 2),
            [(torch.zeros(7, 3), torch.zeros(7, 2))],
            mk.Plan.dp(2),
            loss=F.mse_loss,
            optimizer=adamw,
        )


def test_an_output_that_the_loss_leaves_out(train: Train) -> None:
    data = [({"x": normal(8, 4), "tokens": torch.randint(5, (8,))}, normal(8, 2))]
    with pytest.raises(mk.errors.MpkitError, match="does not use the model's outputs number 1"):
        train(
            Two().double(),
            data,
            mk.Plan.dp(2),
            loss=lambda o, t: F.mse_loss(o[0], t),
            optimizer=adamw,
            steps=1,
        )
