"""FlexFlow's own search: a Markov chain that visits strategies, the faster the more often (Metropolis and Hastings).

    propose     another split for one layer, both drawn at random
    accept      always if it is faster; else with probability exp(-beta x (time - time before))
    budget      the number of proposals; the best strategy that was visited is the result

FlexFlow needs it since its graphs are no chains and its simulator overlaps tasks. For a chain whose time is a sum,
dynamic programming (`examples.flexflow.chain_search`) is exact and faster: `python -m benchmarks layers`
compares them.

Source: Jia, Zaharia, Aiken 2019, section 6.2. The paper starts at data parallelism or at random; it names no value of
beta. Here a proposal that adds 1/300 of the start's time is accepted with probability 1/e: of 10 to 3,000 what finds
most optima of random chains with 6 layers.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf

from examples.flexflow.chain_search import Choice, price_choice
from examples.flexflow.price import ChainCosts
from mpkit.common.units import percent, seconds

__all__ = ["MarkovWalk", "metropolis"]


@dataclass(frozen=True)
class MarkovWalk:
    """A Markov chain and the best strategy that it visited.

    Attributes:
        best: the fastest choice that was visited.
        budget: the number of proposals.
        accepted: how many of them were accepted.
        improved: the proposals after which the best one became better, with its time.
    """

    best: Choice
    budget: int
    accepted: int
    improved: Sequence[tuple[int, float]]

    @property
    def time(self) -> float:
        """The seconds per step of the best strategy."""
        return self.best.time

    def __str__(self) -> str:
        last, _ = self.improved[-1]
        return (
            f"{seconds(self.time)} per step, found after {last:,} of {self.budget:,} proposals, of which "
            f"{percent(self.accepted / max(1, self.budget))} were accepted"
        )


def metropolis(
    costs: ChainCosts,
    start: Sequence[int],
    budget: int,
    seed: int = 0,
    limit: float = inf,
    beta: float | None = None,
) -> MarkovWalk:
    """Return what a Markov chain of `budget` proposals finds.

    >>> import numpy as np
    >>> costs = ChainCosts([np.array([3.0, 1.0])] * 2, [np.array([1.0, 4.0])] * 2, [np.zeros((2, 2))])
    >>> metropolis(costs, start=(0, 0), budget=20).best.splits
    (1, 1)

    Args:
        costs: the chain in numbers.
        start: a split for each layer, by its place.
        budget: proposals.
        seed: of the random numbers.
        limit: bytes per device; proposals that exceed it are rejected.
        beta: per second: how soon slower proposals are rejected; None: 300 / the time of the start.
    """
    rng = random.Random(seed)
    now = list(start)
    best = price_choice(costs, tuple(now))
    time, memory, accepted = best.time, best.memory, 0
    improved = [(0, time)]
    sharpness = 300 / max(time, 1e-300) if beta is None else beta
    for step in range(1, budget + 1):
        # ---- propose
        i = rng.randrange(len(now))
        split = rng.randrange(len(costs.time[i]))
        slower = _local_time(costs, now, i, split) - _local_time(costs, now, i, now[i])
        larger = float(costs.memory[i][split] - costs.memory[i][now[i]])
        # ---- accept
        if memory + larger > limit or (slower > 0 and rng.random() >= exp(-sharpness * slower)):
            continue
        accepted += 1
        now[i], time, memory = split, time + slower, memory + larger
        if time < best.time * (1 - 1e-12):
            visited = price_choice(costs, tuple(now))
            if visited.memory <= limit:
                best = visited
                improved.append((step, best.time))
    return MarkovWalk(best, budget, accepted, improved)


def _local_time(costs: ChainCosts, splits: Sequence[int], i: int, split: int) -> float:
    """Return the seconds that depend on layer i: its own, and those between it and its neighbours."""
    taken = float(costs.time[i][split])
    if i:
        taken += float(costs.between[i - 1][splits[i - 1], split])
    if i + 1 < len(splits):
        taken += float(costs.between[i][split, splits[i + 1]])
    return taken
