"""A strategy for each layer: SOAP's ways on two ranks, layers described, the exact search."""

import random
from dataclasses import replace
from math import inf, prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import mpkit as mk
from examples.flexflow import layer_strategies, soap
from examples.flexflow.chain_search import brute_force, fastest, least_memory
from examples.flexflow.describe import describe_chain
from examples.flexflow.layer import CHANNELS, Layer, Split
from examples.flexflow.price import ChainPrices
from examples.flexflow.soap_found import Soap
from mpkit.devices.hardware import Hardware
from mpkit.models import GPT
from tests.serial import Clusters

# ---- One layer split in FlexFlow's four ways, on two real ranks: equal to the whole layer, and sends what it should.

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


# ---- Layers described from modules: their sizes, and what they may be split by.


def images() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(8 * 16, 10), nn.Softmax(-1),
    )  # fmt: skip


def test_a_convolutional_network() -> None:
    convolution, norm, relu, pool, flatten, linear, softmax = describe_chain(images(), sample=(3, 8, 8))
    assert convolution == Layer(
        "0", 3 * 64, 8 * 64, flops=2 * 64 * 8 * 3 * 9, parameters=8 * 3 * 9 + 8, attribute=8, parameter=8,
        exchanged=2 * 3 * 8,
    )  # fmt: skip
    assert (norm.sample, norm.parameter, norm.channels) == (False, 8, "kept")
    assert (relu.attribute, relu.parameter, relu.parameters) == (8, 8, 0)
    assert (pool.inputs, pool.outputs, pool.attribute) == (8 * 64, 8 * 16, 4)
    assert (flatten.attribute, flatten.parameter, flatten.channels) == (1, 8, "kept")
    assert (linear.parameter, linear.attribute, linear.channels) == (10, 1, "gathered")
    assert (softmax.sample, softmax.attribute, softmax.parameter) == (
        True,
        1,
        1,
    )  # of a kind that is not known


def test_a_gpt() -> None:
    model = GPT(layers=3, width=32, heads=4, length=16, vocab=64)
    embedding, *blocks, head = describe_chain(model)
    assert [block.name for block in blocks] == ["block0", "block1", "block2"]
    assert len({block.sizes for block in blocks}) == 1
    block = blocks[0]
    assert block.flops == 16 * (24 * 32**2 + 4 * 17 / 2 * 32)  # a token sees 17/2 others, on average
    assert (block.attribute, block.parameter, block.sums, block.exchanged) == (16, 4, 2, 2 * 16 * 32)
    assert (embedding.inputs, embedding.parameter, head.outputs, head.parameter) == (16, 32, 16 * 64, 64)
    assert sum(each.parameters for each in describe_chain(model)) == sum(
        p.numel() for p in model.parameters()
    )
    with torch.device("meta"):
        large = GPT(layers=3, width=32, heads=4, length=16, vocab=64)
    assert describe_chain(large) == describe_chain(model)


# ---- The strategy found for each layer is the best there is, and better machines never make it worse.


def random_layer(rng: random.Random, name: str, inputs: int) -> Layer:
    outputs = 2 ** rng.randint(6, 14)
    channels = rng.choice([*CHANNELS])
    parameters = 0 if channels == "kept" else inputs * outputs
    return Layer(
        name, inputs, outputs, flops=2 * rng.choice([1, 8, 64]) * inputs * outputs, parameters=parameters,
        sample=rng.random() < 0.9, operator=rng.choice([1, 1, 2]), attribute=rng.choice([1, 1, 2, 4]),
        parameter=rng.choice([1, 2, 4]), channels=channels, sums=rng.choice([1, 2]),
        exchanged=rng.choice([0, inputs]),
    )  # fmt: skip


def random_chain(seed: int, longest: int = 5) -> list[Layer]:
    rng = random.Random(seed)
    layers: list[Layer] = []
    for i in range(rng.randint(2, longest)):
        repeats = layers and layers[-1].inputs == layers[-1].outputs and rng.random() < 0.5
        layer = layers[-1] if repeats else random_layer(rng, "", layers[-1].outputs if layers else 256)
        layers.append(replace(layer, name=f"layer{i}"))
    return layers


def machine(seed: int = 0, memory: float = 80e9) -> Hardware:
    name = ("4x-a100-nvlink", "2x-titan-rtx", "4x-titan-rtx")[seed % 3]
    found = mk.hardware(name)
    return replace(found, device=replace(found.device, memory=int(memory)))


def small_chain(seed: int, most: int = 20_000) -> ChainPrices:
    """A random chain of few enough choices to try them all."""
    layers = random_chain(seed)
    while prod(map(len, ChainPrices(layers, machine(seed), 16).splits)) > most:
        layers = layers[:-1]
    return ChainPrices(layers, machine(seed), 16)


@pytest.mark.parametrize("block", [0, 1, *(pytest.param(n, marks=pytest.mark.soak) for n in range(2, 8))])
def test_as_fast_as_the_best_of_all_choices(block: int) -> None:
    """200 chains in all, each without a limit and with three: between the least memory and that of the fastest."""
    for seed in range(25 * block, 25 * block + 25):
        costs = small_chain(seed).costs
        free = fastest(costs)
        assert free is not None
        least = least_memory(costs).memory
        for share in (None, 0.0, 0.3, 0.7):
            limit = inf if share is None else least + share * (free.memory - least)
            found, best = fastest(costs, limit), brute_force(costs, limit)
            assert found is not None and best is not None
            assert found.time == pytest.approx(best.time, rel=1e-12), (seed, share)
            assert found.memory <= limit
            assert (found.time, found.memory) == costs.costs_of(found.splits)


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.floats(1.0, 4.0))
def test_a_faster_link_and_more_memory_never_make_it_slower(seed: int, times: float) -> None:
    layers, hardware = random_chain(seed, longest=12), machine(seed)
    link = hardware.link
    bus = {kind: rate * times for kind, rate in link.bus.items()}
    better = replace(hardware, link=replace(link, bandwidth=link.bandwidth * times, bus=bus))
    found = layer_strategies(layers, hardware, batch=16, memory=inf)
    assert layer_strategies(layers, better, batch=16, memory=inf).time <= found.time * (1 + 1e-12)
    least = least_memory(found.priced.costs).memory
    limits = [least + share * (found.memory - least) for share in (0.0, 0.25 / times, 0.5, 1.0)]
    times_found = [found.again(hardware=hardware, memory=limit).time for limit in sorted(limits)]
    assert times_found == sorted(times_found, reverse=True)
    assert times_found[-1] == pytest.approx(found.time, rel=1e-12)


def test_what_is_sent_between_two_linear_layers() -> None:
    """Column-parallel twice: the output is gathered, and the sums of its gradient are scattered again."""
    layer = Layer("fc", 64, 64, flops=8192, parameters=4096, parameter=64)
    priced = ChainPrices([layer, layer], mk.hardware("4x-a100-nvlink"), 8)
    nbytes, link = 4 * 8 * 64, priced.hardware.link
    columns, samples = Split(parameter=4), Split(sample=4)
    gather, scatter = (
        link.time(kind, nbytes, 4) for kind in (mk.trace.Kind.ALL_GATHER, mk.trace.Kind.REDUCE_SCATTER)
    )
    assert priced.resharding_seconds(layer, columns, layer, columns) == pytest.approx(gather + scatter)
    assert priced.resharding_seconds(layer, samples, layer, samples) == 0
    all_reduce = link.time(mk.trace.Kind.ALL_REDUCE, nbytes, 4)
    assert priced.resharding_seconds(layer, Split(), layer, columns) == pytest.approx(all_reduce)
    swap = 2 * link.time(mk.trace.Kind.ALL_TO_ALL, nbytes / 4, 4)
    kept = replace(layer, channels="kept")
    assert priced.resharding_seconds(layer, samples, kept, columns) == pytest.approx(swap)
