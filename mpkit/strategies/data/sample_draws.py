"""The random numbers of a dataset that changes its samples (crops, flips, noise), the same whoever reads a sample.

Each sample draws from a seed of its own: the seed of the batches, the step, and the sample's index. So a step's batch
is the same on any number of ranks and workers, on the first and the last stage of a pipeline, and in the notebook; no
two samples of a batch draw the same; and each epoch draws anew. That holds for the generators of torch, NumPy and
Python, and for those that the dataset or one of its transforms keeps.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mpkit.strategies.models.randomness import OtherState, seed_of

__all__ = ["SampleDraws"]

KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
LEAVES = (str, bytes, int, float, type, Tensor, nn.Parameter, np.ndarray, *KINDS)
MOST = 10_000
"""Objects that are looked into for generators; a list of more samples than that holds none."""


class SampleDraws:
    """The random numbers of a dataset's samples.

    Args:
        dataset: the dataset.
        seed: the seed of its batches.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self._seed, self._own = seed, list(_generators(dataset))

    def begin(self, step: int, index: int) -> None:
        """Seed all generators for a sample that is read for a step."""
        seed = seed_of(self._seed, step, 0, index, layer="sample")
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        for generator in self._own:
            if isinstance(generator, np.random.Generator):
                generator.bit_generator.state = type(generator.bit_generator)(seed).state
            elif isinstance(generator, np.random.RandomState):
                generator.seed(seed % 2**32)
            elif isinstance(generator, torch.Generator):
                generator.manual_seed(seed)
            else:
                generator.seed(seed)

    @contextmanager
    def preserve_states(self) -> Iterator[None]:
        """Restore the random states of torch, NumPy and Python afterwards."""
        state, others = torch.default_generator.get_state(), OtherState.now()
        try:
            yield
        finally:
            torch.default_generator.set_state(state)
            others.restore()


def _generators(root: Any) -> Iterator[Any]:
    """Yield the generators that an object holds, at any depth."""
    seen: set[int] = set()
    to_do = [root]
    while to_do and len(seen) < MOST:
        value = to_do.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, KINDS):
            yield value
        to_do += [
            inner for inner in _parts(value) if isinstance(inner, KINDS) or not isinstance(inner, LEAVES)
        ]


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, (list, tuple)):
        return value[:MOST]
    if callable(value) and hasattr(value, "__closure__"):
        return [cell.cell_contents for cell in value.__closure__ or ()]
    return getattr(value, "__dict__", {}).values()
