"""One layer split in FlexFlow's four ways, on two real ranks: equal to the whole layer, and sends what it should."""

from __future__ import annotations

from collections.abc import Callable
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import mpkit as mk
from examples.flexflow import soap
from examples.flexflow.soap_found import Soap, Way
from mpkit.trace import Kind

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


def holders(found: Soap, way: Way, name: str) -> np.ndarray:
    """How many ranks have each number of a tensor."""
    count = np.zeros(found.shapes[name], int)
    for box in way.held[name]:
        if box is not None:
            count[tuple(slice(*edge) for edge in box)] += 1
    return count


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


def test_what_a_layer_norm_sends(norm: Soap) -> None:
    samples, length, features = norm.shapes["X"]
    y = EIGHT * samples * length * features
    two_a_row = EIGHT * 2 * samples * length
    assert exchanges(norm) == {
        "O": {"forward": [("send", y)], "backward": [("send", y)]},
        "S": {"forward": [], "backward": [("all_reduce", EIGHT * 2 * features)]},
        "A": {"forward": [], "backward": [("all_reduce", EIGHT * 2 * features)]},
        "P": {"forward": [("all_reduce", two_a_row)], "backward": [("all_reduce", two_a_row)]},
    }


@pytest.mark.parametrize("kind", ["linear", "norm"])
def test_every_way_equals_the_whole_layer(kind: str, request: pytest.FixtureRequest) -> None:
    found: Soap = request.getfixturevalue(kind)
    for way in found.ways:
        assert way.difference < 1e-13 and way.gradient_difference < 1e-13, way.name


@pytest.mark.parametrize("kind", ["linear", "norm"])
def test_ranks_together_have_everything_and_what_is_divided_once(
    kind: str, request: pytest.FixtureRequest
) -> None:
    found: Soap = request.getfixturevalue(kind)
    for way in found.ways:
        for name in way.held:
            assert holders(found, way, name).min() >= 1, (way.name, name)
    once = {
        "S": "XY",
        "A": "XY",
        "P columns": "AbY",
        "P columns, gathered": "Ab",
        "P rows": "XA",
        "P": "XγβY",
        "O": "XAbγβCZ",
    }
    for way in found.ways:
        for name in way.held:
            assert holders(found, way, name).max() == (1 if name in once[way.name] else 2), (way.name, name)
    halves = found["A"].held["X"]
    assert halves == [
        ((0, 2), (0, 2), (0, found.shapes["X"][2])),
        ((0, 2), (2, 4), (0, found.shapes["X"][2])),
    ]


def test_operators_are_pipelined(linear: Soap) -> None:
    """Rank 0 has begun its second micro-batch before rank 1 has sent anything back."""
    sends = [part.ops[part.ops["kind"] == Kind.SEND] for part in linear.trace.ranks]
    names = [
        [part.names[op["group"]] for op in ops] for part, ops in zip(linear.trace.ranks, sends, strict=True)
    ]
    assert names == [["0>1#F0", "0>1#F1"], ["1>0#B0", "1>0#B1"]]
    assert [(sent.phase, sent.times) for sent in linear["O"].sent] == [("forward", 2), ("backward", 2)]


@pytest.mark.soak
@settings(max_examples=10)
@given(data=st.data())
def test_any_layer_of_ones_own(clusters: Clusters, data: st.DataObject) -> None:
    def even(name: str, most: int) -> int:
        return 2 * data.draw(st.integers(1, most), label=name)

    torch.manual_seed(data.draw(st.integers(0, 999), label="seed"))
    bias = data.draw(st.booleans(), label="bias")
    layer: nn.Module
    if data.draw(st.booleans(), label="linear"):
        layer = nn.Linear(even("in", 5), even("out", 5), bias=bias)
    else:
        layer = nn.LayerNorm(even("n", 6), eps=data.draw(st.sampled_from([1e-5, 1e-2])), bias=bias)
        nn.init.normal_(layer.weight)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    found = soap(layer, samples=even("samples", 3), length=even("length", 4), cluster=clusters(2))
    for way in found.ways:
        assert way.difference < 1e-11 and way.gradient_difference < 1e-11, way.name
    torch.testing.assert_close(layer.state_dict(), before, rtol=0, atol=0)


def test_the_whole_layer_is_torchs(clusters: Clusters) -> None:
    """What ranks are compared with is the layer that was given, not the formula's idea of it."""
    from examples.flexflow.soap_splits import _operator

    x = torch.randn(3, 4, 6, dtype=torch.float64)
    for layer in (
        nn.Linear(6, 4),
        nn.Linear(6, 4, bias=False),
        nn.LayerNorm(6, eps=0.1),
        nn.LayerNorm(6, bias=False),
    ):
        for parameter in layer.parameters():
            nn.init.normal_(parameter)
        operator, _ = _operator(layer, torch.Generator())
        torch.testing.assert_close(
            operator(x, operator.parameters), layer.double()(x), rtol=1e-12, atol=1e-12
        )


def test_the_picture(linear: Soap, norm: Soap) -> None:
    for found in (linear, norm):
        root = ElementTree.fromstring(found.to_svg())
        space = "{http://www.w3.org/2000/svg}"
        bands = [group for group in root.iter(f"{space}g") if group.get("aria-label")]
        assert [band.get("aria-label", "").split(":")[0] for band in bands] == [
            way.name for way in found.ways
        ]
        words = [text.text for text in bands[0].iter(f"{space}text")]
        assert "send Y: 512 B in 2 messages" in words
        # every number is a square, in the colour of who has it
        squares = [rect.get("class") or rect.get("fill") for rect in bands[1].iter(f"{space}rect")][1:]
        sizes = {name: int(np.prod(found.shapes[name])) for name in found["S"].held}
        both = sum(sizes.values()) - sizes["X"] - sizes["Y"]
        assert squares.count("url(#mpkit-both)") == both
        assert squares.count("r0") == squares.count("r1") == (sizes["X"] + sizes["Y"]) // 2
    assert set(linear._repr_mimebundle_()) == {"text/html", "text/plain"}


def test_a_large_layer_is_drawn_in_blocks(clusters: Clusters) -> None:
    found = soap(nn.Linear(64, 256), samples=16, length=8, cluster=clusters(2))
    assert len(found.to_svg()) < 100_000
    assert max(len(line) for line in str(found).splitlines()) < 140


def test_in_a_terminal(linear: Soap) -> None:
    lines = str(linear).splitlines()
    at = lines.index("P  parameters: rows (tensor parallelism, row-parallel)")
    assert [line.split() for line in lines[at + 2 : at + 10 : 3]] == [
        ["X", "A", "b", "Y"],
        ["000111", "00000000", "########"],
        ["000111", "11111111", "########"],
    ]
    assert lines[at + 11].split() == ["forward", "all_reduce", "Y,", "512", "B"]
    assert lines[at + 12].split() == ["backward", "nothing", "is", "sent"]


def test_as_a_table(linear: Soap) -> None:
    frame = linear.to_dataframe()
    assert frame[frame["way"] == "P columns, gathered"]["kind"].tolist() == ["all_gather", "all_reduce"]
    assert frame["payload"].sum() == sum(
        way.payload("forward") + way.payload("backward") for way in linear.ways
    )


@pytest.mark.parametrize(
    ("layer", "how", "message"),
    [
        ("conv", {}, "'linear', 'layer_norm', or a layer of your own"),
        (nn.ReLU(), {}, r"soap\(torch\.nn\.Linear\(6, 8\)\)"),
        (nn.LayerNorm(4, elementwise_affine=False), {}, "has parameters"),
        (nn.LayerNorm((2, 4)), {}, "over one dimension"),
        (nn.Linear(5, 8), {}, "the layer's inputs: 5 cannot be divided between 2 ranks.*such as 6"),
        ("linear", {"samples": 3}, "samples: 3 cannot be divided.*such as 4"),
        ("linear", {"length": 0}, "length: 0 cannot be divided.*such as 2"),
        ("linear", {"length": 2.0}, r"length: 2\.0 cannot be divided"),
    ],
)
def test_what_cannot_be_split_says_so(layer: object, how: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        soap(layer, **how)  # type: ignore[arg-type]


def test_it_takes_two_ranks(cluster: mk.Cluster, linear: Soap) -> None:
    with pytest.raises(ValueError, match=r"has 4 ranks: give mk\.Cluster\(ranks=2\)"):
        soap("linear", cluster=cluster)
    with pytest.raises(ValueError, match="no way 'P' to split"):
        linear["P"]
