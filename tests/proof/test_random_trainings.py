"""Never silently wrong: random trainings of what users bring (`tests/ingredients.py`), under random plans.

equal or refused    it equals plain PyTorch on the whole batch, or it is refused or stopped
no false alarm      one of ordinary ingredients proves itself equal in each step, in each precision
late faults         of a fault that begins in a random step, the proof never says "equal"
"""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import mpkit as mk
from tests.ingredients import (
    BATCH,
    CLASSES,
    DATA,
    HOOKS,
    LAYERS,
    LOSSES,
    OPTIMIZERS,
    ORDINARY,
    PLANS,
    RANDOM,
    WIDTH,
)
from tests.proof.planted import FAULTS
from tests.serial import Clusters

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(1200)]

EACH = 6
TABLES: dict[str, dict[str, Any]] = {"hook": HOOKS, "loss": LOSSES, "optimizer": OPTIMIZERS, "data": DATA}


class Case:
    """A training, drawn from a seed: its ingredients by kind, its plan, and what it makes of them."""

    def __init__(self, seed: int, *, ordinary: bool, steps: int = 3) -> None:
        self.draw, self.seed, self.steps = random.Random(seed), seed, steps
        self.plan = self.draw.choice(list(PLANS))
        while True:
            self.layers = [self._one(LAYERS, ordinary) for _ in range(self.draw.randint(1, 2))]
            self.of = {kind: self._one(table, ordinary) for kind, table in TABLES.items()}
            if not ordinary or self.is_ordinary:
                return

    def _one(self, table: dict[str, Any], ordinary: bool) -> str:
        """Mostly an ordinary one, so that each odd one is met by itself."""
        usual = [name for name in table if name in ORDINARY]
        return self.draw.choice(usual if ordinary or self.draw.random() < 0.5 else list(table))

    @property
    def is_ordinary(self) -> bool:
        """Whether every plan trains these ingredients."""
        drawn = {*self.layers, *self.of.values()}
        # An optimizer by the number of parameters differs with and without the frozen ones: it is asked which is meant.
        return drawn <= ORDINARY and not {"frozen", "by number"} <= drawn

    def model(self, layers: tuple[str, ...] = ()) -> nn.Sequential:
        """Linear layers of float64 with the drawn ones between them, hooked."""
        torch.manual_seed(self.seed)
        between = [(LAYERS | RANDOM)[name]() for name in (*self.layers, *layers)]
        ends = nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *between, *ends).double()
        HOOKS[self.of["hook"]](model)
        return model

    def pairs(self, masked: str = "none") -> list[tuple[Tensor, Tensor]]:
        """A batch per step; in these steps targets are masked for more than one part of the batch."""
        made, pairs = torch.Generator().manual_seed(self.seed), []
        for step in range(self.steps):
            inputs = torch.randn(BATCH, WIDTH, dtype=torch.float64, generator=made)
            targets = torch.randint(0, CLASSES, (BATCH,), generator=made)
            if masked == "all" or (masked == "last" and step == self.steps - 1):
                targets[BATCH // 2 - 1 :] = -100
            pairs.append((inputs, targets))
        return pairs

    def how(self) -> dict[str, Any]:
        optimizer = OPTIMIZERS[self.of["optimizer"]]
        named = self.of["optimizer"] == "by name"
        return {
            "loss": LOSSES[self.of["loss"]](), "steps": self.steps,
            "optimizer": mk.optimizer.by_name(optimizer) if named else optimizer,
        }  # fmt: skip

    def plainly(self, pairs: list[tuple[Tensor, Tensor]]) -> tuple[list[float], dict[str, Tensor]]:
        """Losses by step and the weights afterwards, by plain PyTorch on whole batches."""
        model, loss, losses = self.model(), LOSSES[self.of["loss"]](), []
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        by_name = self.of["optimizer"] == "by name"
        optimizer = OPTIMIZERS[self.of["optimizer"]](named if by_name else [p for _, p in named])
        for inputs, targets in pairs:
            value = loss(model(inputs), targets)
            value = value[0] / value[1] if isinstance(value, tuple) else value
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            losses.append(value.item())
        return losses, model.state_dict()


@pytest.mark.soak
@pytest.mark.parametrize("first", range(0, 300, EACH))
def test_a_training_equals_plain_pytorch_or_is_refused(clusters: Clusters, first: int) -> None:
    for seed in range(first, first + EACH):
        case = Case(seed, ordinary=False)
        plan, pairs = PLANS[case.plan](), case.pairs(case.draw.choice(["none", "none", "all", "last"]))
        data = DATA[case.of["data"]](pairs)
        try:
            run = clusters(plan.ranks).train(case.model(), data, plan, **case.how()).wait()
        except (ValueError, mk.errors.NotSerial, mk.RankFailed) as said:
            assert not case.is_ordinary, f"{seed}: refused or stopped, though all of it is ordinary: {said}"
            continue
        try:
            losses, weights = case.plainly(pairs)
        except ZeroDivisionError:  # torch's Adafactor, of a parameter without elements
            assert "fails in plain PyTorch" in str(run.proof), seed
            continue
        assert run.losses == pytest.approx(losses, rel=1e-8, abs=1e-10, nan_ok=True), seed
        for name, value in run.state_dict().items():
            torch.testing.assert_close(
                value, weights[name], rtol=1e-8, atol=1e-10, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
            )


PRECISIONS = {"fp64": "full", "fp32": "full", "bf16": "bf16", "fp16": "fp16"}
ONLY_IN_64 = {"class weights", "mean_loss, weights"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "precision"),
    [
        pytest.param(n, precision, marks=() if (n, precision) == (0, "bf16") else pytest.mark.soak)
        for n in range(0, 300, EACH) for precision in PRECISIONS
    ],
)  # fmt: skip
def test_no_false_alarm(clusters: Clusters, first: int, precision: str) -> None:
    """With dropout, clipping, other rates, and a last batch of few samples."""
    for seed in range(first, first + EACH):
        case = Case(seed, ordinary=True)
        if case.of["loss"] == "not a number" or (case.of["loss"] in ONLY_IN_64 and precision != "fp64"):
            case.of["loss"] = "cross entropy"
        plan = replace(PLANS[case.plan](), precision=PRECISIONS[precision])
        dtype = torch.float64 if precision == "fp64" else torch.float32
        pairs = [(x.to(dtype), y) for x, y in case.pairs()]
        last = case.draw.randint(plan.microbatches, 6)
        if plan.data_parallel == "dp":  # which takes batches that its ranks divide
            last = max(plan.dp, last - last % plan.dp)
        pairs[-1] = (pairs[-1][0][:last], pairs[-1][1][:last])
        run = clusters(plan.ranks).train(
            case.model((case.draw.choice(list(RANDOM)),)).to(dtype), pairs, plan, verify="all",
            max_grad_norm=case.draw.choice((None, 0.1, 10.0)),
            lr_schedule=case.draw.choice((None, lambda step: 1 / (1 + step))), **case.how(),
        ).wait()  # fmt: skip
        assert run.proof.steps == (1, 2, 3), (seed, str(run.proof))


LATE = sorted(set(FAULTS) - {"mode", "others' samples", "decay", "initial", "no update", "an overflow"})
"""Without those that are planted where a run begins, or act in one step only; and one that fp16 expects."""


def differ(run: Any, other: Any) -> bool:
    """Whether losses or weights of two runs differ by more than roundings."""
    weights = other.state_dict()
    return run.losses != pytest.approx(other.losses, rel=1e-5, abs=1e-5) or any(
        not torch.allclose(
            value, weights[name], rtol=1e-4, atol=1e-5 * (1 + float(weights[name].abs().max()))
        )
        for name, value in run.state_dict().items()
    )


@pytest.mark.soak
@pytest.mark.parametrize("first", range(0, 300, EACH))
def test_no_step_with_a_fault_is_equal(clusters: Clusters, first: int) -> None:
    """It is stopped; or said not to be verified; or no step with the fault was compared; or the fault is harmless."""
    for seed in range(first, first + EACH):
        case = Case(seed, ordinary=True, steps=5)
        case.of["loss"] = "cross entropy" if case.of["loss"] == "not a number" else case.of["loss"]
        plan, fault, after = PLANS[case.plan](), case.draw.choice(LATE), case.draw.randrange(4)

        def plant(_: Any, step: int, fault: str = fault, after: int = after) -> None:
            if step == after:
                FAULTS[fault](dist.get_rank() if dist.is_initialized() else 0)

        def train(case: Case = case, plan: mk.Plan = plan, **how: Any) -> Any:
            return clusters(plan.ranks).train(case.model(), case.pairs(), plan, **case.how(), **how).wait()

        try:
            run = train(on_step=plant, verify=case.draw.choice(["all", "first"]))
        except (mk.errors.NotSerial, mk.RankFailed):
            continue
        steps = run.proof.steps
        # Lost states are seen where two steps in a row are compared: the later one begins with the repetition's.
        compared = [n for n in steps if n > after + 2 and n - 1 in steps] if fault == "states" else steps
        if run.proof.status == "not verified" or max(compared, default=0) <= after + 1:
            continue
        assert not differ(run, train(on_step=lambda *_: None)), f"{seed}: {fault!r} from step {after + 2} on"
