"""One layer split in FlexFlow's four ways, on two real ranks: equal to the whole layer, and sends what it should."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import mpkit as mk
from examples.flexflow import soap
from examples.flexflow.soap_found import Soap

Clusters = Callable[[int], mk.Cluster]
EIGHT = 8  # bytes of a number: it is computed in float64


@pytest.fixture(scope="module")
def linear(clusters: Clusters) -> Soap:
    return soap("linear", cluster=clusters(2))


@pytest.fixture(scope="module")
def norm(clusters: Clusters) -> Soap:
    return soap("layer_norm", cluster=clusters(2))


def exchanges(found: Soap) -> dict[str, dict[str, list[tuple[str, int]]]]:
    """By way and phase: the kind of what is sent, and its bytes."""
    return {
        way.name: {
            phase: [(sent.kind, sent.payload) for sent in way.sent if sent.phase == phase]
            for phase in ("forward", "backward")
        }
        for way in found.ways
    }


def test_what_a_linear_layer_sends(linear: Soap) -> None:
    samples, length, features = linear.shapes["X"]
    out = linear.shapes["Y"][-1]
    x, y = EIGHT * samples * length * features, EIGHT * samples * length * out
    parameters = EIGHT * (features * out + out)
    assert exchanges(linear) == {
        "O": {"forward": [("send", y)], "backward": [("send", y)]},
        "S": {"forward": [], "backward": [("all_reduce", parameters)]},
        "A": {"forward": [], "backward": [("all_reduce", parameters)]},
        "P columns": {"forward": [], "backward": [("all_reduce", x)]},
        "P columns, gathered": {"forward": [("all_gather", y)], "backward": [("all_reduce", x)]},
        "P rows": {"forward": [("all_reduce", y)], "backward": []},
    }


@pytest.mark.parametrize("kind", ["linear", "norm"])
def test_every_way_equals_the_whole_layer(kind: str, request: pytest.FixtureRequest) -> None:
    found: Soap = request.getfixturevalue(kind)
    for way in found.ways:
        assert way.difference < 1e-13 and way.gradient_difference < 1e-13, way.name
