"""Why the parts of a batch do not add up to it: a kind of loss, or a layer; of others nothing is said."""

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.strategies.loss.counted import MeanLoss
from mpkit.strategies.models.heard_draws import CannotReplay, GivenDraws
from mpkit.strategies.proof.attempt import Attempt
from mpkit.strategies.proof.draws import SharedDraws, StepDraws
from mpkit.strategies.proof.parts import explain_parts
from mpkit.strategies.reference.serial import Serial
from tests.serial import Clusters

X, Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)).double(), torch.zeros(8, 4).double()
CLASSES = torch.tensor([0, 1, 2, 3, 1, 2, 0, 3])
PLANS = [mk.Plan.ddp(2), mk.Plan.gpipe(2, 4), mk.Plan(pp=2, dp=2, microbatches=2)]


class Fn(nn.Module):
    """A layer that is one function."""

    def __init__(self, fn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x)


def net(*middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), *middle, nn.Tanh(), nn.Linear(4, 4)).double()


def explained(
    model: nn.Module, plan: mk.Plan, loss: Any = F.mse_loss, targets: Any = Y, inputs: Any = X
) -> str:
    serial = Serial(model, loss, lambda named: torch.optim.SGD(named.values(), lr=0.1))
    draws = StepDraws(plan, 8, [{} for _ in range(plan.ranks)])
    return explain_parts(plan, Attempt(serial, (inputs, targets), draws, 1.0), 1e-8)


def masked_mean(out: Tensor, y: Any) -> Tensor:
    return ((out - y[0]).square() * y[1]).sum() / y[1].sum()


def by_hand(out: Tensor, y: Tensor) -> Tensor:
    valid = y != -100
    return -(out.log_softmax(-1).gather(1, y.clamp(min=0)[:, None])[:, 0] * valid).sum() / valid.sum()


SOME = torch.arange(8)[:, None] < torch.tensor([8, 6, 3, 1])
LOSSES = {
    "a sum": (lambda out, y: (out - y).square().sum(), Y, "is a sum.*len(y) / 8"),
    "a masked mean": (masked_mean, (Y, SOME), "mean over something else than samples.*(total, count)"),
    "ignored targets": (by_hand, CLASSES.masked_fill(CLASSES == 3, -100), "ignore_index.*mk.mean_loss("),
    "a spread": (
        lambda out, y: F.mse_loss(out, y) + out.std(),
        Y,
        "needs the whole batch.*mk.whole_batch_loss(",
    ),
    "broadcast": (lambda out, y: F.mse_loss(out[:, :1], y[:, 0]), Y + X, "needs the whole batch"),
}


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_named_by_their_kind(name: str, plan: mk.Plan) -> None:
    loss, targets, message = LOSSES[name]
    assert re.search(re.escape(message).replace(r"\.\*", ".*"), explained(net(), plan, loss, targets))


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize(("loss", "targets"), [
    (masked_mean, (Y, torch.ones(8, 4, dtype=torch.bool))), (by_hand, CLASSES), (F.huber_loss, Y),
    (MeanLoss(F.cross_entropy), CLASSES.masked_fill(CLASSES == 3, -100)),
], ids=["mask of ones", "no target is masked", "elementwise", "counted"])  # fmt: skip
def test_of_other_losses_nothing_is_said(loss: Any, targets: Any, plan: mk.Plan) -> None:
    assert explained(net(), plan, loss, targets) == ""


class Average(nn.Module):
    """Remembers the mean of what it has seen."""

    def __init__(self, *, used: bool) -> None:
        super().__init__()
        self.used = used
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean += 0.1 * (x.mean(0) - self.mean)
        return x - self.mean if self.used else x


LAYERS = {
    "the batch's mean": Fn(lambda x: x - x.mean(0)),
    "its length": Fn(lambda x: x * len(x)),
    "a softmax over it": Fn(lambda x: x * x.softmax(0)),
    "a little of its neighbour": Fn(lambda x: x + 1e-4 * x.roll(1, 0)),
    "an average that it keeps": Average(used=True),
}


@pytest.mark.parametrize("plan", [mk.Plan.ddp(2), mk.Plan.gpipe(2, 4), mk.Plan.dp(2)], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_layers_that_look_at_the_batch_are_named(name: str, plan: mk.Plan) -> None:
    assert re.match(r"The layer '1' .*other samples", explained(net(LAYERS[name]), plan))


# ---- Random numbers that replicas or micro-batches share, told from those that are equal by accident.


def masks(
    step: int, *, alike: bool, samples: int, width: int, count: int
) -> list[dict[tuple[int, int], list[Tensor]]]:
    """A dropout mask for each of the micro-batches that rank 0 has in a step."""
    drawn = {}
    for m, n in enumerate(samples // count + (m < samples % count) for m in range(count)):
        made = torch.Generator().manual_seed(100 * step if alike else 100 * step + m)
        drawn[0, m] = [torch.empty(n, width).bernoulli_(0.5, generator=made)]
    return [drawn]


def steps_until_found(*, alike: bool, samples: int, width: int, count: int, steps: int) -> int:
    """The first step in which shared draws are found; `steps` if they never are."""
    before: dict[int, float] = {}
    for step in range(steps):
        heard = masks(step, alike=alike, samples=samples, width=width, count=count)
        draws = StepDraws(mk.Plan.serial(count), samples, heard, before=before)
        draws.begin()
        try:
            draws.give((samples, width), 0.5)
        except SharedDraws:
            return step
        before = draws.chances
    return steps


@pytest.mark.parametrize(("samples", "width", "count", "found"), [
    (24, 6, 2, 0),  # 72 equal numbers
    (9, 12, 4, 0),  # micro-batches of 3, 2, 2 and 2 samples: three times 24
    (8, 3, 2, 2),  # 12 in each step
])  # fmt: skip
def test_equal_draws_add_up_over_parts_and_steps(samples: int, width: int, count: int, found: int) -> None:
    assert steps_until_found(alike=True, samples=samples, width=width, count=count, steps=5) == found


def test_accidents_are_none() -> None:
    assert steps_until_found(alike=False, samples=4, width=1, count=4, steps=300) == 300


def test_one_seed_of_two_replicas_is_found_though_they_draw_few_numbers() -> None:
    heard: list[dict[tuple[int, int], list[Tensor]]] = [{(0, 0): [torch.ones(2)]}, {(0, 0): [torch.ones(2)]}]
    draws = StepDraws(mk.Plan.ddp(2), 4, heard)
    draws.check_places([{(0, 5, 0, 0)}, {(0, 5, 1, 0)}])
    with pytest.raises(SharedDraws, match="the same random numbers for different samples"):
        draws.check_places([{(0, 5, 0, 0)}, {(0, 5, 0, 0)}])


# ---- What the comparison raises: the user's own code, too little memory, and defects of mpkit's.


def proving() -> bool:
    return threading.current_thread().name == "mpkit-proof"


class Refuses(nn.Module):
    def __init__(self, error: type[Exception], *says: object) -> None:
        super().__init__()
        self.error, self.says = error, says

    def forward(self, x: Tensor) -> Tensor:
        if proving():
            raise self.error(*self.says)
        return x


class WrongShape(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.ones(3, 3) if proving() else x


class CannotBeCopied(nn.Module):
    def __reduce_ex__(self, protocol: Any) -> Any:
        if proving():
            raise TypeError("a handle cannot be copied")
        return super().__reduce_ex__(protocol)

    def forward(self, x: Tensor) -> Tensor:
        return x


class Optimizer(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        if proving():
            raise ArithmeticError("no step here")
        return super().step(closure)


def train(clusters: Clusters, layer: nn.Module, optimizer: Any = torch.optim.SGD) -> str:
    model = nn.Sequential(nn.Linear(4, 4), layer, nn.Dropout(0.1), nn.Linear(4, 2))
    data = [(torch.randn(8, 4), torch.randn(8, 2))]
    how: dict[str, Any] = {"loss": F.mse_loss, "optimizer": lambda p: optimizer(p, lr=0.1), "steps": 2}
    return str(clusters(2).train(model, data, mk.Plan.ddp(2), **how).wait().proof)


FAILS = "not verified: step 1 cannot be repeated: the step fails in plain PyTorch: "


@pytest.mark.parametrize(("layer", "optimizer", "says"), [
    (Refuses(KeyError, "key"), torch.optim.SGD, f"{FAILS}KeyError: 'key'"),
    (WrongShape(), torch.optim.SGD, f"{FAILS}RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
    (CannotBeCopied(), torch.optim.SGD, "equal to serial training in steps 1 and 2"),
    (nn.Identity(), Optimizer, "the update fails in plain PyTorch: ArithmeticError"),
    (Refuses(MemoryError), torch.optim.SGD, "not enough memory to repeat step 1 in this process"),
], ids=["raises", "shapes", "no copy", "optimizer", "memory"])  # fmt: skip
def test_what_the_users_code_raises_is_said(
    clusters: Clusters, layer: nn.Module, optimizer: Any, says: str
) -> None:
    assert says in train(clusters, layer, optimizer)


@pytest.mark.parametrize(
    "where", ["mpkit.strategies.proof.prover.compare_weights", "mpkit.strategies.proof.draws.shares"]
)
def test_a_defect_is_loud(clusters: Clusters, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Beside the forward, or in the middle of a dropout in it, for which draws are put together."""
    monkeypatch.setattr(where, lambda *_: [][0] if "weights" in where else [])
    with pytest.raises(
        mk.errors.MpkitError, match=r"comparing step 1 .* failed: IndexError.*defect of mpkit"
    ):
        train(clusters, nn.Identity())


def test_a_mask_drawn_inside_a_kernel_cannot_be_given() -> None:
    """The operators of GPUs exist for tensors without content, which is all that is needed here."""
    aten, (q, k, v) = torch.ops.aten, (torch.empty(1, 2, 16, 8, device="meta") for _ in range(3))
    with GivenDraws(lambda shape, p: torch.ones(shape)) as mode:
        assert aten._scaled_dot_product_efficient_attention(q, k, v, None, False, 0.0)[0].shape == q.shape
        with pytest.raises(CannotReplay, match="efficient_attention draws its dropout mask inside a kernel"):
            aten._scaled_dot_product_efficient_attention(q, k, v, None, False, 0.1)
    with pytest.raises(CannotReplay, match="_cudnn_rnn draws its dropout mask inside a kernel of the GPU"):
        mode.__torch_dispatch__(aten._cudnn_rnn.default, (), (), {"dropout": 0.5, "train": True})


@pytest.mark.filterwarnings("always")
def test_a_loss_that_broadcasts_is_named_and_nothing_else_is_said(
    clusters: Clusters, capfd: pytest.CaptureFixture[str]
) -> None:
    """torch warns of it, here and on each rank, of the shapes of shares."""
    data = [(torch.randn(8, 4), torch.randn(8))]
    how: dict[str, Any] = {"loss": F.mse_loss, "optimizer": lambda p: torch.optim.SGD(p, lr=0.1), "steps": 1}
    with pytest.raises(
        mk.errors.NotSerial, match=r"shape \[8, 1\] and targets of shape \[8\].*y.view_as\(out\)"
    ):
        clusters(2).train(nn.Linear(4, 1), data, mk.Plan.ddp(2), **how).wait()
    assert "target size" not in "".join(capfd.readouterr())
