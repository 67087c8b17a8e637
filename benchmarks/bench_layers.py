"""How often FlexFlow's Markov chain finds the best strategy of a chain, and how long the exact search takes.

Of 200 random chains of 3 to 24 layers on 16 devices the share of optima that `by_mcmc` finds within a budget, beside
the time of the exact search; then the exact search beside brute force, and 126 layers on 1,024 devices.
"""

from __future__ import annotations

import random
import time
from dataclasses import replace
from itertools import pairwise
from math import inf, prod
from typing import Any

import mpkit as mk
from examples.flexflow.chain_search import brute_force, fastest, least_memory
from examples.flexflow.layer import Layer
from examples.flexflow.price import ChainPrices
from examples.flexflow.result import LayerStrategies

CHAINS, BUDGETS = 200, (100, 1_000, 10_000)
LENGTHS = (3, 6, 12, 24)


def chain_of(seed: int, length: int) -> list[Layer]:
    """Return a chain of linear layers of random widths, with activations between some."""
    rng = random.Random(seed)
    widths = [2 ** rng.randint(6, 14) for _ in range(length + 1)]
    made = []
    for i, (inputs, outputs) in enumerate(pairwise(widths)):
        rows = rng.choice([1, 64])
        made.append(
            Layer(
                f"layer{i}", rows * inputs, rows * outputs, 2 * rows * inputs * outputs, inputs * outputs,
                attribute=rows, parameter=outputs, channels=rng.choice(["gathered", "summed"]),
            )
        )  # fmt: skip
    return made


def markov_chains() -> list[dict[str, Any]]:
    """Measure the share of optima that Markov chains find, by length and budget."""
    machine = mk.hardware("2x8-h100-ndr")
    rows = []
    for length in LENGTHS:
        exact, found = 0.0, dict.fromkeys(BUDGETS, 0)
        taken, cases = dict.fromkeys(BUDGETS, 0.0), CHAINS // len(LENGTHS)
        for seed in range(cases):
            priced = ChainPrices(chain_of(seed, length), machine, 64)
            costs = priced.costs
            begun = time.perf_counter()
            best = fastest(costs)
            exact += time.perf_counter() - begun
            assert best is not None
            result = LayerStrategies(priced, best, inf)
            for budget in BUDGETS:
                begun = time.perf_counter()
                walk = result.by_mcmc(budget, seed)
                taken[budget] += time.perf_counter() - begun
                found[budget] += walk.time <= best.time * (1 + 1e-9)
        for budget in BUDGETS:
            rows.append(
                {
                    "name": f"layers: optima of {cases} chains of {length} layers found by MCMC, {budget:,} proposals",
                    "value": 100 * found[budget] / cases,
                    "unit": "%",
                    "ratio": taken[budget] / exact,
                    "against": f"the exact search: {exact / cases * 1e3:.2f} ms a chain",
                }
            )
    return rows


def exact_searches() -> list[dict[str, Any]]:
    """Measure the exact search beside brute force, and where that is out of the question."""
    machine, rows = mk.hardware("4x-a100-nvlink"), []
    trying = searching = 0.0
    choices = 0
    for seed in range(20):
        costs = ChainPrices(chain_of(seed, 4), machine, 16).costs
        begun = time.perf_counter()
        best = brute_force(costs)
        middle = time.perf_counter()
        found = fastest(costs)
        trying, searching = trying + middle - begun, searching + time.perf_counter() - middle
        assert best is not None and found is not None and abs(found.time / best.time - 1) < 1e-12
        choices += prod(len(each) for each in costs.time)
    rows.append(
        {
            "name": f"layers: exact search of 4 layers on 4 devices, {choices / 20:,.0f} choices",
            "value": searching / 20,
            "unit": "s",
            "ratio": searching / trying,
            "against": f"brute force: {trying / 20:.3f} s",
        }
    )
    h, s, vocabulary = 16384, 8192, 128256
    block = Layer(
        "block", s * h, s * h, s * (24 * h * h + 4 * s * h), 12 * h * h, attribute=s, parameter=128,
        channels="summed", sums=2, exchanged=2 * s * h,
    )  # fmt: skip
    ends = [
        Layer("embedding", s, s * h, 0, vocabulary * h, attribute=s, parameter=h),
        Layer("head", s * h, s * vocabulary, 2 * s * h * vocabulary, vocabulary * h, attribute=s, parameter=vocabulary),
    ]  # fmt: skip
    layers = [ends[0], *(replace(block, name=f"block{i}") for i in range(126)), ends[1]]
    for title, share in (("", None), (", 40 % of the memory", 0.4)):
        begun = time.perf_counter()
        priced = ChainPrices(layers, mk.hardware("128x8-h100-ndr"), 2048, "bfloat16")
        free = fastest(priced.costs)
        assert free is not None and least_memory(priced.costs).memory < 0.4 * free.memory
        if share is not None:
            begun = time.perf_counter()
            fastest(priced.costs, share * free.memory)
        value = time.perf_counter() - begun
        rows.append({"name": f"layers: 126 layers on 1,024 devices{title}", "value": value, "unit": "s"})
    return rows


def measure() -> list[dict[str, Any]]:
    """Measure both."""
    return [*markov_chains(), *exact_searches()]
