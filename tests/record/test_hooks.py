"""Model states by formula, the optimizer's step and the layers as ops."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from mpkit.trace import Kind, read_rank
from mpkit.trace.record.hooks import watch
from mpkit.trace.record.recorder import Recorder


class Tied(nn.Module):
    """An embedding whose weight is the head's as well."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x.long().clamp(0, 10)))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def frozen() -> nn.Module:
    model = mlp()
    model[0].requires_grad_(False)
    return model


def sgd(params: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def plain(params: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def adamw(params: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.1)


# Rajbhandari et al. 2019, section 3.1, in fp32: 4 bytes per parameter, 4 per gradient, 8 for Adam's two moments.
@pytest.mark.parametrize(("optimizer", "states"), [(plain, 0), (sgd, 4), (adamw, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("make", [mlp, Tied, frozen])
def test_model_states_are_exact(
    tmp_path: Path, make: Callable[[], nn.Module], dtype: torch.dtype, optimizer: Callable, states: int
) -> None:
    record = Recorder(tmp_path, 0)
    model = make().to(dtype)
    optim = optimizer([p for p in model.parameters() if p.requires_grad])
    all_, trained = (
        dtype.itemsize // 4 * sum(p.numel() for p in model.parameters() if p.requires_grad or not only)
        for only in (False, True)
    )
    watched = watch(record, model, optim)
    assert record.ledger.held["params"] == 4 * all_
    for _ in range(3):
        with record.step(_):
            for _ in range(2):  # gradients are added up
                model(torch.ones(3, 4, dtype=dtype)).sum().backward()
                assert record.ledger.held["grads"] == 4 * trained
            optim.step()
            assert record.ledger.held["optimizer"] == states * trained
            optim.zero_grad()
            assert record.ledger.held["grads"] == 0
    assert record.ledger.held["activations"] == 0
    # A step reads gradients, and reads and writes parameters and states.
    rank = read_rank(tmp_path, 0)
    steps = rank.ops[rank.ops["kind"] == Kind.OPTIMIZER]
    assert list(steps["step"]) == [0, 1, 2]
    assert list(steps["bytes"]) == [(2 * 4 + 4 + 2 * states) * trained] * 3
    assert {rank.name(n) for n in steps["name"]} == {type(optim).__name__}
    assert steps["end"].all()

    watched.close()
    model(torch.ones(3, 4, dtype=dtype)).sum().backward()
    optim.step()
    assert record.ledger.held["grads"] == 0
    assert len(read_rank(tmp_path, 0).ops) == len(rank.ops)
    del model, optim
    assert not any(record.ledger.held.values())


def test_gradients_are_counted_however_they_are_kept(tmp_path: Path) -> None:
    record = Recorder(tmp_path, 0)
    model = nn.ModuleList([nn.Linear(n, 1, bias=False) for n in (2, 3, 4)])
    watch(record, model)

    def backward(*used: int) -> int:
        sum(model[i](torch.ones(model[i].in_features)) for i in used).backward()
        return record.ledger.held["grads"]

    for _ in range(3):
        assert backward(0, 1, 2) == 4 * 9
        model.zero_grad()
        assert record.ledger.held["grads"] == 0
    # some parameters only, then the others too, then all again
    assert [backward(*used) for used in [(0,), (1,), (0, 1, 2), (0,)]] == [8, 20, 36, 36]
    # gradients that somebody keeps are still held, and the new ones as well
    kept = [p.grad for p in model.parameters()]
    model.zero_grad()
    assert [backward(0, 1, 2), backward(0, 1, 2)] == [72, 72]
    del kept
    assert record.ledger.held["grads"] == 36
    # gradients kept at zero
    model.zero_grad(set_to_none=False)
    assert backward(0, 1, 2) == 36
    # gradients that are views of one bucket are one storage
    bucket = torch.zeros(9)
    for parameter, view in zip(model.parameters(), bucket.split([2, 3, 4]), strict=True):
        parameter.grad = view.view(1, -1)
    assert [backward(0, 1, 2), backward(0, 1, 2)] == [36, 36]
    del bucket, view
    model.zero_grad()
    assert record.ledger.held == dict.fromkeys(record.ledger.held, 0) | {"params": 36}


def test_an_optimizer_may_take_a_closure(tmp_path: Path) -> None:
    record = Recorder(tmp_path, 0)
    model = nn.Linear(3, 1)
    optim = torch.optim.LBFGS(model.parameters(), max_iter=2)
    watch(record, model, optim)

    def closure() -> float:
        optim.zero_grad()
        with record.span("closure"):
            loss = model(torch.ones(3)).square().sum()
            loss.backward()
        return loss.item()

    optim.step(closure)
    ops = read_rank(tmp_path, 0).ops
    assert list(ops["kind"][:2]) == [Kind.OPTIMIZER, Kind.COMPUTE]
    assert list(ops["depth"][:2]) == [0, 1]
    assert ops["end"].all()


def test_layers_divide_an_action(tmp_path: Path) -> None:
    record = Recorder(tmp_path, 0, layers=True)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    watched = watch(record, model, flops={"0": (96.0, 192.0), "2": (48.0, 96.0)})
    for microbatch in range(2):
        index = record.begin(Kind.FORWARD, stage=1, microbatch=microbatch)
        out = model(torch.ones(3, 4, requires_grad=True)).sum()
        record.end(index)
        index = record.begin(Kind.BACKWARD, stage=1, microbatch=microbatch)
        out.backward()
        record.end(index)
    rank = read_rank(tmp_path, 0)
    half = rank.ops[:8]
    assert [rank.name(n) for n in half["name"]] == ["", "0", "1", "2", "", "2", "1", "0"]
    assert list(half["kind"]) == [Kind.FORWARD] * 4 + [Kind.BACKWARD] * 4
    assert list(half["depth"]) == [0, 1, 1, 1] * 2
    assert list(half["flops"]) == [0, 96, 0, 48, 0, 96, 0, 192]
    assert set(half["stage"]) == {1}
    assert list(rank.ops["microbatch"]) == [0] * 8 + [1] * 8
    for whole, *parts in (half[:4], half[4:]):  # the parts follow each other within the whole
        edges = [whole["start"], *(t for p in parts for t in (p["start"], p["end"])), whole["end"]]
        assert edges == sorted(edges)
    model(torch.ones(3, 4)).sum().backward()  # no action: a look at the model between steps
    watched.close()
    record.begin(Kind.FORWARD)
    model(torch.ones(3, 4)).sum().backward()
    assert len(read_rank(tmp_path, 0).ops) == 17
