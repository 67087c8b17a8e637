"""mk.prove: a wrapped module's first steps are compared with plain PyTorch; nothing is found where all is right."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mpkit as mk
from mpkit.models import GPT, next_token_loss
from mpkit.strategies.tensor import operators
from mpkit.strategies.wrappers.pipeline import PipelineParallel
from tests.serial import Clusters

sys.path.insert(0, str(Path(__file__).parent))
from loops import Branches, Normed, Toy, adamw, data, mine, momentum, proved

Wrap = Callable[..., Any]


class Outputs(nn.Module):
    """Draws at random, keeps a term of the loss, returns a dict in which one output is computed from another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(10, 8), nn.Linear(8, 5)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Any]:
        self.seen += 1
        hidden = checkpoint(self._hidden, x, use_reentrant=False)
        self.kept = hidden.square().mean()
        logits = self.last(hidden)
        return {"loss": F.mse_loss(logits, target), "all": (logits, [hidden]), "none": None}

    def _hidden(self, x: Tensor) -> Tensor:
        return F.dropout(self.first(x).tanh(), 0.25, self.training)


def plainly(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def from_a_dict(model: Any, x: Tensor, y: Tensor) -> Tensor:
    out = model(x, target=y)
    made: Tensor = out["loss"] + 0.1 * out["all"][0].square().mean() + 0.1 * model.module.kept
    return made


def from_two_forwards(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x) + model(x.flip(0)), y)


def by_the_left(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x, "left"), y)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Tensor, Tensor], Tensor]]] = {
    "tied and frozen weights": (Toy, plainly), "buffers": (Normed, plainly), "outputs": (Outputs, from_a_dict),
    "two forwards": (Normed, from_two_forwards), "unused": (Branches, by_the_left),
}  # fmt: skip


def loop(
    ctx: Any, wrap: Wrap, make: Callable[[], nn.Module] = Toy,
    loss: Callable[[Any, Tensor, Tensor], Tensor] = plainly,
    optimizer: Callable[[Any], torch.optim.Optimizer] = momentum, accumulate: bool = False,
) -> str:  # fmt: skip
    """Train for three steps, and return the line of the proof."""
    torch.manual_seed(3)
    module = make()
    torch.manual_seed(ctx.rank)
    model = proved(wrap, module, 2)
    updates = optimizer(model.parameters())
    x, y = data()
    for _ in range(3):
        updates.zero_grad()
        for part in range(2 if accumulate else 1):
            last = part == accumulate
            with nullcontext() if last else model.no_sync():
                loss(model, mine(ctx, x), mine(ctx, y)).backward()
        updates.step()
    return str(model._proof.line)


def every_case(ctx: Any) -> dict[str, str]:
    unused = {"find_unused_parameters": True}
    return {
        name: loop(ctx, partial(mk.ddp, **unused if name == "unused" else {}), make, loss)
        for name, (make, loss) in CASES.items()
    }


def test_what_is_right_is_found_equal(clusters: Clusters) -> None:
    for found in clusters(2).run(every_case):
        for name, line in found.items():
            assert ": equal to plain PyTorch in steps 1 and 2: gradients within " in line, (name, line)
            assert line.endswith(("e-08", "e-07", "0")), (name, line)


def in_a_chain(ctx: Any) -> list[str]:
    """Two wrapped modules in a row, the second of which changes its input in place; a cell that is used three times."""
    first, last = (
        proved(mk.ddp, nn.Linear(10, 8)),
        proved(mk.ddp, nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 5))),
    )
    cell = proved(mk.ddp, nn.GRUCell(10, 5))
    updates = [momentum(model.parameters()) for model in (first, last, cell)]
    x, y = (mine(ctx, each) for each in data())
    hidden = torch.zeros(len(x), 5)
    for _ in range(3):
        hidden = cell(x, hidden)
    (F.mse_loss(last(first(x).mul_(2)), y) + F.mse_loss(hidden, y)).backward()
    for optimizer in updates:
        optimizer.step()
    return [model._proof.line for model in (first, last, cell)]


def test_modules_in_a_row_and_in_a_loop_are_compared(clusters: Clusters) -> None:
    for lines in clusters(2).run(in_a_chain):
        assert all(": equal to plain PyTorch in step 1: " in line for line in lines), lines


def penalized(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y) + sum(0.1 * p.square().sum() for p in model.parameters())


def in_parts_and_penalized(ctx: Any) -> list[str]:
    return [loop(ctx, mk.ddp, accumulate=True), loop(ctx, mk.ddp, loss=penalized)]


def test_gradients_that_accumulate_are_compared_and_penalties_said(clusters: Clusters) -> None:
    for equal, said in clusters(2).run(in_parts_and_penalized):
        assert equal.startswith("mk.prove(DataParallel): equal to plain PyTorch in steps 1 and 2: ")
        assert "mk.prove(DataParallel): not verified: the loss uses the parameters by themselves" in said


def steps_of_a_gpt(ctx: Any, kind: str) -> str:
    torch.manual_seed(0)
    module = GPT(layers=2, width=32, heads=4, dropout=0.1)
    ids = torch.randint(0, 60, (4, 16))
    if kind == "pipeline":
        model: Any = mk.pipeline(module, example=(ids, ids), loss=next_token_loss, prove=2)
    else:
        model = proved(mk.tensor_parallel, module, 2)
    updates = adamw(model.parameters())
    for _ in range(3):
        updates.zero_grad()
        if kind == "pipeline":
            model.step(ids, ids)
        else:
            next_token_loss(model(ids), ids).backward()
        updates.step()
    return str(model._proof.line)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["width", "pipeline"])
def test_divided_layers_and_stages_are_compared_with_their_random_numbers(
    clusters: Clusters, kind: str
) -> None:
    for line in clusters(2).run(steps_of_a_gpt, kind):
        assert ": equal to plain PyTorch in steps 1 and 2: gradients within " in line


def divided_faults(ctx: Any) -> dict[str, str]:
    split, found = PipelineParallel._split, {}
    wrong: dict[str, Any] = {
        "width": patch.object(operators._G, "forward", staticmethod(lambda ctx, group, y: y.clone())),
        "pipeline": patch.object(PipelineParallel, "_split", lambda *given: split(*given)[:1] * 2),
    }
    for kind, fault in wrong.items():
        with fault, pytest.raises(mk.errors.NotSerial) as e:
            steps_of_a_gpt(ctx, kind)
        found[kind] = str(e.value)
    return found


@pytest.mark.slow
def test_sums_and_micro_batches_that_are_missing_are_found(clusters: Clusters) -> None:
    one, other = clusters(2).run(divided_faults)
    assert one == other and all("forward is" in said for said in one.values()), one


def with_other_models(ctx: Any) -> list[str]:
    found = []
    for kind in ("size", "mode"):
        module = nn.Linear(4, 3 + (ctx.rank if kind == "size" else 0))
        module.train(kind != "mode" or ctx.rank == 0)
        with pytest.raises(ValueError, match="the ranks have different models") as e:
            proved(lambda module: module, module)
        found.append(str(e.value))
    return found


def test_ranks_with_different_models_are_told_so(clusters: Clusters) -> None:
    (size, mode), _ = clusters(2).run(with_other_models)
    assert "weight is [4, 4] in torch.float32, trained, on rank 1, and [3, 4] in torch.float32" in size
    assert "the model is in evaluation mode on rank 1, and in training mode on rank 0" in mode
