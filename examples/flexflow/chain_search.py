"""The fastest choice for each layer of a chain: dynamic programming, exact with a memory limit too.

Without a limit the state is (layer, split), and one pass from the end finds the least time to go from each:

    to_go[i][x] = time[i][x] + min over y of (between[i][x, y] + to_go[i + 1][y])

With a limit that the fastest choice exceeds, a state has several labels (time, memory) instead of one number, of which
none is both slower and larger than another: a Pareto frontier. Labels go through the chain layer by layer:

    extend      by each split of the next layer
    bound       drop a label that cannot become better than a choice that is known, or that cannot fit: time + λ memory
                has a least value to go, for any λ, by the same pass as above (a Lagrangian bound)
    dominate    drop a label that is slower and larger than another one with the same split

Identical layers share their prices (`examples.flexflow.price.ChainPrices`), so that a run of k of them is k
products of one matrix with a vector in the (min, +) algebra: for fewer layers than splits that is less than its k-th
power.

Sources: Bellman 1957; Jia, Lin, Qi, Aiken, ICML 2018, section 5 (the chain, without a limit); Handler and Zang, "A Dual
Algorithm for the Constrained Shortest Path Problem", 1980 (the bound).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import inf

import numpy as np

from examples.flexflow.price import Array, ChainCosts

BEAM = 300
"""Labels per layer of the search for a choice that is nearly the best."""

ROUNDING = 1e-12
"""Sums in another order differ by less; a bound has to be worse by more."""


@dataclass(frozen=True)
class Choice:
    """A split for each layer, by its place among the layer's splits.

    Attributes:
        splits: the places.
        time: seconds per step.
        memory: bytes per device.
    """

    splits: tuple[int, ...]
    time: float
    memory: float


def price_choice(costs: ChainCosts, splits: tuple[int, ...]) -> Choice:
    """Return a choice with its time and memory."""
    return Choice(splits, *costs.costs_of(splits))


def weigh_chain(costs: ChainCosts, price: float, seconds: float = 1.0) -> list[Array]:
    """Return the least `seconds` x time + `price` x memory to go from each split of each layer, that layer included."""
    to_go = [seconds * costs.time[-1] + price * costs.memory[-1]]
    for i in range(len(costs.time) - 2, -1, -1):
        ahead = (seconds * costs.between[i] + to_go[0]).min(axis=1)
        to_go.insert(0, seconds * costs.time[i] + price * costs.memory[i] + ahead)
    return to_go


def walk_back(costs: ChainCosts, to_go: list[Array], seconds: float = 1.0) -> Choice:
    """Return the choice that `weigh_chain` has found: the best split, then the best one after it, and so on."""
    splits = [int(to_go[0].argmin())]
    for i, between in enumerate(costs.between):
        splits.append(int((seconds * between[splits[-1]] + to_go[i + 1]).argmin()))
    return price_choice(costs, tuple(splits))


def least_memory(costs: ChainCosts) -> Choice:
    """Return the choice with the least memory; layers do not depend on each other in that."""
    return price_choice(costs, tuple(int(memory.argmin()) for memory in costs.memory))


def brute_force(costs: ChainCosts, limit: float = inf) -> Choice | None:
    """Return the fastest choice within a memory limit by trying all; None if there is none.

    >>> costs = ChainCosts([np.array([3.0, 1.0])] * 2, [np.array([1.0, 4.0])] * 2, [np.zeros((2, 2))])
    >>> brute_force(costs).splits, brute_force(costs, limit=5.0).time, brute_force(costs, limit=1.0)
    ((1, 1), 4.0, None)
    """
    every = (price_choice(costs, splits) for splits in product(*(range(len(time)) for time in costs.time)))
    return min((each for each in every if each.memory <= limit), key=lambda each: each.time, default=None)


def fastest(costs: ChainCosts, limit: float = inf) -> Choice | None:
    """Return the fastest choice within a memory limit; None if there is none.

    >>> costs = ChainCosts([np.array([3.0, 1.0])] * 2, [np.array([1.0, 4.0])] * 2, [np.zeros((2, 2))])
    >>> fastest(costs).splits, fastest(costs, limit=5.0).time, fastest(costs, limit=1.0)
    ((1, 1), 4.0, None)

    Args:
        costs: the chain in numbers.
        limit: bytes per device.
    """
    # ---- without the limit
    free = walk_back(costs, weigh_chain(costs, 0.0))
    if free.memory <= limit:
        return free
    smallest = least_memory(costs)
    if smallest.memory > limit:
        return None
    # ---- a choice that fits, and the price of memory that gives the best bound
    known, price = _priced_memory(costs, limit, free, smallest)
    # ---- labels: the most promising ones for a choice that is nearly the best, then all that could be better
    known = _by_labels(costs, limit, known, price, most=BEAM)
    return _by_labels(costs, limit, known, price)


def _priced_memory(costs: ChainCosts, limit: float, free: Choice, smallest: Choice) -> tuple[Choice, float]:
    """Return the fastest choice that fits among those that are best for some price of memory, and that price.

    Each step takes the price at which the last choice that is too large and the last one that fits cost the same. It
    ends where no choice is better at that price: its bound is the highest there is.
    """
    known = small = smallest
    large = free
    while True:
        price = (small.time - large.time) / (large.memory - small.memory)
        if price <= 0:
            return known, 0.0
        best = walk_back(costs, weigh_chain(costs, price))
        value = best.time + price * best.memory
        if value >= (small.time + price * small.memory) * (1 - ROUNDING):
            return known, price
        if best.memory > limit:
            large = best
        else:
            small = best
            known = min(known, best, key=lambda each: each.time)


@dataclass(frozen=True)
class _Labels:
    """Labels of one layer, in arrays: the split, time and memory so far, and the label of the layer before."""

    split: np.ndarray
    time: Array
    memory: Array
    before: np.ndarray


def _by_labels(
    costs: ChainCosts, limit: float, known: Choice, price: float, most: int | None = None
) -> Choice:
    """Return the fastest choice that fits, which is `known` or better.

    With `most`, that many labels of a layer are kept, those of the lowest bounds, and the choice may not be the best.
    """
    bounds = [(0.0, weigh_chain(costs, 0.0)), (price, weigh_chain(costs, price))]
    least = weigh_chain(costs, 1.0, seconds=0.0)
    all_labels: list[_Labels] = []
    for i, (time, memory) in enumerate(zip(costs.time, costs.memory, strict=True)):
        # ---- extend
        n = len(time)
        if not all_labels:
            labels = _Labels(np.arange(n), time.copy(), memory.copy(), np.full(n, -1))
        else:
            last = all_labels[-1]
            seconds = last.time[:, None] + costs.between[i - 1][last.split] + time
            nbytes = last.memory[:, None] + memory
            grid = np.indices(seconds.shape).reshape(2, -1)
            labels = _Labels(grid[1], seconds.ravel(), nbytes.ravel(), grid[0])
        # ---- bound
        fits = labels.memory - memory[labels.split] + least[i][labels.split] <= limit * (1 + ROUNDING)
        lowest = np.full(len(labels.split), -inf)
        for value, to_go in bounds:
            ahead = to_go[i] - time - value * memory
            lowest = np.maximum(lowest, labels.time + value * (labels.memory - limit) + ahead[labels.split])
        kept = np.flatnonzero(fits & (lowest <= known.time * (1 + ROUNDING)))
        if most is not None:
            kept = kept[np.argsort(lowest[kept], kind="stable")[:most]]
        # ---- dominate
        all_labels.append(_frontier(labels, kept))
        if not len(kept):
            return known
    last = all_labels[-1]
    fitting = np.flatnonzero(last.memory <= limit)
    if not len(fitting) or last.time[fitting].min() >= known.time:
        return known
    place = int(fitting[last.time[fitting].argmin()])
    splits: list[int] = []
    for labels in reversed(all_labels):
        splits.insert(0, int(labels.split[place]))
        place = int(labels.before[place])
    return price_choice(costs, tuple(splits))


def _frontier(labels: _Labels, kept: np.ndarray) -> _Labels:
    """Return those of the kept labels than which none with the same split is both faster and smaller."""
    order = kept[np.lexsort((labels.memory[kept], labels.time[kept], labels.split[kept]))]
    best: list[int] = []
    for place in order:
        same = bool(best) and labels.split[best[-1]] == labels.split[place]
        if same and labels.memory[place] >= labels.memory[best[-1]]:
            continue
        best.append(int(place))
    return _Labels(labels.split[best], labels.time[best], labels.memory[best], labels.before[best])
