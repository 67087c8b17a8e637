"""A run proves itself: equal to serial training and said so, or stopped with the step, the values and the cause."""

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.strategies.prepare.prepare import prepare
from mpkit.strategies.proof.rounding import RoundingMode
from mpkit.trace import Trace
from mpkit.trace.proof import Proof
from tests.proof.planted import FAULTS, Planted
from tests.serial import Clusters

pytestmark = pytest.mark.filterwarnings("ignore::mpkit.errors.UnwisePlan")


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)


class Net(nn.Module):
    """Dropout, a norm, a buffer that each forward changes, and an output layer with the weight of the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.last.weight = self.first.weight
        self.norm, self.drop = nn.LayerNorm(6), nn.Dropout(0.3)
        self.inside = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(torch.tanh(self.first(x)))
        made: Tensor = self.last(self.inside(self.norm(x)))
        return made


def batches(count: int = 2, size: int = 24) -> list[tuple[Tensor, Tensor]]:
    made = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 6, generator=made), torch.randint(0, 6, (size,), generator=made))
        for _ in range(count)
    ]


def train(clusters: Clusters, model: nn.Module, plan: mk.Plan, **how: Any) -> Any:
    given = {"loss": F.cross_entropy, "optimizer": adamw, "steps": 4, "data": batches()} | how
    return clusters(plan.ranks).train(model, plan=plan, **given)


PLANS = {
    "serial": mk.Plan.serial(3), "dp": mk.Plan.dp(2), "ddp": mk.Plan.ddp(2, microbatches=2),
    "zero1": mk.Plan.zero(1, 2), "zero3": mk.Plan.zero(3, 2, microbatches=2), "gpipe": mk.Plan.gpipe(2, 4),
    "zb_h1": mk.Plan.pipeline("zb_h1", 2, 4), "offload": mk.Plan.zero(2, 2, offload="optimizer"),
    "bf16": mk.Plan.ddp(2, precision="bf16"), "fp16": mk.Plan.zero(1, 2, precision="fp16"),
}  # fmt: skip


def test_which_steps(clusters: Clusters, tmp_path: Any) -> None:
    run = train(clusters, Net(), mk.Plan.ddp(2), verify=(2, 4)).wait()
    assert run.proof.steps == (2, 4), "the optimizer's states travel where the step before was not verified"
    loaded = Trace.load(run.trace.save(tmp_path / "run.trace"))
    assert any(
        note.startswith("Equal to serial training in steps 2 and 4") for note in mk.Timeline.of(loaded).notes
    )
    beyond = train(clusters, Net(), mk.Plan.ddp(2), verify=(1, 11)).wait()
    assert beyond.proof.steps == (1,)
    assert beyond.proof.badge.endswith("there is no step 11 to compare: this run does steps 1 to 4")
    off = train(clusters, Net(), mk.Plan.ddp(2), verify=False).wait()
    assert str(off.proof) == "not verified: verify=False"
    for wrong in (0, "some", (1, 0), True):
        with pytest.raises(ValueError, match="steps are counted from 1"):
            train(clusters, Net(), mk.Plan.ddp(2), verify=wrong)


class TwoVectors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scales, self.shifts = nn.Parameter(torch.rand(5)), nn.Parameter(torch.rand(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scales.sum() + x.square() * self.shifts.sum()


def test_a_number_among_the_states_is_not_an_element(clusters: Clusters) -> None:
    """Rank 1 updates one element of `scales`, and NAdam keeps one number for it, mu_product."""
    plan = mk.Plan.zero(1, 2)
    run = train(clusters, TwoVectors(), plan, verify=(1, 4), optimizer=torch.optim.NAdam).wait()
    assert run.proof.steps == (1, 4), run.proof


def test_a_loss_that_ceases_to_be_finite_is_said_with_the_step_to_compare(clusters: Clusters) -> None:
    data = batches(4)
    data[2] = (data[2][0] * torch.nan, data[2][1])
    for verify, says in (
        (1, "the loss is nan from step 3 on: train(..., verify=(3,)) compares that step"),
        ((1, 3), ""),
    ):
        run = train(clusters, Net(), mk.Plan.ddp(2), data=data, verify=verify).wait()
        assert run.proof.why_not == says and 1 in run.proof.steps


GATE = {
    "twice the gradient": "ddp", "an element": "gpipe", "mode": "zero3", "reordered": "gpipe", "draws": "ddp",
    "stale": "zero1", "states": "serial", "decay": "zero3", "loss": "ddp", "initial": "zero1",
    "an overflow": "fp16",
}  # fmt: skip
"""A plan for each of these faults in the gate; all of them with all plans in the soak."""


@pytest.mark.parametrize(("fault", "plan"), [
    pytest.param(fault, plan, marks=() if GATE.get(fault) == plan else pytest.mark.soak)
    for fault in FAULTS
    for plan in PLANS
])  # fmt: skip
def test_a_planted_fault_is_found(clusters: Clusters, fault: str, plan: str) -> None:
    torch.manual_seed(0)
    how: dict[str, Any] = {"max_grad_norm": 0.05, "lr_schedule": lambda step: 1 / (1 + step), "verify": "all"}
    run = train(clusters, Net(), PLANS[plan], loss=Planted(F.cross_entropy, fault), **how)
    if unaffected(fault, plan):
        run.wait()
    else:
        with pytest.raises(mk.errors.NotSerial, match=r"step [12] is not that of serial training"):
            run.wait()
        assert run.proof.status == "not equal" and run.status == "failed"


def unaffected(fault: str, plan: str) -> bool:
    """Whether a plan has nothing that such a fault could change."""
    asked = PLANS[plan]
    if fault == "buffers":
        return True  # Net has none
    if fault in ("an element", "the last parameter's gradient") and asked.precision != "full":
        return True  # a thousandth, or a hundredth, is less than 16 bits round off
    if fault == "loss" and asked.precision == "bf16":
        return True
    own = ("others' samples", "not reduced", "weights of parts", "a dropped micro-batch", "reordered")
    if plan == "dp" and fault in own:
        return True  # rank 0 scatters what it takes itself
    if fault in ("others' samples", "not reduced"):
        return asked.dp == 1 or (fault == "not reduced" and asked.zero > 0)
    if fault == "stale":
        return plan in ("dp", "serial") or asked.zero == 3
    if fault == "not tied":
        return asked.pp == 1
    if fault == "draws":
        return asked.dp == 1 and asked.microbatches == 1
    return False


def test_a_step_that_is_not_serial_is_never_saved(clusters: Clusters, tmp_path: Any) -> None:
    loss = Planted(F.cross_entropy, "twice the gradient")
    run = train(clusters, Net(), mk.Plan.ddp(2), loss=loss, checkpoint_every=1, checkpoint_dir=tmp_path)
    with pytest.raises(mk.errors.NotSerial, match="All gradients are 2 times the serial ones"):
        run.wait()
    assert not list(tmp_path.glob("step-*"))


def regression(size: int = 8) -> list[tuple[Tensor, Tensor]]:
    made = torch.Generator().manual_seed(2)
    return [(torch.randn(size, 4, generator=made), torch.randn(size, 2, generator=made))]


def test_what_each_process_has_of_its_own(clusters: Clusters) -> None:
    here = os.getpid()

    class Shifted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x + (os.getpid() == here))

    model = nn.Sequential(nn.Linear(4, 4), Shifted(), nn.Linear(4, 2))
    with pytest.raises(mk.errors.NotSerial, match="they read something that each process has its own of"):
        train(clusters, model, mk.Plan.serial(), loss=F.mse_loss, data=regression()).wait()


def test_telling_steps() -> None:
    """The first batch of another size, and the first step after an evaluation, among 40."""

    class Own(Net):
        def train(self, mode: bool = True) -> Any:  # returns nothing, as many do
            super().train(mode)

    whole = batches(1, 8)
    data = [*whole * 6, *batches(1, 6)]
    how: dict[str, Any] = {"loss": F.cross_entropy, "optimizer": adamw, "steps": 40, "ranks": 1}
    job = prepare(
        Own(), data, mk.Plan.serial(), evaluate=(whole, F.cross_entropy), every=4, verify="first", **how
    )
    assert {0, 1, 4, 6} <= set(job.how.verified) and len(job.how.verified) <= 5


def test_draws_that_nobody_hears_are_said(clusters: Clusters) -> None:
    class Skips(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if random.random() > 0.5 else 2 * x

    model = nn.Sequential(nn.Linear(6, 6), Skips())
    state = random.getstate()
    run = train(clusters, model, mk.Plan.ddp(2)).wait()
    assert str(run.proof).startswith(
        "not verified: step 1 cannot be repeated: the forward draws random numbers"
    )
    assert random.getstate() == state


# ---- Steps that depend on earlier ones: branches, modes, and what model and loss remember in Python.

DDP = mk.Plan.ddp(2, unused="allow")


def proof_of(
    clusters: Clusters, model: nn.Module, plan: mk.Plan, loss: Any = F.mse_loss, **how: Any
) -> Proof:
    made = torch.Generator().manual_seed(1)
    data = [(torch.randn(8, 4, generator=made), torch.randn(8, 2, generator=made)) for _ in range(8)]
    given: dict[str, Any] = {
        "optimizer": lambda p: torch.optim.AdamW(p, lr=0.1), "steps": 8, "verify": (1, 2, 6),
    }  # fmt: skip
    return clusters(plan.ranks).train(model, data, plan, loss=loss, **given | how).wait().proof


class Branch(nn.Module):
    """From the fifth forward on, `late` is used, or is not used any more; `drop` leaves training mode."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.calls = kind, 0
        self.first, self.late, self.last = nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 2)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.first(x)
        if self.kind == ("begins" if self.calls > 4 else "ends"):
            y = y + self.late(x)
        if self.kind == "mode" and self.calls > 4:
            self.drop.eval()
        made: Tensor = self.last(self.drop(torch.tanh(y)))
        return made


@pytest.mark.parametrize(("kind", "says"), [
    ("begins", "late.weight gets a gradient for the first time in step 5"),
    ("ends", "late.weight gets no gradient for the first time in step 5"),
    ("mode", "drop is in evaluation mode for the first time in step 5"),
])  # fmt: skip
def test_what_happens_first_in_a_step_that_was_not_compared(clusters: Clusters, kind: str, says: str) -> None:
    proof = proof_of(clusters, Branch(kind), DDP, verify=(1,))
    assert says in proof.why_not or "the forward computes add for the first time in step 5" in proof.why_not
    assert proof.why_not.endswith("train(..., verify=(5,)) compares that step")
    if kind == "begins":
        proof = proof_of(clusters, Branch(kind), mk.Plan.zero(3, 2, unused="allow"), verify=(1, 5))
        assert (proof.steps, proof.why_not) == ((1, 5), ""), "the branch depends on a counter in Python"
    assert proof_of(clusters, Branch(kind), DDP, verify=(1, 7)).why_not == "", "a later step has the same"


class Annealed:
    """A loss whose factor grows with each call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        return F.mse_loss(outputs, targets) * min(1.0, self.calls / 5)


def annealed() -> Callable[[Tensor, Tensor], Tensor]:
    calls = 0

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return F.mse_loss(outputs, targets) * min(1.0, calls / 5)

    return loss


def test_a_loss_that_counts_its_calls(clusters: Clusters) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    for plan, loss in ((DDP, Annealed), (mk.Plan.gpipe(2, 1), annealed)):
        assert proof_of(clusters, model, plan, loss()).steps == (1, 2, 6)
        remembers = r"remembers something from one forward to the next.*a step has 2 of them"
        with pytest.raises(mk.errors.NotSerial, match=remembers):
            proof_of(clusters, model, mk.Plan.serial(2), loss())


@pytest.mark.parametrize("name", ["BatchNorm1d", "InstanceNorm1d"])
def test_roundings_leave_the_updates_of_running_statistics(name: str) -> None:
    x = torch.randn(8, 4, 16)
    rounded, exact = (getattr(nn, name)(4, track_running_stats=True) for _ in range(2))
    exact(x)
    with RoundingMode(0):
        rounded(x)
    for got, wanted in zip(rounded.buffers(), exact.buffers(), strict=True):
        torch.testing.assert_close(got, wanted)
