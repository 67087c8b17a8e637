"""The strategy found for each layer is the best there is, and better machines never make it worse."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from itertools import pairwise
from math import inf, prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpkit as mk
from examples.flexflow.chain_search import brute_force, fastest, least_memory
from examples.flexflow.layer import CHANNELS, Layer, Split
from examples.flexflow.price import ChainCosts, ChainPrices
from examples.flexflow.strategies import layer_strategies
from mpkit.devices.hardware import Hardware


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


def test_as_fast_as_the_best_of_all_choices_with_any_numbers() -> None:
    """Arrays without any structure that prices may have; the limit cuts where it will."""
    rng = np.random.default_rng(7)
    for _ in range(200):
        sizes = rng.integers(1, 6, rng.integers(2, 6))
        costs = ChainCosts(
            [rng.random(n) for n in sizes],
            [rng.integers(0, 9, n).astype(float) for n in sizes],
            [rng.random((a, b)) for a, b in pairwise(sizes)],
        )
        limit = float(rng.integers(0, 6 * len(sizes)))
        found, best = fastest(costs, limit), brute_force(costs, limit)
        assert (found is None) == (best is None)
        if found is not None and best is not None:
            assert found.time == pytest.approx(best.time, rel=1e-12)


def by_table(costs: ChainCosts, limit: int) -> float:
    """The least time within a limit where memory is whole numbers: a table over (split, memory), without any bound."""
    table = np.full((len(costs.time[0]), limit + 1), np.inf)
    for x, (seconds, nbytes) in enumerate(zip(costs.time[0], costs.memory[0], strict=True)):
        table[x, int(nbytes) :] = seconds
    for i, between in enumerate(costs.between):
        following = np.full((len(costs.time[i + 1]), limit + 1), np.inf)
        for y, (seconds, nbytes) in enumerate(zip(costs.time[i + 1], costs.memory[i + 1], strict=True)):
            ahead = (table + between[:, [y]]).min(axis=0) + seconds
            following[y, int(nbytes) :] = ahead[: max(0, limit + 1 - int(nbytes))]
        table = following
    return float(table[:, limit].min())


def test_long_chains_against_a_table_over_memory() -> None:
    """Where brute force is out of the question, and more labels are drawn than are kept for the first guess."""
    rng = np.random.default_rng(3)
    for length in (10, 40, 80):
        for _ in range(4):
            costs = ChainCosts(
                list(rng.random((length, 12))),
                list(rng.integers(0, 30, (length, 12)).astype(float)),
                list(0.5 * rng.random((length - 1, 12, 12))),
            )
            for limit in (2 * length, 5 * length, 9 * length):
                found = fastest(costs, limit)
                assert (np.inf if found is None else found.time) == pytest.approx(
                    by_table(costs, limit), rel=1e-12
                )


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


def large_gpt(layers: int) -> list[Layer]:
    """Llama 3 405B's sizes, with sequences of 8,192 tokens."""
    h, s, vocabulary = 16384, 8192, 128256
    block = Layer(
        "block", s * h, s * h, flops=s * (24 * h * h + 4 * s * h), parameters=12 * h * h, attribute=s, parameter=128,
        channels="summed", sums=2, exchanged=2 * s * h,
    )  # fmt: skip
    return [
        Layer("embedding", s, s * h, 0, vocabulary * h, attribute=s, parameter=h),
        *(replace(block, name=f"block{i}") for i in range(layers)),
        Layer("head", s * h, s * vocabulary, 2 * s * h * vocabulary, vocabulary * h, attribute=s, parameter=vocabulary),
    ]  # fmt: skip


@pytest.mark.parametrize("share", [None, 0.4])
def test_identical_layers_priced_once_or_one_by_one(share: float | None) -> None:
    class OneByOne(ChainPrices):
        """No two layers are identical."""

        @property
        def costs(self) -> ChainCosts:  # type: ignore[override]
            alone = [ChainPrices([layer], self.hardware, self.batch).costs for layer in self.layers]
            pairs = [
                ChainPrices([a, b], self.hardware, self.batch).costs.between[0]
                for a, b in pairwise(self.layers)
            ]
            return ChainCosts([each.time[0] for each in alone], [each.memory[0] for each in alone], pairs)

    layers, hardware = large_gpt(10), mk.hardware("2x8-h100-ndr")
    together, apart = (each(layers, hardware, 32).costs for each in (ChainPrices, OneByOne))
    assert len({id(matrix) for matrix in together.between}) == 3  # into, within and out of the run of blocks
    assert len({id(matrix) for matrix in apart.between}) == 11
    free, least = fastest(together), least_memory(together).memory
    assert free is not None
    limit = inf if share is None else least + share * (free.memory - least)
    assert fastest(together, limit) == fastest(apart, limit)


def test_126_layers_on_1024_devices() -> None:
    found = layer_strategies(large_gpt(126), "128x8-h100-ndr", batch=2048, dtype="bfloat16", memory=inf)
    tighter = found.again(hardware="128x8-h100-ndr", memory=0.4 * found.memory)
    assert tighter.memory <= 0.4 * found.memory < found.memory
    assert tighter.time > found.time
    assert "block1 ... block125 (125)" in str(found)


def test_the_time_is_the_sum_of_what_the_layers_take() -> None:
    found = layer_strategies(random_chain(3, longest=8), machine(), batch=16)
    assert sum(found.because.values()) == pytest.approx(found.time)
    assert sum(each.memory for each in found.choices) == pytest.approx(found.memory)
    assert [*found.because.values()] == sorted(found.because.values(), reverse=True)
    frame = found.to_dataframe()
    assert frame["layer"].tolist() == [layer.name for layer in found.priced.layers]
    assert frame[["compute", "inside", "gradients", "resharding"]].sum().sum() == pytest.approx(found.time)
    assert all(choice.time >= found.time for choice in found.uniform.values() if choice.memory <= found.limit)


def test_the_table_in_a_terminal_and_in_a_notebook() -> None:
    layers = [Layer("a<b", 64, 64, flops=8192, parameters=4160, parameter=64)] * 3
    found = layer_strategies([*layers, replace(layers[0], parameter=1)], "2x-titan-rtx", batch=4)
    text, html = str(found), found._repr_html_()
    assert text == repr(found) and "4 layers on 2 devices of 2x-titan-rtx, batch 4" in text
    assert "a<b ... a<b (3)" in text
    assert "a&lt;b ... a&lt;b (3)" in html and "a<b" not in html
    assert html.count("<tr>") == text.splitlines().index("", 2) - 2  # one for each line of the table


@settings(max_examples=30)
@given(st.integers(0, 10_000))
def test_a_markov_chain_never_beats_it(seed: int) -> None:
    found = layer_strategies(random_chain(seed, longest=6), machine(seed), batch=16, memory=inf)
    limit = (found.memory + least_memory(found.priced.costs).memory) / 2
    found = found.again(hardware=machine(seed), memory=limit)
    walk = found.by_mcmc(budget=400, seed=seed)
    assert walk.time >= found.time * (1 - 1e-12) and walk.best.memory <= limit
    assert (walk.best.time, walk.best.memory) == found.priced.costs.costs_of(walk.best.splits)
    assert f"of {walk.budget} proposals" in str(walk)
    assert [time for _, time in walk.improved] == sorted((t for _, t in walk.improved), reverse=True)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"model": []}, "or a list of layers"),
        ({"batch": 0}, r"batch=0.*1 or more"),
        ({"dtype": "int8"}, "'float32', 'bfloat16', 'float16'"),
        ({"memory": -1}, "bytes per device, more than 0"),
        ({"memory": float("nan")}, "bytes per device, more than 0"),
        ({"memory": 1e3}, r"need .* per device at least on 4 devices, and there are 1.00 kB.*memory="),
        ({"hardware": "cpu"}, "say how many, such as devices=4"),
        ({"devices": 5}, "has 4"),
        ({"hardware": "2x8-h100-ndr", "devices": 12}, "nodes of 8.*devices=8 are"),
    ],
)
def test_what_cannot_be_says_so(how: dict[str, object], message: str) -> None:
    asked: dict[str, object] = {"model": random_chain(1), "hardware": "4x-a100-nvlink", "batch": 16, **how}
    with pytest.raises(ValueError, match=message):
        layer_strategies(**asked)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"inputs": 0}, "inputs=0.*1 or more"),
        ({"parameters": -1}, "parameters=-1.*0 or more"),
        ({"attribute": 2.5}, "attribute=2.5"),
        ({"flops": "many"}, "flops='many'"),
        ({"channels": "split"}, "there are 'gathered': each device needs"),
    ],
)
def test_a_layer_that_cannot_be_says_so(sizes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Layer(**{"name": "fc", "inputs": 2, "outputs": 2, "flops": 8, **sizes})  # type: ignore[arg-type]


def test_the_memory_that_the_refusal_names_is_enough() -> None:
    for seed in range(10):
        with pytest.raises(ValueError, match="no strategy fits") as refused:
            layer_strategies(random_chain(seed), machine(seed), batch=16, memory=1)
        named = re.search(r"memory=(\d+)", str(refused.value))
        assert (
            named
            and layer_strategies(random_chain(seed), machine(seed), batch=16, memory=int(named[1])).time > 0
        )


def test_what_has_no_parameters_has_no_gradients_to_sum() -> None:
    layer = Layer("relu", 64, 64, flops=0, parameter=64, channels="kept")
    priced = ChainPrices([layer], mk.hardware("4x-a100-nvlink"), 8)
    assert priced.parts(layer, Split(sample=4))["gradients"] == 0


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
