"""Trainings on tensors without content: traces, ranks that stand for others, memory."""

from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import mpkit as mk
from benchmarks.memory import CASES, LIMIT, PLANS, errors
from mpkit.models import GPT, next_token_loss
from mpkit.plan.mesh import AXES, Mesh
from mpkit.prediction.dry_run import mirror
from mpkit.trace import MEMORY, OP, Kind, RankTrace
from tests.recipes import adamw, sgd
from tests.serial import Clusters

# ---- A rank played alone on tensors without content does what the real one does.


@pytest.mark.slow
def test_a_function_may_return_a_model_that_is_there(clusters: Clusters) -> None:
    """Each rank gets a copy: strategies change the model that they are given."""
    model, cluster, plan = GPT(layers=2), clusters(1), mk.Plan.tp(2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    anew, once = (
        mk.trace_fake(make, plan, batch=tokens(4, 16), loss=next_token_loss, optimizer=adamw, cluster=cluster)
        for make in (lambda: GPT(layers=2), lambda: model)
    )
    assert mk.Timeline.of(once).to_dataframe().equals(mk.Timeline.of(anew).to_dataframe())
    assert mk.Timeline.of(once).peak_memory == mk.Timeline.of(anew).peak_memory
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def tokens(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(batch, length, dtype=torch.long, device="meta"), torch.empty(
        batch, length, dtype=torch.long, device="meta"
    )


def test_times_within_an_action_are_counted_operator_by_operator(clusters: Clusters) -> None:
    """Two products of 2 b n n FLOPs, each followed by something that only moves bytes."""
    b, n, one = 64, 512, mk.devices.Device("toy", {"float32": 1e9}, bandwidth=1e9)
    toy = mk.devices.Hardware("toy", one, mk.devices.Link("wire", 0.0, 1e9))
    trace = mk.trace_fake(
        lambda: nn.Sequential(nn.Linear(n, n, bias=False), nn.ReLU()), mk.Plan.serial(),
        batch=(torch.empty(b, n, device="meta"), torch.empty(b, n, device="meta")),
        loss=lambda y, t: y.sum(), optimizer=sgd, hardware=toy, cluster=clusters(1),
    )  # fmt: skip
    forward = mk.Timeline.of(trace, toy).to_dataframe().query("kind == 'forward'").iloc[0]
    product, relu = 2 * b * n * n / 1e9, 2 * b * n * 4 / 1e9
    rest = b * n * 4 / 1e9  # the sum reads what the ReLU made; scalars are nothing
    copies = 4 * b * n * 4 / 1e9  # inputs and targets to the device: read and written
    assert forward["end"] - forward["start"] == pytest.approx(product + relu + rest, abs=copies)
    with pytest.raises(ValueError, match=r"'toy', which the catalogue does not have"):
        mk.Timeline.of(trace)


@pytest.mark.parametrize(("change", "words"), [
    ({"model_fn": nn.Linear(2, 2)}, "a function that makes the model"),
    ({"plan": "ddp"}, "give a Plan"),
    ({"hardware": "abacus"}, "none of that name"),
    ({"batch": torch.zeros(3)}, r"a pair \(inputs, targets\)"),
    ({"batch": (torch.zeros(4, 3), torch.zeros(4, 2))}, "The model refuses data of this shape"),
    ({"loss": lambda y, t: y}, "not a scalar"),
    ({"optimizer": 3}, "it is a function of parameters"),
    ({"model_fn": lambda: 3}, "model is int"),
])  # fmt: skip
def test_mistakes_are_explained(clusters: Clusters, change: dict[str, Any], words: str) -> None:
    good: dict[str, Any] = {
        "model_fn": lambda: nn.Sequential(nn.Linear(2, 2)), "plan": mk.Plan.ddp(2),
        "batch": (torch.zeros(4, 2), torch.zeros(4, 2)), "loss": F.mse_loss, "optimizer": sgd,
        "cluster": clusters(1),
    }  # fmt: skip
    with pytest.raises(ValueError, match=words):
        mk.trace_fake(**{**good, **change})


# ---- Any mesh played on tensors without content does what the real one does, and ranks that are alike are played once.


@given(
    degrees=st.lists(st.integers(1, 3), min_size=4, max_size=4),
    ends=st.tuples(st.integers(0), st.integers(0)),
    axes=st.sampled_from([axes for n in range(1, 5) for axes in combinations(AXES, n)]),
)
def test_a_mirror_names_the_ranks_that_it_would_talk_to_itself(
    degrees: list[int], ends: tuple[int, int], axes: tuple[str, ...]
) -> None:
    mesh = Mesh(*degrees)
    played, other = (end % mesh.size for end in ends)
    theirs, expected = mesh.group(played, *axes), mesh.group(other, *axes)
    ops = np.zeros(2, OP)
    ops["kind"], ops["group"], ops["peer"] = (Kind.FORWARD, Kind.BROADCAST), (0, 1), (-1, theirs[0])
    recorded = RankTrace(ops, np.zeros(0, MEMORY), ["", ",".join(map(str, theirs))])
    mirrored = mirror(recorded, played, other, mesh)
    assert mirrored.names[1] == ",".join(map(str, expected))
    assert mirrored.ops["peer"].tolist() == [-1, expected[0]]
    assert recorded.ops["peer"].tolist() == [-1, theirs[0]]


# ---- Memory played on tensors without content, beside torch.profiler's allocator.


FAST = {("ResNet", "recomputed"), ("LSTM", "plain")}
ALL = [(model, plan) for model in CASES for plan in PLANS]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "plan"), [pytest.param(*row, marks=() if row in FAST else pytest.mark.soak) for row in ALL]
)
def test_the_peak_is_the_allocators(clusters: Clusters, model: str, plan: str) -> None:
    for error in errors(CASES[model], PLANS[plan], clusters(PLANS[plan].ranks)):
        assert abs(error) <= LIMIT


def constructed(rate: float) -> nn.Module:
    """Reads tensors while it is made, as models do that draw weights again and rates of dropout by depth."""
    layer = nn.Linear(8, 8)
    nn.init.trunc_normal_(layer.weight)
    return nn.Sequential(layer, nn.Dropout(torch.linspace(0, rate, 3)[0].item()))


def test_a_constructor_may_read_tensors(clusters: Clusters) -> None:
    shape = torch.empty(4, 8, device="meta")
    trace = mk.trace_fake(
        lambda: constructed(0.0), mk.Plan.serial(), batch=(shape, shape), loss=F.mse_loss, optimizer=torch.optim.AdamW,
        cluster=clusters(1),
    )  # fmt: skip
    assert mk.Timeline.of(trace).memory[0]["params"] == 4 * (8 * 8 + 8)


def test_the_loss_holds_two_more_copies_of_the_logits(clusters: Clusters) -> None:
    """The gradients of nll_loss and of log_softmax, beside the log_softmax that was saved; weights are few."""
    n, vocab = 64, 4096
    x, y = torch.empty(n, 1, device="meta"), torch.empty(n, dtype=torch.long, device="meta")
    trace = mk.trace_fake(
        lambda: nn.Sequential(nn.Linear(1, vocab, bias=False)), mk.Plan.serial(), batch=(x, y), loss=F.cross_entropy,
        optimizer=torch.optim.SGD, cluster=clusters(1),
    )  # fmt: skip
    logits, (held,) = 4 * n * vocab, mk.Timeline.of(trace).memory
    assert held["buffers"] == pytest.approx(2 * logits, rel=0.01)
    assert held["activations"] == pytest.approx(logits, rel=0.01)
