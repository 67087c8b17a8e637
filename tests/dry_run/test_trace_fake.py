"""A rank played alone on tensors without content does what the real one does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mpkit as mk
from mpkit.models import GPT, next_token_loss
from tests.fakes import MODEL_STATES, adamw, both, communication, sgd

# ---------------------------------------------------------------- equal to the real run


def test_each_rank_can_be_played_by_itself(clusters: Callable[[int], mk.Cluster]) -> None:
    rank = 2
    real, fake = both(clusters, "mlp", mk.Plan.zero(1, 3), adamw, rank=rank)
    peaks = [mk.Timeline.of(trace).peak_memory[rank] for trace in (real, fake)]
    assert [peaks[0][key] for key in MODEL_STATES] == [peaks[1][key] for key in MODEL_STATES]
    assert communication(real.ranks[rank]) == communication(fake.ranks[rank])


@pytest.mark.parametrize("plan", [mk.Plan.tp(2)], ids=repr)
def test_a_function_may_return_a_model_that_is_there(
    clusters: Callable[[int], mk.Cluster], plan: mk.Plan
) -> None:
    """Each rank gets a copy: strategies change the model that they are given."""
    model, cluster = GPT(layers=2), clusters(1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    anew, once = (
        mk.trace_fake(make, plan, batch=tokens(4, 16), loss=next_token_loss, optimizer=adamw, cluster=cluster)
        for make in (lambda: GPT(layers=2), lambda: model)
    )
    assert mk.Timeline.of(once).to_dataframe().equals(mk.Timeline.of(anew).to_dataframe())
    assert mk.Timeline.of(once).peak_memory == mk.Timeline.of(anew).peak_memory
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# ---------------------------------------------------------------- at full size


def tokens(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(batch, length, dtype=torch.long, device="meta"), torch.empty(
        batch, length, dtype=torch.long, device="meta"
    )


def test_times_within_an_action_are_counted_operator_by_operator(
    clusters: Callable[[int], mk.Cluster],
) -> None:
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


# ---------------------------------------------------------------- what cannot be played


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_fn": nn.Linear(2, 2)}, "a function that makes the model"),
        ({"plan": "ddp"}, "give a Plan"),
        ({"rank": 2}, "has the ranks 0 to 1"),
        ({"hardware": "abacus"}, "none of that name"),
        ({"batch": torch.zeros(3)}, r"a pair \(inputs, targets\)"),
        ({"batch": (torch.zeros(4, 3), torch.zeros(4, 2))}, "The model refuses data of this shape"),
        ({"loss": lambda y, t: y}, "not a scalar"),
        ({"optimizer": 3}, "it is a function of parameters"),
        ({"model_fn": lambda: 3}, "model is int"),
    ],
)
def test_mistakes_are_explained(
    clusters: Callable[[int], mk.Cluster], change: dict[str, Any], words: str
) -> None:
    good: dict[str, Any] = {
        "model_fn": lambda: nn.Sequential(nn.Linear(2, 2)), "plan": mk.Plan.ddp(2),
        "batch": (torch.zeros(4, 2), torch.zeros(4, 2)), "loss": F.mse_loss, "optimizer": sgd,
        "cluster": clusters(1),
    }  # fmt: skip
    with pytest.raises(ValueError, match=words):
        mk.trace_fake(**{**good, **change})
