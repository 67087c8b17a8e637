"""ZeRO equals serial training, holds what the paper's formulas say, to the byte, and sends what they say."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F

import mpkit as mk
from mpkit.strategies.replicas.flat import Flat
from mpkit.trace import Kind
from tests.recipes import adamw, normal, sgd
from tests.serial import Train, check_equal


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-3)


class Spare(nn.Module):
    """Has a parameter that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


class Scaled(nn.Linear):
    """Has a parameter without a dimension."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


@pytest.mark.parametrize("zero", [2, 3])
def test_a_scalar_with_an_initial_state(train: Train, zero: int) -> None:
    """Adagrad makes its states before the first step, of the shape that the parameter has then."""
    torch.manual_seed(6)
    data = [(normal(5, 3), normal(5, 3))]
    check_equal(
        train, nn.Sequential(Scaled(), Scaled()).double(), data, mk.Plan.zero(zero, 2), loss=F.mse_loss, steps=2,
        optimizer=partial(torch.optim.Adagrad, lr=0.1),
    )  # fmt: skip


@pytest.mark.parametrize("zero", [1, 3])
def test_unused_parameters(train: Train, zero: int) -> None:
    torch.manual_seed(6)
    model = nn.Sequential(nn.Linear(3, 3), Spare(), nn.Linear(3, 2)).double()
    data = [(normal(5, 3), normal(5, 2))]
    plan = mk.Plan.zero(zero, 2, unused="allow", microbatches=2)
    check_equal(
        train, model, data, plan, microbatches=2, loss=F.mse_loss, optimizer=adamw
    )  # whose decay leaves them alone
    with pytest.raises(
        mk.RankFailed, match=r"No gradient came for 1\.spare\.weight, 1\.spare\.bias in this step"
    ):
        train(model, data, mk.Plan.zero(zero, 2), loss=F.mse_loss, optimizer=adamw)


class Sometimes(nn.Module):
    """Has a layer for samples with a positive first feature, and leaves it out where there is none."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.positive = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        chosen = x[:, :1] > 0
        out: Tensor = self.always(x)
        return out + chosen * self.positive(x) if bool(chosen.any()) else out


class Poisons:
    """A loss that, where a rank unpickles it, lets memory of gradients begin as NaN: nobody may count on zeros."""

    def __init__(self) -> None:
        self.there = True

    def __call__(self, out: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(out, y)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if dist.is_initialized():
            original = Flat._resize

            def resize(flat: Flat, tensor: Tensor, nbytes: int) -> None:
                original(flat, tensor, nbytes)
                tensor.fill_(float("nan")) if nbytes else None

            Flat._resize = resize  # type: ignore[method-assign]


def test_parameters_that_one_replica_uses(train: Train) -> None:
    """First both use them, then one, and the other has to add zeros."""
    torch.manual_seed(8)
    model = nn.Sequential(Sometimes(), nn.Linear(3, 2)).double()
    inputs, targets = [normal(8, 3) for _ in range(2)], [normal(8, 2) for _ in range(2)]
    inputs[1][1::2, 0] = -1.0  # of the second replica
    data = list(zip(inputs, targets, strict=True))
    for zero in (1, 2):
        plan = mk.Plan.zero(zero, 2, unused="allow")
        check_equal(train, model, data, plan, loss=Poisons(), optimizer=adam, steps=4)


@pytest.mark.parametrize(("zero", "offload"), [(2, "optimizer"), (3, "params")])
def test_offload_copies_over_the_host_link(train: Train, zero: int, offload: str) -> None:
    torch.manual_seed(11)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    psi, n, data = 3 * 65 * 64, 2, [(torch.randn(4, 64), torch.randn(4, 64))]
    plan = mk.Plan.zero(zero, n, offload=offload)
    run = train(model, data, plan, loss=F.mse_loss, optimizer=adam, steps=3)
    machine = mk.hardware("8x-h100-nvlink")
    timeline = run.timeline(hardware=machine)
    step = timeline.step(2)
    for held in step.peak_memory:
        assert held["optimizer"] == 0
        assert held["params"] == (0 if offload == "params" else 4 * psi // (n if zero == 3 else 1))
    frame = step.to_dataframe()
    copies = frame[frame["kind"].isin(["copy_to_device", "copy_to_host"])]
    assert set(copies["lane"]) == {"host"}
    # Gradients go to the host once. Parameters come back once; those that live there before each use.
    share, uses = 4 * psi // n, 2 if offload == "params" else 1
    for _, mine in copies.groupby("rank"):
        assert mine.groupby("kind")["bytes"].sum().to_dict() == {
            "copy_to_device": uses * share,
            "copy_to_host": share,
        }
    took = (copies["end"] - copies["start"]).sum()
    assert took == pytest.approx(n * (uses + 1) * share / machine.device.host, rel=1e-6)


@pytest.mark.parametrize("zero", [0, 3])
def test_an_overflow_on_one_rank_skips_the_step_on_all(
    train: Train, zero: int, capfd: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(12)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    good = (torch.randn(2, 4), torch.randn(2, 2))
    # The second sample, rank 1's, has gradients that 2**16 times themselves are too large for fp16.
    bad = (good[0], torch.stack([good[1][0], torch.tensor([900.0, 900.0])]))
    plan = mk.Plan(dp=2, zero=zero, precision="fp16")
    how: dict[str, Any] = {"loss": F.mse_loss, "optimizer": adam}
    nothing = train(model, [bad], plan, steps=1, **how)
    for name, value in nothing.state_dict().items():
        assert torch.equal(value, model.state_dict()[name])
    assert nothing.proof.why_not.startswith("step 1 left its update out")
    assert capfd.readouterr().out.count("gradients overflowed under the loss scale 65536") == 1
    skipped = train(model, [bad, good, good], plan, steps=3, **how)
    without = train(model, [good], plan, steps=2, **how)
    for name, value in skipped.state_dict().items():
        torch.testing.assert_close(value, without.state_dict()[name], rtol=1e-2, atol=1e-3)


def test_a_sharded_weight_that_another_layer_uses_is_an_error_that_teaches(train: Train) -> None:
    class Peek(nn.Module):
        def __init__(self, other: nn.Linear) -> None:
            super().__init__()
            self.other = [other]  # hidden from nn.Module

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.other[0].weight

    first = nn.Linear(3, 3)
    model = nn.Sequential(first, nn.Linear(3, 3), nn.Linear(3, 3), Peek(first))
    data = [(torch.randn(4, 3), torch.randn(4, 3))]
    with pytest.raises(mk.RankFailed, match=r"of a parameter of shape \[3, 3\] that is sharded"):
        train(model, data, mk.Plan.zero(3, 2), loss=F.mse_loss, optimizer=sgd)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_the_second_reduce_scatter_before_is_complete_when_one_starts(train: Train, zero: int) -> None:
    """Each has memory of its own until then: of the parts that gloo receives."""
    torch.manual_seed(8)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    plan = mk.Plan.zero(zero, 2, bucket_mb=1e-5)
    run = train(model, [(torch.randn(4, 4), torch.randn(4, 4))], plan, loss=F.mse_loss, optimizer=sgd)
    for part in run.trace.ranks:
        pending, most = set[int](), 0
        for number, op in enumerate(part.ops):
            if op["kind"] == Kind.REDUCE_SCATTER:
                pending.add(number)
                most = max(most, len(pending))
            elif op["kind"] == Kind.WAIT:
                pending.discard(int(op["ref"]))
        assert most == 2
