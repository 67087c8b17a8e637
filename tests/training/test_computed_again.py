"""Forwards that are done twice, by the kit's recomputation or torch's checkpoints: as serial training, or refused."""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mpkit as mk
from mpkit.strategies.stage.recompute import AttentionAgain
from tests.recipes import sgd
from tests.serial import Train, check_equal

HOW: dict[str, Any] = {"loss": F.mse_loss, "optimizer": sgd, "steps": 3}


def data() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(8, 4).double(), torch.randn(8, 2).double())]


class Model(nn.Module):
    """An embedding, blocks in some order, a head."""

    def __init__(self, block: type[nn.Module], order: tuple[int, ...] = (0, 1, 2)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.e, self.h, self.order = nn.Linear(4, 4), nn.Linear(4, 2), order
        self.b = nn.ModuleList(block() for _ in range(3))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.h(self.blocks(self.e(x)))
        return y

    def blocks(self, x: Tensor) -> Any:
        for i in self.order:
            x = x + self.b[i](x)
        return x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l, self.calls = nn.Linear(4, 4), 0
        self.register_buffer("mean", torch.ones(()))

    def forward(self, x: Tensor) -> Any:
        return torch.tanh(self.l(x))


# ---------------------------------------------------------------- gradients that arrive several times in a backward


class Checkpoints(Model):
    reentrant = True

    def blocks(self, x: Tensor) -> Tensor:
        for i in self.order:
            y: Tensor = checkpoint(self.b[i], x, use_reentrant=self.reentrant)
            x = x + y
        return x


class WithoutReentry(Checkpoints):
    reentrant = False


SMALL = 1e-4
REPLICATED = {"zero1": mk.Plan.zero(1, 2, bucket_mb=SMALL), "zero3": mk.Plan.zero(3, 2, microbatches=2)}


@pytest.mark.filterwarnings("ignore::mpkit.errors.UnwisePlan")
@pytest.mark.parametrize("plan", REPLICATED.values(), ids=REPLICATED)
def test_gradients_of_blocks_used_several_times_add_up(train: Train, plan: mk.Plan) -> None:
    """With a backward within the backward they come one by one, which torch's DDP does not take either."""
    check_equal(train, WithoutReentry(Block, (0, 1, 0, 2, 2, 1)), data(), plan, **HOW)
    with pytest.raises(mk.RankFailed, match="use_reentrant=False"):
        train(Checkpoints(Block, (0, 1, 0, 2, 2, 1)), data(), plan, **HOW)


@pytest.mark.filterwarnings("ignore::mpkit.errors.UnwisePlan")
@pytest.mark.parametrize("kind", [Checkpoints, WithoutReentry])
def test_checkpoints_around_blocks_of_a_pipeline(train: Train, kind: type[Checkpoints]) -> None:
    check_equal(train, kind(Block), data(), mk.Plan.gpipe(2, 2), **HOW)


class Counts(Block):
    """Computes something else each time, of the same shapes."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(self.l(x) * self.calls)


class Writes(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.mean *= 0.9
        self.mean = self.mean + 0.1
        self.last = x.detach()
        return super().forward(x) * self.mean


class WritesLate(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 1:
            self.mean *= 0.5
        return super().forward(x) * self.mean


FULL = mk.Plan.ddp(2, recompute="full")


def test_a_second_forward_starts_where_the_first_did(train: Train) -> None:
    """A buffer that is written and replaced, a tensor that is looked at; not what is counted in Python."""
    check_equal(train, Model(Writes), data(), FULL, **HOW)
    with pytest.raises(mk.errors.NotSerial, match="remembers something from one forward to the next"):
        train(Model(Counts), data(), FULL, **HOW)


def test_a_block_that_begins_to_write_later_stops(train: Train) -> None:
    with pytest.raises(mk.RankFailed, match="wrote into a buffer into which it had not written before"):
        train(Model(WritesLate), data(), FULL, **HOW)


class KeepsAux(Block):
    """Keeps a tensor with a graph in an attribute, as mixtures of experts keep their auxiliary loss."""

    def forward(self, x: Tensor) -> Tensor:
        self.aux = super().forward(x)
        return self.aux * 2


class AddsKept(Model):
    def blocks(self, x: Tensor) -> Tensor:
        y: Tensor = super().blocks(x)
        return y + sum(block.aux for block in self.b)


def test_a_tensor_that_a_recomputed_block_keeps_has_a_gradient(train: Train) -> None:
    check_equal(train, AddsKept(KeepsAux), data(), FULL, **HOW)


@dataclass
class State:
    h: Tensor
    n: int = 0


class OnState(Block):
    def forward(self, state: Any) -> Any:
        return State(state.h + super().forward(state.h), state.n + 1)


class InState(Block):
    """Changes what it was given, and returns it."""

    def forward(self, state: Any) -> Any:
        state.h = state.h + super().forward(state.h)
        return state


class Passes(Model):
    """Hands a structure from block to block."""

    def __init__(self, block: type[nn.Module], made: Any) -> None:
        super().__init__(block)
        self.made = made

    def blocks(self, x: Tensor) -> Tensor:
        state = self.made(h=x)
        for block in self.b:
            state = block(state)
        y: Tensor = state.h
        return y


@pytest.mark.parametrize("plan", [FULL, mk.Plan.gpipe(2, 2)], ids=["recomputed", "gpipe"])
def test_structures_go_from_block_to_block(train: Train, plan: mk.Plan) -> None:
    check_equal(train, Passes(OnState, State), data(), plan, **HOW)


def test_what_cannot_be_looked_into_is_refused(train: Train) -> None:
    with pytest.raises(ValueError, match="changes a list, a dict or an object that it was given"):
        train(Passes(InState, State), data(), mk.Plan.gpipe(2, 2), **HOW)
    with pytest.raises(
        ValueError, match=r"within an object that cannot be looked into.*register_pytree_node"
    ):
        train(Passes(OnState, partial(SimpleNamespace, n=0)), data(), mk.Plan.gpipe(2, 2), **HOW)


class Differentiates(Block):
    def forward(self, x: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(super().forward(x).sum(), x, create_graph=True)
        return slope


class DifferentiatesBlocks(Model):
    def blocks(self, x: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(super().blocks(x).sum(), x, create_graph=True)
        return slope


@pytest.mark.parametrize(("model", "plan", "words"), [
    (Model(Differentiates), FULL, "computes gradients in its forward"),
    (DifferentiatesBlocks(Block), mk.Plan.zero(3, 2), "computes gradients of what Block returned"),
], ids=["recomputed", "gathered"])  # fmt: skip
def test_gradients_of_what_is_gone_are_refused(
    train: Train, model: nn.Module, plan: mk.Plan, words: str
) -> None:
    with pytest.raises(mk.RankFailed, match=words):
        train(model, data(), plan, **HOW)


def test_a_transformed_layer_cannot_be_gathered(train: Train) -> None:
    with pytest.raises(mk.RankFailed, match=r"calls Linear within a transform of torch\.func"):
        train(Transformed().double(), data(), mk.Plan.zero(3, 2), **HOW)


class Transformed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.scale(torch.vmap(self.layer)(x))
        return y


def test_a_selective_recomputation_computes_under_the_forwards_autocast() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 8, 4, requires_grad=True) for _ in range(3))
    found = []
    for again in (nullcontext(), AttentionAgain()):
        with torch.autocast("cpu", torch.bfloat16), again:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        found.append(torch.autograd.grad(y.float().square().sum(), (q, k, v)))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
