"""DDP equals serial training, and sends what torch's own DDP sends."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.launch.session.run import Run
from mpkit.strategies.prepare.prepare import prepare
from mpkit.strategies.runtime.train import Training
from tests.serial import Train, check_equal


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01)


def plain_sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def adagrad(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(params, lr=1e-2)


def grouped(params: Any) -> torch.optim.Optimizer:
    """Matrices decay, vectors do not, as everybody does it."""
    params = list(params)
    groups = [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0, "lr": 0.02},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-2)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


# ---------------------------------------------------------------- models that are no chains


class Residual(nn.Module):
    """Two convolutions and what skips them, as in a ResNet."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.relu(self.first(x)))


class ResNet(nn.Module):
    """Called by name, with an input that may be left out; its parts are in no order."""

    def __init__(self, classes: int = 3, width: int = 4) -> None:
        super().__init__()
        self.head = nn.Linear(width, classes)
        self.blocks = nn.ModuleList(Residual(width) for _ in range(2))
        self.stem = nn.Conv2d(1, width, 3)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, images: Tensor, brightness: Tensor | None = None) -> Tensor:
        x = self.stem(images) if brightness is None else self.stem(images * brightness)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)) * self.scale)


@pytest.mark.parametrize("plan", [mk.Plan.ddp(3, microbatches=2)], ids=repr)
def test_a_model_that_is_no_chain(train: Train, plan: mk.Plan) -> None:
    torch.manual_seed(1)
    model = ResNet().double()
    images, brightness, classes = normal(7, 1, 6, 6), normal(7, 1, 1, 1), torch.randint(3, (7,))
    how: dict[str, Any] = {"loss": F.cross_entropy, "optimizer": sgd, "steps": 5}
    for inputs in ({"brightness": brightness, "images": images}, (images, brightness)):
        check_equal(train, model, [(inputs, classes)], plan, microbatches=plan.microbatches, **how)


# ---------------------------------------------------------------- random models


class Tied(nn.Module):
    """A weight that is used twice."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(width, width), nn.Linear(width, width)
        self.outward.weight = self.inward.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.outward(self.inward(x).tanh())


@st.composite
def models(draw: st.DrawFn) -> tuple[nn.Module, int, bool]:
    """A random model of layers from [batch, width] to [batch, 2], its width, and whether it normalizes."""
    torch.manual_seed(draw(st.integers(0, 10**6)))
    first = width = draw(st.integers(1, 7))
    layers: list[nn.Module] = []
    for kind in draw(st.lists(st.sampled_from(["linear", "tied", "frozen", "norm", "tanh"]), max_size=5)):
        if kind == "norm":
            layers.append(nn.BatchNorm1d(width, affine=draw(st.booleans())))
        elif kind == "tanh":
            layers.append(nn.Tanh())
        elif kind == "tied":
            layers.append(Tied(width))
        else:
            wider = draw(st.integers(1, 7))
            layers.append(nn.Linear(width, wider, bias=draw(st.booleans())).requires_grad_(kind != "frozen"))
            width = wider
    model = nn.Sequential(*layers, nn.Linear(width, 2))
    return model, first, any(isinstance(layer, nn.BatchNorm1d) for layer in layers)


def halving(step: int) -> float:
    return 0.5**step


# No shrinking: it would be hundreds of runs more.
@pytest.mark.soak
@settings(max_examples=12, phases=[Phase.explicit, Phase.generate])
@given(data=st.data())
def test_random_models_equal_serial_training(train: Train, data: st.DataObject) -> None:
    model, width, normed = data.draw(models(), label="model")
    n = data.draw(st.integers(1, 5), label="ranks")
    m = 1 if normed else data.draw(st.integers(1, 3), label="microbatches")
    # Over few samples a BatchNorm gives gradients that are zero but for rounding, of which others make whole steps.
    batch = data.draw(st.integers(max(2, n) if normed else m, 16), label="batch")
    options: dict[str, Any] = {"microbatches": m}
    if data.draw(st.booleans(), label="DP"):
        options["data_parallel"] = "dp"
    else:
        options["bucket_mb"] = data.draw(st.sampled_from([1e-5, 1e-4, 1.0, 25.0]), label="bucket_mb")
    double = data.draw(st.booleans(), label="double")
    choices = [sgd, adamw, adagrad, grouped] if double and not normed else [plain_sgd]
    how: dict[str, Any] = {
        "optimizer": data.draw(st.sampled_from(choices), label="optimizer"),
        "max_grad_norm": data.draw(st.sampled_from([None, 0.1, 10.0]), label="max_grad_norm"),
        "lr_schedule": data.draw(st.sampled_from([None, halving]), label="lr_schedule"),
    }
    dtype = torch.float64 if double else torch.float32
    batches = [(torch.randn(batch, width, dtype=dtype), torch.randn(batch, 2, dtype=dtype)) for _ in range(2)]
    plan = mk.Plan(dp=n, **options)
    check_equal(train, model.to(dtype), batches, plan, microbatches=m, loss=F.mse_loss, **how)


# ---------------------------------------------------------------- parameters that nobody uses


class Forks(nn.Module):
    """Samples that begin with a 1 go another way; `spare` is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.spare = (nn.Linear(3, 2).double() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        ones = x[:, 0] == 1
        if not ones.any():
            return self.left(x)
        return torch.where(ones[:, None], self.right(x), self.left(x))


def forked(*first: int) -> list[tuple[Tensor, Tensor]]:
    x = normal(len(first), 3)
    x[:, 0] = torch.tensor(first)
    return [(x, normal(len(first), 2))]


@pytest.mark.parametrize("make", [mk.Plan.ddp, mk.Plan.dp])
def test_unused_parameters_are_named(train: Train, make: Any) -> None:
    torch.manual_seed(3)
    model = Forks()
    how: dict[str, Any] = {"loss": F.mse_loss, "optimizer": sgd, "steps": 2}
    for data, names in ((forked(0, 0), "left|right|spare"), (forked(0, 1), "right.weight|spare.weight")):
        with pytest.raises(
            mk.RankFailed, match=rf"No gradient came for ({names}).*unused='allow' in the Plan"
        ):
            train(model, data, make(2), **how)
    model.spare.requires_grad_(False)
    with pytest.raises(
        mk.RankFailed, match=r"rank 0 of 2 failed.*No gradient came for right.weight, right.bias"
    ):
        train(model, forked(0, 1), make(2), **how)


@pytest.mark.parametrize("make", [mk.Plan.ddp, mk.Plan.dp])
def test_unused_parameters_are_left_alone_if_allowed(train: Train, make: Any) -> None:
    torch.manual_seed(4)
    for data in (forked(0, 0, 0), forked(0, 1, 0)):
        # Weight decay would change a parameter that has a gradient of zero.
        plan = make(3, unused="allow")
        check_equal(
            train, Forks(), data, plan, microbatches=plan.microbatches, loss=F.mse_loss, optimizer=adamw
        )


# ---------------------------------------------------------------- what is sent, and when


def wide(layers: int = 4) -> nn.Module:
    """Layers of 1 MiB and a bias each."""
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(layers)))


class Backwards(nn.Module):
    """What is made last is used first."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first, self.small = nn.Linear(512, 512), nn.Linear(512, 512), Scale()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(self.small(x)))


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by, self.plus = nn.Parameter(torch.ones(512)), nn.Parameter(torch.zeros(512))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by + self.plus


def sent(run: Run, kind: str) -> list[list[int]]:
    """The payloads that rank 0 sent in each step."""
    frame = run.timeline().to_dataframe()
    frame = frame[(frame["rank"] == 0) & (frame["kind"] == kind)]
    return [frame[frame["step"] == step]["bytes"].tolist() for step in range(run.steps)]


def test_buckets_are_rebuilt_after_the_first_step(train: Train) -> None:
    torch.manual_seed(5)
    data = [(torch.randn(2, 512), torch.randn(2, 512))]
    how: dict[str, Any] = {"loss": F.mse_loss, "optimizer": plain_sgd, "steps": 3}
    layer = 2**20 + 512 * 4
    run = train(wide(), data, mk.Plan.ddp(2, bucket_mb=2.5), **how)
    # A bucket is full with 2.5 MiB or more, the first with 1 MiB; at first in reverse order of the parameters.
    assert sent(run, "all_reduce") == [[layer, 3 * layer]] * 3
    # Then in the order in which the gradients came in step 0, which rank 0 tells: those of the layer used last first.
    run = train(Backwards(), data, mk.Plan.ddp(2, bucket_mb=2.5), **how)
    small = 2 * 512 * 4
    assert sent(run, "all_reduce") == [[layer + small, layer]] + 2 * [[layer, layer + small]]
    order = sent(run, "broadcast")
    assert (len(order[0]), order[1:]) == (1, [[], []])


def test_only_the_last_micro_batch_sends(train: Train) -> None:
    torch.manual_seed(6)
    data = [(torch.randn(8, 512), torch.randn(8, 512))]
    how: dict[str, Any] = {"loss": F.mse_loss, "optimizer": plain_sgd, "steps": 2}
    once = train(wide(2), data, mk.Plan.ddp(2), **how)
    often = train(wide(2), data, mk.Plan.ddp(2, microbatches=4), **how)
    assert sent(often, "all_reduce") == sent(once, "all_reduce")
    frame = often.timeline().step(1).to_dataframe()
    frame = frame[frame["rank"] == 0]
    ends = frame[frame["kind"] == "backward"].sort_values("start")["end"].tolist()
    assert (frame[frame["kind"] == "all_reduce"]["start"] >= ends[-2]).all()


# ---------------------------------------------------------------- beside torch's own


def torchs_own(
    ctx: Any, model: nn.Module, data: Any, bucket_mb: float
) -> tuple[dict[str, Tensor], list[int]]:
    """Gradients by torch's DistributedDataParallel, and how many all-reduces each of three iterations took."""
    replica = nn.parallel.DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=bucket_mb)
    calls: list[int] = []

    def mean(bucket: Any) -> Any:
        calls[-1] += 1
        work = torch.distributed.all_reduce(bucket.buffer() / ctx.world_size, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    replica.register_comm_hook(None, lambda _, bucket: mean(bucket))
    inputs, targets = (part[ctx.rank :: ctx.world_size] for part in data)
    for _ in range(3):
        calls.append(0)
        replica.zero_grad()
        F.mse_loss(replica(inputs), targets).backward()
    return {name: p.grad for name, p in replica.module.named_parameters() if p.grad is not None}, calls


def ours(ctx: Any, model: nn.Module, data: Any, plan: mk.Plan) -> dict[str, Tensor]:
    how: dict[str, Any] = {"loss": F.mse_loss, "optimizer": plain_sgd, "steps": 1, "ranks": plan.ranks}
    training = Training(ctx, prepare(copy.deepcopy(model), [data], plan, **how))
    training.step(0)
    return {piece.name: piece.parameter.grad.clone() for piece in training.sync.pieces}


def both(ctx: Any, model: nn.Module, data: Any, plan: mk.Plan) -> tuple[Any, Any]:
    return torchs_own(ctx, model, data, plan.bucket_mb), ours(ctx, model, data, plan)


def test_gradients_and_calls_are_those_of_torchs_ddp(
    clusters: Callable[[int], mk.Cluster], train: Train
) -> None:
    torch.manual_seed(7)
    model = wide().double()
    data = normal(6, 512), normal(6, 512)
    plan = mk.Plan.ddp(3, bucket_mb=6)
    run = train(model, [data], plan, loss=F.mse_loss, optimizer=plain_sgd, steps=3)
    for (theirs, calls), mine in clusters(3).run(both, model, data, plan):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
        # After its first iteration (one bucket of everything) torch's sends as many as ours.
        assert calls == [1, 2, 2]
    assert [len(calls) for calls in sent(run, "all_reduce")] == [2, 2, 2]


# ---------------------------------------------------------------- never hangs


class Waits(nn.Module):
    """Communicates on some ranks only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
            return self.linear(x).detach() + self.linear.bias * 0
        return self.linear(x)


def test_ranks_that_part_ways_are_told_of(train: Train) -> None:
    torch.manual_seed(8)
    data = [(normal(4, 3), normal(4, 2))]
    with pytest.raises(mk.RankFailed, match=r"rank 1 of 2 failed.*No gradient came for linear.weight"):
        train(Waits(), data, mk.Plan.ddp(2), loss=F.mse_loss, optimizer=sgd, steps=2)
