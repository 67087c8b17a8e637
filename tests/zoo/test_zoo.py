"""The zoo: small random models of transformers' architectures, trained by mpkit and by plain PyTorch, side by side.

    make soak ARGS="-k 'zoo and tp2'"       the models under one plan

Each model trains for three steps in float64 under each plan, and in plain PyTorch with its micro-batches. A model
is equal to 1e-8; to 1e-6, where plain PyTorch differs from itself by more than float64 rounds when it splits the batch,
since parts of the model compute in float32; or it is rejected before a rank starts. `LEAST` says how many are equal.
"""

import warnings
from typing import Any

import pytest
import torch

import mpkit as mk
from mpkit.strategies.experts.divide import find_experts
from tests.recipes import sgd
from tests.serial import Clusters, serial
from tests.zoo.architectures import ARCHITECTURES, Architecture, batch_of, build, loss_of

STEPS = 3
PLANS = {
    "pp2": mk.Plan.pipeline("1f1b", 2, microbatches=2, batchnorm="local"),
    "ddp2": mk.Plan.ddp(2),
    "zero3": mk.Plan.zero(3, 2),
    "tp2": mk.Plan(tp=2),
    "ep2": mk.Plan(dp=2, ep=2),
}
LEAST = {"pp2": 0.95, "ddp2": 0.95, "zero3": 0.95, "tp2": 0.70, "ep2": 1.0}
"""The share of models that are equal; under tp2 of the decoders, under ep2 of the mixtures of experts."""

Outcome = tuple[list[float], Any]


def difference(one: Outcome, other: Outcome) -> float:
    """Return the largest difference of all losses and weights; infinite where one is not a number."""
    assert list(one[1]) == list(other[1])
    pairs = [
        (torch.tensor(one[0]), torch.tensor(other[0])),
        *((one[1][name], other[1][name]) for name in other[1]),
    ]
    largest = [float((x.double() - y.double()).abs().max()) for x, y in pairs if x.numel()]
    return max(found if found == found else float("inf") for found in largest)


def trains_equally(cluster: mk.Cluster, one: Architecture, plan: mk.Plan) -> bool:
    """Return whether a model trains as in plain PyTorch; False if its training is rejected, or stopped by its proof."""
    model, loss = build(one), loss_of(one.task)
    torch.manual_seed(1)
    data = [batch_of(one.task) for _ in range(STEPS)]
    how = {"loss": loss, "optimizer": sgd, "steps": STEPS}
    try:
        run = cluster.train(model, data, plan, **how).wait()
    except (ValueError, mk.errors.NotSerial):
        return False
    whole, split = (serial(model, data, microbatches=parts, **how) for parts in (1, 2))
    differs = difference((list(run.losses), run.state_dict()), split if plan.microbatches == 2 else whole)
    assert differs <= 1e-8 or (differs <= 1e-6 and 1e-12 < difference(whole, split) <= 1e-6), differs
    return True


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("column", PLANS)
def test_models_train_as_in_plain_pytorch_or_are_rejected(
    clusters: Clusters, column: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")  # on the ranks too
    counted = {
        "tp2": [one for one in ARCHITECTURES if one.decoder],
        "ep2": [one for one in ARCHITECTURES if find_experts(build(one))],
    }
    equal, wrong = [], {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for one in ARCHITECTURES:
            if (column == "tp2" and not one.division) or (column == "ep2" and one not in counted["ep2"]):
                continue
            try:
                equal += [one] * trains_equally(clusters(2), one, PLANS[column])
            except (AssertionError, mk.errors.MpkitError) as error:
                wrong[one.name] = f"{type(error).__name__}: {error}"[:300]
    assert not wrong, "neither equal nor rejected"
    these = counted.get(column, ARCHITECTURES)
    refused = [one.name for one in these if one not in equal]
    assert len(these) - len(refused) >= LEAST[column] * len(these), refused
