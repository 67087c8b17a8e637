"""Bad input is refused before any rank starts, with what was given, why it cannot be, and what would work."""

import copy
import random
import re
from dataclasses import FrozenInstanceError
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import mpkit as mk
from mpkit.data import text_batches
from mpkit.models import GPT, next_token_loss
from mpkit.plan.schedule import Schedule
from mpkit.strategies.prepare import checks
from mpkit.strategies.prepare.checks import CHECKS
from mpkit.strategies.prepare.prepare import TrainJob, prepare
from tests.recipes import adamw

MODEL = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
DATA = [(torch.zeros(8, 4), torch.zeros(8, 2))]


def prepared(**changes: Any) -> TrainJob:
    """A training that works, with changes."""
    how: dict[str, Any] = {
        "model": MODEL, "data": DATA, "plan": mk.Plan.gpipe(2, 4), "loss": F.mse_loss, "optimizer": adamw,
        "steps": 3, "seed": 0, "ranks": 2,
    }  # fmt: skip
    how |= changes
    return prepare(how.pop("model"), how.pop("data"), how.pop("plan"), **how)


class Fork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.a(x)


def twice_the_same_norm() -> nn.Module:
    norm = nn.BatchNorm1d(2)
    return nn.Sequential(nn.Linear(4, 2), norm, nn.Linear(2, 2), norm)


def mean_of_outputs_only(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.detach().mean()


COPY = copy.deepcopy(MODEL)


def of_the_callers_copy(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(COPY.parameters(), lr=0.1)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    # the plan and the ranks
    "another number of ranks": ({"ranks": 4},
        r"pp=2, 2 ranks, and the cluster has 4: mk.Cluster\(ranks=2\) fits it"),
    "a plan of one's own on several ranks": ({"plan": mk.Plan.from_schedule(["0F0 0B0"]), "ranks": 2},
        r"mk.Cluster\(ranks=1\) fits it$"),
    "a name for a plan": ({"plan": "gpipe"}, r"it is an mk.Plan, such as mk.Plan\(pp=2, schedule='gpipe'\)"),
    "a split backward with DP": (
        {"plan": mk.Plan(dp=2, data_parallel="dp", schedule=Schedule(["0F0 0I0 0W0"])), "ranks": 2},
        "splits its backward .0I0., and DP lends parameters for a whole one.* 0B0",
    ),
    "more micro-batches than samples": ({"plan": mk.Plan.gpipe(2, 12)},
        r"12 micro-batches of data\[0\], a batch of 8.* microbatches=8 works, or a batch of 12 or more"),
    "more stages than layers": ({"plan": mk.Plan.gpipe(6, 4), "ranks": 6},
        r"6 stages, but the model has 5 layers \(0, 1, 2, 3, 4\).* At most pp=5 works"),
    # numbers
    "no steps": ({"steps": 0}, "steps=0: steps is a whole number, 1 or more, such as steps=3"),
    # the model
    "fewer blocks than stages": ({"model": Fork(), "data": [(torch.zeros(8, 4), torch.zeros(8, 4))]},
        r"2 stages, but the model has 1 layer \(a\)"),
    "lazy": ({"model": nn.Sequential(nn.LazyLinear(2))}, "0.weight has no shape yet .* call the model once"),
    "on meta": ({"model": nn.Sequential(nn.Linear(4, 2, device="meta"))}, "holds no numbers"),
    "a BatchNorm in two stages": ({"model": twice_the_same_norm(), "plan": mk.Plan.gpipe(2, 1, cut=[2])},
        "'1.running_mean' and '3.running_mean' are one buffer, and would be in stages 0 and 1"),
    "frozen": ({"model": copy.deepcopy(MODEL).requires_grad_(False)}, "does not depend on any parameter"),
    # the data
    "of a width that the model refuses": (
        {"data": [(torch.zeros(8, 5), torch.zeros(8, 2))]},
        r"refuses data of this shape: layer 0 \(0, Linear\) was given \[2, 5\] float32 and said: RuntimeError: "
        r"(addmm: )?mat1 and mat2 shapes cannot be multiplied \(2x5 and 4x8\)",
    ),
    "of a width that a later layer refuses": (
        {"model": nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(9, 2))},
        r"what its own layers make.*layer 2 \(2, Linear\) was given \[2, 8\] float32",
    ),
    "targets of another type": (
        {"data": [(torch.zeros(8, 4), torch.zeros(8, dtype=torch.int32))], "loss": F.cross_entropy},
        "The loss refuses outputs .* and targets .2. int32: .*Long",
    ),
    "targets of another shape": ({"data": [(torch.zeros(8, 4), torch.zeros(8, 3))]},
        r"The loss refuses outputs \[2, 2\] float32 and targets \[2, 3\] float32: RuntimeError: .*must match"),
    "one tensor": ({"data": torch.zeros(8, 4)}, r"data is Tensor; .*data=\[\(inputs, targets\)\]"),
    "one pair": ({"data": DATA[0]}, r"data is a pair of tensors, one batch.*data=\[data\]"),
    "nothing": ({"data": []}, "data is empty"),
    "arrays": ({"data": [(np.zeros((8, 4)), torch.zeros(8, 2))]},
        r"the inputs of data\[0\] are ndarray.*torch.as_tensor"),
    "unequal": ({"data": [(torch.zeros(8, 4), torch.zeros(7, 2))]},
        r"first dimensions differ: inputs \[8, 4\], targets \[7, 2\]"),
    # the loss
    "a loss that is not a scalar": ({"loss": lambda y, t: (y - t) ** 2},
        r"a tensor of shape \[2, 2\] .* not a scalar.*\.mean\(\) makes one"),
    "a loss that is a number": ({"loss": lambda y, t: F.mse_loss(y, t).item()}, "The loss made float"),
    "a loss that is cut off": ({"loss": mean_of_outputs_only}, r"cut off by .detach\(\)"),
    "a sum": ({"loss": nn.MSELoss(reduction="sum")}, r"reduction='sum'\): the loss is the mean"),
    # the optimizer
    "an optimizer": ({"optimizer": torch.optim.SGD(MODEL.parameters(), lr=0.3)},
        r"optimizer=lambda params: torch.optim.SGD\(params, lr=0.3\)"),
    "an optimizer that fails": ({"optimizer": lambda params: torch.optim.SGD(params, lr=-1)},
        r"failed for the model's 6 parameters: ValueError: Invalid learning rate"),
    "one that needs a closure": ({"optimizer": torch.optim.LBFGS}, "LBFGS computes the loss anew"),
    "one of the caller's parameters": ({"optimizer": of_the_callers_copy}, "of other parameters than those"),
}  # fmt: skip


@pytest.mark.parametrize("changes, words", REFUSED.values(), ids=REFUSED.keys())
def test_refused(changes: dict[str, Any], words: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError) as caught:
        prepared(**changes)
    message = str(caught.value)
    assert re.search(words, message), message
    assert "Traceback" not in message and "FakeTensor" not in message
    assert capfd.readouterr() == ("", ""), "nothing is logged on the way"
    assert caught.value.__cause__ is None, "a reader sees the reason, not what it was found by"


def test_nothing_is_computed_and_nothing_printed(capsys: pytest.CaptureFixture[str]) -> None:
    class Loud(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            print("called with", x)
            return x

    # 64 GB of activations, if they were
    model = nn.Sequential(nn.Linear(4, 4), Loud(), nn.Linear(4, 2**16))
    data = [(torch.zeros(1, 1).expand(2**17, 4), torch.zeros(1, 1).expand(2**17, 2**16))]
    job = prepared(model=model, data=data, steps=1)
    assert capsys.readouterr().out == ""
    assert sum(layer.flops.forward for layer in next(iter(job.where.numbers.values()))) > 1e10


def test_data_of_many_kinds() -> None:
    dataset = TensorDataset(torch.randn(20, 4), torch.randn(20, 2))
    before = torch.get_rng_state()
    assert len(prepared(data=DataLoader(dataset, batch_size=8, shuffle=True)).what.batches) == 3  # 8, 8, 4
    assert torch.equal(before, torch.get_rng_state()), "shuffling too leaves the random state alone"
    endless = iter(lambda: DATA[0], None)
    assert len(prepared(data=endless, steps=7).what.batches) == 7
    assert len(prepared(data=DATA, steps=7).what.batches) == 1
    assert len(prepared(data=[[DATA[0][0], DATA[0][1]]] * 9, steps=2).what.batches) == 2
    job = prepared(data=[((torch.zeros(8, 4),), torch.zeros(8, 2))])
    assert isinstance(job.what.batches[0][0], tuple)


def test_a_layer_that_looks_at_values_is_run_for_real_on_a_copy() -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x if x.sum().item() >= 0 else -x

    model = nn.Sequential(nn.Linear(4, 4), Gate(), nn.Linear(4, 2))
    job = prepared(model=model)
    assert model[1].calls == 0
    (numbers,) = job.where.numbers.values()
    assert [layer.output.specs[0].shape for layer in numbers[:-1]] == [(2, 4), (2, 4), (2, 2)]
    assert [layer.flops.forward for layer in numbers] == [
        2 * 2 * 4 * 4,
        0,
        2 * 2 * 4 * 2,
        0,
    ]  # counted on the way
    assert numbers[1].flops.forward_bytes > 0


def test_a_model_that_cannot_be_sent() -> None:
    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.endless = (x for x in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return x

    with pytest.raises(ValueError, match="cannot be copied, and so not sent to the ranks"):
        prepared(model=nn.Sequential(nn.Linear(4, 2), Holds()))


def test_stages_balance_flops_and_may_be_told() -> None:
    model = GPT(layers=6, width=32, length=16)
    data = text_batches(8, 16, 1)
    how: dict[str, Any] = {"model": model, "data": data, "loss": next_token_loss, "ranks": 3}
    job = prepared(plan=mk.Plan.gpipe(3, 4), **how)
    assert job.where.stages == (range(0, 3), range(3, 5), range(5, 8))  # the head costs 2/3 of a block
    told = prepared(plan=mk.Plan.gpipe(3, 4, cut=["block1", 4]), **how)
    assert told.where.stages == (range(0, 2), range(2, 4), range(4, 8))
    assert job.meta["stages"][0] == ["embedding", "block0", "block1"]
    assert job.meta["batch_size"] == 8 and job.meta["parameters"] == sum(
        p.numel() for p in model.parameters()
    )
    assert job.what.names == list(model.state_dict())


def test_a_job_is_never_changed() -> None:
    job = prepared(plan=mk.Plan(tp=2), ranks=2)
    here = job.for_place(1)
    assert (job.where.place, here.where.place) == (0, 1)
    for part in (job, job.what, job.how, job.where):
        with pytest.raises(FrozenInstanceError):
            part.__setattr__(next(iter(part.__dataclass_fields__)), None)


def test_a_model_is_tried_with_one_core_left_and_threads_are_restored() -> None:
    """The fork server imports torch meanwhile; after a refusal too, torch has the threads that it had."""
    seen: list[int] = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        seen.append(torch.get_num_threads())
        return F.mse_loss(outputs, targets)

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        prepared(loss=loss)
        assert set(seen) == {2} and torch.get_num_threads() == 3
        with pytest.raises(ValueError):
            prepared(loss=lambda outputs, targets: outputs)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_preparing_leaves_everything_as_it_was() -> None:
    calls = [0]

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, out: Tensor, y: Tensor) -> Tensor:
            calls[0] += 1
            return F.mse_loss(out, y) * self.weight.detach().sum()

    model, loss = (
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 2)),
        Counting(),
    )
    before = copy.deepcopy(model.state_dict())
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    prepared(model=model, plan=mk.Plan.ddp(2), loss=loss)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in (*model.parameters(), *loss.parameters()))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]
    assert not any(module._forward_hooks for module in model.modules())


# ---- docs/checks.md: each example is rejected by its own check, or stopped in step 1, with the page's words

PAGE = (Path(__file__).parents[1] / "docs" / "checks.md").read_text(encoding="utf-8")
BEFORE, STOPPED = PAGE.split("# What the proof stops in step 1")
SET_UP = BEFORE.split("```python\n")[1].split("```")[0]
SECTION = re.compile(
    r"^## (?:\d+\. )?(.+?)$.*?```python\n(.*?)```\n\n```text\n(.*?)\n```", re.MULTILINE | re.DOTALL
)
EXAMPLES = SECTION.findall(BEFORE[BEFORE.index("## 1.") :])


def run_example(code: str, train: Any) -> None:
    names: dict[str, Any] = {}
    exec(SET_UP, names)

    def call(model: nn.Module, plan: mk.Plan, data: Any = (names["x"], names["y"]), **options: Any) -> None:
        options = {"loss": nn.functional.mse_loss, "optimizer": torch.optim.SGD, "steps": 1} | options
        train(model, [data], plan, **options)

    names["train"] = call
    exec(code, names)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from the modules that torch.compile imports
def test_each_example_is_rejected_by_its_own_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert [name for name, *_ in EXAMPLES][: len(CHECKS)] == [
        f"{c.name[0].upper()}{c.name[1:]}" for c in CHECKS
    ]
    for number, (name, code, words) in enumerate(EXAMPLES):
        own = CHECKS[number : number + 1] or CHECKS  # the optimizer's are no row of the table
        monkeypatch.setattr(checks, "CHECKS", own)
        with pytest.raises(ValueError) as caught:
            run_example(code, lambda *given, **how: prepare(*given, ranks=given[2].ranks, **how))
        assert fill(str(caught.value), 118, break_long_words=False, break_on_hyphens=False) == words, name


@pytest.mark.parametrize(("name", "code", "words"), SECTION.findall(STOPPED))
def test_each_example_is_stopped_in_its_first_step(name: str, code: str, words: str, train: Any) -> None:
    with pytest.raises(mk.errors.MpkitError) as caught:
        run_example(code, train)
    assert " ".join(words.split()) in " ".join(str(caught.value).split()), name


def test_a_row_says_what_it_rejects_and_why() -> None:
    assert len({check.name for check in CHECKS}) == len({check.find for check in CHECKS}) == len(CHECKS)
    for check in CHECKS:
        assert (check.find.__doc__ or "").startswith("Reject "), check.name
        assert check.why in ("blind", "obscure", "common")
