"""What a forward saves, by hand and by measurement; and reused numbers are those that were measured."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mpkit.trace import CATEGORIES, Kind, read_rank
from mpkit.trace.record.hooks import watch
from mpkit.trace.record.recorder import Recorder
from mpkit.trace.record.saved_tensors import count_saved

BATCH = 3


def activations(record: Recorder) -> int:
    return record.ledger.held["activations"]


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
    "tanh keeps its output": (nn.Sequential(nn.Linear(4, 8), nn.Tanh()), BATCH * 8 * 4),
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
@pytest.mark.parametrize("every", [False, True])
def test_what_is_saved_is_what_the_layers_need(
    tmp_path: Path, model: nn.Module, nbytes: int, every: bool
) -> None:
    record = Recorder(tmp_path, 0)
    watch(record, model)
    for _ in range(3):
        x = torch.ones(BATCH, 4)
        record.ledger.track(x, "activations")
        with count_saved(record, 0, x.shape, every=every) as saved:
            out = model(x)
        record.ledger.track(out, "activations")
        kept = x.nbytes + out.nbytes
        out_is_saved = nbytes and isinstance(model[-1], nn.Tanh)
        assert activations(record) == kept + nbytes - (out.nbytes if out_is_saved else 0)
        assert saved.nbytes == activations(record) - kept
        out.sum().backward()
        saved.release()
        assert saved.nbytes == 0
        del x, out
        assert activations(record) == 0


def test_inputs_that_nobody_tracks_are_counted_too(tmp_path: Path) -> None:
    record = Recorder(tmp_path, 0)
    model = nn.Linear(4, 8)
    watch(record, model)
    with count_saved(record, 0, ()):
        model(torch.ones(BATCH, 4)).sum()
    assert activations(record) == 0  # given up: the graph died with its output
    with count_saved(record, 0, ()):
        out = model(torch.ones(BATCH, 4)).sum()
    assert activations(record) == BATCH * 4 * 4
    out.backward()
    assert activations(record) == 0


def test_without_gradients_nothing_is_saved_or_learnt(tmp_path: Path) -> None:
    record = Recorder(tmp_path, 0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    watch(record, model)
    with torch.no_grad(), count_saved(record, 0, "key") as saved:
        model(torch.ones(BATCH, 4))
    saved.release()
    assert activations(record) == saved.nbytes == 0
    assert not record.savings.measured


def test_reused_numbers_go_when_they_are_given_up(tmp_path: Path) -> None:
    record = Recorder(tmp_path, 0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU())
    watch(record, model)

    def forward() -> tuple[object, torch.Tensor]:
        with count_saved(record, 0, ()) as saved:
            out = model(torch.ones(BATCH, 4)).sum()
        return saved, out

    saved, out = forward()
    out.backward()
    saved.release()
    saved, out = forward()
    assert activations(record) > 0
    del saved, out
    assert activations(record) == 0


def test_a_failed_forward_is_not_learnt_from(tmp_path: Path) -> None:
    record = Recorder(tmp_path, 0)
    with pytest.raises(ZeroDivisionError), count_saved(record, 0, ()):
        _ = torch.ones(2, requires_grad=True).exp(), 1 / 0
    assert not record.savings.measured
    assert record.savings.measuring == 0
    assert activations(record) == 0


def test_gradients_are_the_same_with_the_hooks_on(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Softmax(-1))
    x = torch.randn(BATCH, 4)
    model(x)[:, 0].sum().backward()
    wanted = [p.grad for p in model.parameters()]
    model.zero_grad()
    record = Recorder(tmp_path, 0)
    watch(record, model)
    with count_saved(record, 0, ()):
        out = model(x)[:, 0].sum()
    out.backward()
    assert all(torch.equal(a, b.grad) for a, b in zip(wanted, model.parameters(), strict=True))


def test_the_hooks_keep_autograds_check_for_writes_in_place(tmp_path: Path) -> None:
    record = Recorder(tmp_path, 0)
    with count_saved(record, 0, ()):
        y = torch.ones(2, requires_grad=True).exp()
        y += 1
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: a tensor of shape \[2\]"):
        y.sum().backward()


def test_second_derivatives_work_with_the_hooks_on(tmp_path: Path) -> None:
    record = Recorder(tmp_path, 0)
    x = torch.tensor(2.0, requires_grad=True)
    with count_saved(record, 0, ()):
        y = x**3
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    (second,) = torch.autograd.grad(first, x)
    assert (first.item(), second.item()) == (12.0, 12.0)


def peaks(folder: Path) -> list[int]:
    """The most bytes held during each step."""
    rank = read_rank(folder, 0)
    total = np.cumsum(rank.memory["delta"])
    step = np.concatenate([[-1], rank.ops["step"]])[rank.memory["op"]]
    return [int(total[step == number].max()) for number in range(step.max() + 1)]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """So small a model only waits for its threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def train(folder: Path, widths: list[int], microbatches: int, order: str, *, every: bool) -> Recorder:
    """Two steps of one stage, its micro-batches forward and backward in the order of a schedule."""
    torch.manual_seed(0)
    folder.mkdir(exist_ok=True)
    record = Recorder(folder, 0)
    layers = [m for a, b in pairwise(widths) for m in (nn.Linear(a, b), nn.GELU())]
    model = nn.Sequential(*layers)
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    watch(record, model, optim)
    live: dict[int, tuple] = {}

    def forward(microbatch: int) -> None:
        index = record.begin(Kind.FORWARD, microbatch=microbatch)
        x = torch.ones(BATCH, widths[0], requires_grad=True)
        record.ledger.track(x, "activations")
        with count_saved(record, 0, x.shape, every=every) as saved:
            out = model(x)
        record.ledger.track(out, "activations")
        record.end(index)
        live[microbatch] = x, out, saved

    def backward(microbatch: int) -> None:
        index = record.begin(Kind.BACKWARD, microbatch=microbatch)
        _, out, saved = live.pop(microbatch)
        out.sum().backward()
        saved.release()
        record.end(index)

    everyone = range(microbatches)
    for step in range(2):
        with record.step(step):
            if order == "1f1b":
                for microbatch in everyone:
                    forward(microbatch)
                    backward(microbatch)
            else:
                for microbatch in everyone:
                    forward(microbatch)
                for microbatch in everyone if order == "fifo" else reversed(everyone):
                    backward(microbatch)
            optim.step()
            optim.zero_grad()
    return record


@settings(max_examples=30)
@given(
    widths=st.lists(st.integers(1, 100), min_size=2, max_size=5),
    microbatches=st.integers(1, 4),
    order=st.sampled_from(["1f1b", "fifo", "lifo"]),
)
def test_the_reused_peak_is_the_measured_one(
    tmp_path_factory: pytest.TempPathFactory, widths: list[int], microbatches: int, order: str
) -> None:
    """Measured each time, or once and then reused: the same peak in every step, to the byte."""
    exact, reused = (tmp_path_factory.mktemp("run") for _ in range(2))
    train(exact, widths, microbatches, order, every=True)
    record = train(reused, widths, microbatches, order, every=False)
    assert record.savings.measured
    assert activations(record) == 0
    assert peaks(exact) == peaks(reused)


def test_reusing_writes_a_few_records_where_measuring_writes_one_a_tensor(tmp_path: Path) -> None:
    train(tmp_path, [8] * 10, 4, "fifo", every=False)
    rank = read_rank(tmp_path, 0)
    ours = rank.memory[rank.memory["category"] == CATEGORIES.index("activations")]
    by_step = np.bincount(rank.ops["step"][ours["op"] - 1])
    assert by_step[1] < by_step[0] / 2
