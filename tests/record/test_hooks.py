"""Model states by formula, the optimizer's step and the layers as ops."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mpkit.trace import Kind, read_rank
from mpkit.trace.record.flops import count
from mpkit.trace.record.hooks import watch
from mpkit.trace.record.operators import _grouped_flops
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


# ---- What a forward saves for its backward: by hand and by measurement.

BATCH = 3

# What each layer's backward needs, for 3 rows of fp32; a number is counted once, whoever else needs it.
BY_HAND = {
    "the input of a linear layer": (nn.Sequential(nn.Linear(4, 8)), 0),  # the input itself is tracked before
    "ReLU keeps its output, which the next layer needs too": (
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)),
        BATCH * 8 * 4,
    ),
    "GELU keeps its input, the next layer needs its output": (
        nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)),
        2 * BATCH * 8 * 4,
    ),
    "tanh keeps its output, which is tracked by itself": (nn.Sequential(nn.Linear(4, 8), nn.Tanh()), 0),
    "a norm keeps its input, the mean and 1/deviation of each row": (
        nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8)),
        BATCH * (8 + 2) * 4,
    ),
    "a frozen first layer needs nothing": (
        nn.Sequential(nn.Linear(4, 8).requires_grad_(False), nn.Linear(8, 2)),
        BATCH * 8 * 4,
    ),
}


@pytest.mark.parametrize(("model", "nbytes"), BY_HAND.values(), ids=BY_HAND)
def test_what_is_saved_is_what_the_layers_need(tmp_path: Path, model: nn.Module, nbytes: int) -> None:
    record = Recorder(tmp_path, 0)
    watch(record, model)
    x = torch.ones(BATCH, 4)
    record.ledger.track(x, "activations")
    with record.memory.saving():
        out = model(x)
    record.ledger.track(out, "activations")
    assert record.ledger.held["activations"] == x.nbytes + out.nbytes + nbytes
    out.sum().backward()
    assert record.ledger.held["activations"] == x.nbytes + out.nbytes
    del x, out
    assert record.ledger.held["activations"] == 0


def test_a_write_in_place_is_an_error_as_in_plain_pytorch(tmp_path: Path) -> None:
    record = Recorder(tmp_path, 0)
    weight = torch.ones(4, requires_grad=True)
    with record.memory.saving():
        saved = weight.exp()
        loss = saved.sum()
    saved.data.add_(1)  # unseen by autograd
    loss.backward(retain_graph=True)
    with torch.no_grad():
        saved.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*Write `x = x \+ y`"):
        loss.backward()


# ---- Counted FLOPs are those by hand, and counting leaves no trace.

B, T, H, HEADS = 2, 16, 64, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(H, 3 * H)
        self.out = nn.Linear(H, H)
        self.drop = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(T)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        q, k, v = self.qkv(self.norm(x)).view(B, T, 3, HEADS, H // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.drop(self.out(y.transpose(1, 2).reshape(B, T, H)))


@pytest.mark.parametrize("wants", [False, True], ids=["data", "from the stage before"])
def test_a_linear_layer_costs_two_a_weight_a_row_and_bytes_once(wants: bool) -> None:
    k, n, rows = 3, 5, 7
    flops = count(nn.Linear(k, n), torch.zeros(rows, k, requires_grad=wants))
    assert flops.forward == 2 * rows * k * n
    assert flops.backward == (2 if wants else 1) * 2 * rows * k * n
    assert flops.forward_bytes == 4 * (k * n + n + rows * k + rows * n)  # weight, bias, input, output


def test_attention_is_counted_on_a_cpu_as_on_a_gpu() -> None:
    flops = count(Attention(), torch.zeros(B, T, H, requires_grad=True))
    linear = 2 * B * T * H * 4 * H
    scores = B * T * (T + 1) * H  # causal q k^T; as much again for the weighted sum of v
    assert flops.forward == linear + 2 * scores
    assert flops.backward == 2 * linear + 5 * scores  # flash attention computes the scores anew
    assert flops.layers["qkv"][0] == 0.75 * linear
    assert flops.layers["out"][0] == 0.25 * linear
    assert flops.attention[0] == 2 * scores


def test_fewer_heads_of_keys_than_of_queries_cost_as_much_as_repeated_ones() -> None:
    few, width = torch.zeros(B, 2, T, 8, requires_grad=True), nn.Linear(8, 8)

    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = width

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(self.q(x), few, few, enable_gqa=True)

    flops = count(Grouped(), torch.zeros(B, HEADS, T, 8, requires_grad=True))
    linear, scores = 2 * B * HEADS * T * 8 * 8, 2 * B * HEADS * T * T * 8
    assert (flops.forward, flops.backward) == (linear + 2 * scores, 2 * linear + 5 * scores)


def test_inputs_and_outputs_may_be_dicts_and_tied_weights_count_twice() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(6, 6, bias=False)
            self.down = nn.Linear(6, 6, bias=False)
            self.down.weight = self.up.weight

        def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {"y": self.down(self.up(batch["x"])), "ids": batch["ids"]}

    inputs = {"x": torch.zeros(2, 6), "ids": torch.zeros(2, dtype=torch.long)}
    flops = count(Tied(), inputs)
    assert (flops.forward, flops.backward) == (2 * 144, 3 * 144)


def test_a_module_far_too_large_to_run_is_counted() -> None:
    with torch.device("meta"):
        model = nn.Linear(2**20, 2**20, bias=False)  # 4 TiB
    assert count(model, torch.empty(1, 2**20, device="meta")).forward == 2 * 2**40


def test_causal_attention_counts_what_is_attended_to() -> None:
    def attend(q: torch.Tensor, is_causal: bool) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, q, q, is_causal=is_causal)

    queries = torch.zeros(1, 2, 16, 8, requires_grad=True)
    whole, causal = (count(partial(attend, is_causal=is_causal), queries) for is_causal in (False, True))
    assert causal.forward / whole.forward == causal.backward / whole.backward == 17 / 32


def test_a_grouped_product_multiplies_each_row_with_one_matrix() -> None:
    rows, matrices = torch.empty(10, 8), torch.empty(4, 8, 6)
    assert _grouped_flops(rows, matrices) == 2 * 10 * 8 * 6
    assert _grouped_flops(rows.expand(4, 10, 8), matrices) == 4 * 2 * 10 * 8 * 6
