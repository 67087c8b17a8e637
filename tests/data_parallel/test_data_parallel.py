"""Data parallelism: DDP in buckets, DP's five exchanges, statistics of a batch over all ranks."""

import copy
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
from mpkit.strategies.comm.fake_group import FakeGroup
from mpkit.strategies.prepare.prepare import prepare
from mpkit.strategies.replicas.batchnorm import over_whole_batch
from mpkit.strategies.runtime.train import Training
from mpkit.trace import Kind
from tests.recipes import adamw, normal, sgd
from tests.serial import Clusters, Train, check_equal

# ---- DDP equals serial training, and sends what torch's own DDP sends.


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


def wide(layers: int = 4) -> nn.Module:
    """Layers of 1 MiB and a bias each."""
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(layers)))


def sent(run: Run, kind: str) -> list[list[int]]:
    """The payloads that rank 0 sent in each step."""
    frame = run.timeline().to_dataframe()
    frame = frame[(frame["rank"] == 0) & (frame["kind"] == kind)]
    return [frame[frame["step"] == step]["bytes"].tolist() for step in range(run.steps)]


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
    how: dict[str, Any] = {"loss": F.mse_loss, "optimizer": sgd, "steps": 1, "ranks": plan.ranks}
    training = Training(ctx, prepare(copy.deepcopy(model), [data], plan, **how))
    training.step(0)
    return {piece.name: piece.parameter.grad.clone() for piece in training.sync.pieces}


def both(ctx: Any, model: nn.Module, data: Any, plan: mk.Plan) -> tuple[Any, Any]:
    return torchs_own(ctx, model, data, plan.bucket_mb), ours(ctx, model, data, plan)


def test_gradients_and_calls_are_those_of_torchs_ddp(clusters: Clusters, train: Train) -> None:
    torch.manual_seed(7)
    model = wide().double()
    data = normal(6, 512), normal(6, 512)
    plan = mk.Plan.ddp(3, bucket_mb=6)
    run = train(model, [data], plan, loss=F.mse_loss, optimizer=sgd, steps=3)
    for (theirs, calls), mine in clusters(3).run(both, model, data, plan):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
        # After its first iteration (one bucket of everything) torch's sends as many as ours.
        assert calls == [1, 2, 2]
    assert [len(calls) for calls in sent(run, "all_reduce")] == [2, 2, 2]


# ---- DP, as torch.nn.DataParallel does it: five exchanges a batch, rank 0 busier and fuller, serial's numbers


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
            Named(3, 2), data, mk.Plan.dp(2), loss=lambda o, t: (o["logits"] - t).mean(), optimizer=adamw,
            steps=1,
        )  # fmt: skip


def test_parts_that_are_not_equal(train: Train) -> None:
    with pytest.raises(ValueError, match=r"2 ranks do not divide a batch of 7. Plan.ddp\(2\)"):
        train(
            nn.Linear(3, 2),
            [(torch.zeros(7, 3), torch.zeros(7, 2))],
            mk.Plan.dp(2),
            loss=F.mse_loss,
            optimizer=adamw,
        )


class Logits(nn.Linear):
    """Returns losses by sample and, as models of transformers do, the logits, which the loss does not use."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = super().forward(x)
        return logits.square().mean(1), logits


def test_nothing_is_sent_back_for_an_output_that_the_loss_leaves_out(train: Train) -> None:
    data = [(normal(8, 4), normal(8))]
    run = check_equal(
        train, Logits(4, 2).double(), data, mk.Plan.dp(2), loss=lambda o, t: o[0].mean(), optimizer=adamw
    )
    ops = run.trace.ranks[0].ops
    returned = ops[(ops["kind"] == Kind.SCATTER) & (ops["step"] == 0)]["bytes"].tolist()
    assert returned == [8 * 4 * 8, 8 * 8]  # the inputs; the gradient of the losses


# ---- BatchNorm over all ranks' samples is torch.nn.BatchNorm on the whole batch.

EXACT = {"rtol": 1e-10, "atol": 1e-12}
NORMS: dict[str, Callable[[], nn.Module]] = {
    "1d": lambda: nn.BatchNorm1d(3),
    "1d of sequences": lambda: nn.BatchNorm1d(3),
    "2d": lambda: nn.BatchNorm2d(3, eps=1e-3, momentum=0.3),
    "3d": lambda: nn.BatchNorm3d(3, momentum=None),
    "not affine": lambda: nn.BatchNorm2d(3, affine=False),
    "not tracking": lambda: nn.BatchNorm2d(3, track_running_stats=False),
    "not tracking, evaluating": lambda: nn.BatchNorm2d(3, track_running_stats=False).eval(),
    "evaluating": lambda: nn.BatchNorm2d(3).eval(),
}
INNER = {"1d": (), "1d of sequences": (4,), "3d": (2, 1, 2)}
SHARES = [[0, 3, 6], [1, 4], [2, 5]]  # 7 samples on 3 ranks


def steps(norm: nn.Module, batches: list[Tensor], weights: list[Tensor]) -> list[Any]:
    """Forward and backward of some batches: outputs, gradients, running statistics."""
    found: list[Any] = []
    for x, w in zip(batches, weights, strict=True):
        x = x.clone().requires_grad_()
        y = norm(x)
        (y * w).sum().backward()
        found.append((y.detach(), x.grad))
    return [found, {name: p.grad for name, p in norm.named_parameters()}, norm.state_dict()]


def on_a_rank(ctx: Any, norm: nn.Module, batches: list[Tensor], weights: list[Tensor]) -> list[Any]:
    names = list(norm.state_dict())
    parameters = list(norm.parameters())
    over_whole_batch(norm, ctx.comm)
    assert list(norm.state_dict()) == names
    assert all(a is b for a, b in zip(parameters, norm.parameters(), strict=True))
    mine = SHARES[ctx.rank]
    return steps(norm, [x[mine] for x in batches], [w[mine] for w in weights])


@pytest.mark.parametrize("kind", NORMS)
def test_forward_backward_and_running_statistics(clusters: Clusters, kind: str) -> None:
    torch.manual_seed(1)
    norm = NORMS[kind]().double()
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    shape = (7, 3, *INNER.get(kind, (2, 5)))
    batches, weights = ([torch.randn(shape, dtype=torch.float64) + 3 for _ in range(2)] for _ in range(2))
    whole, gradients, state = steps(copy.deepcopy(norm), batches, weights)
    ranks = clusters(3).run(on_a_rank, norm, batches, weights)
    for i, (y, dx) in enumerate(whole):
        for rank, mine in enumerate(SHARES):
            torch.testing.assert_close(ranks[rank][0][i], (y[mine], dx[mine]), **EXACT)
    for name, gradient in gradients.items():
        torch.testing.assert_close(sum(rank[1][name] for rank in ranks), gradient, **EXACT)
    for _, _, found in ranks:
        torch.testing.assert_close(found, state, **EXACT)


@pytest.mark.parametrize("make", [mk.Plan.ddp, mk.Plan.dp])
def test_local_statistics_are_rank_0s(clusters: Clusters, make: Any) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)).double()
    x = torch.randn(8, 3, dtype=torch.float64)
    data = [(x, torch.randn(8, 2).double())]
    plan = make(2, batchnorm="local")
    run = clusters(2).train(model, data, plan, loss=F.mse_loss, optimizer=sgd, steps=3).wait()
    norm = copy.deepcopy(model[0])
    for _ in range(3):
        norm(x[::2])  # rank 0's samples
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        torch.testing.assert_close(run.state_dict()[f"0.{name}"], norm.state_dict()[name], **EXACT)


def test_one_value_per_channel_on_all_ranks_together_has_no_variance() -> None:
    norm = nn.BatchNorm1d(3)
    over_whole_batch(norm, FakeGroup(1))
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        norm(torch.randn(1, 3))
    assert torch.isfinite(norm(torch.randn(2, 3))).all()
