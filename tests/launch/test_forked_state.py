"""What each forked rank draws is its own, and what the caller has set for logging holds on ranks too."""

from __future__ import annotations

import random
import tempfile
import uuid
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

import mpkit as mk


def draws(_: Any = None) -> dict[str, str]:
    """Draw in every way that programs draw without having set a seed."""
    drawn = {
        "torch.rand": torch.rand(2),
        "torch.randperm": torch.randperm(30),
        "torch.initial_seed": torch.initial_seed(),
        "Gamma": torch.distributions.Gamma(1.0, 1.0).sample(),
        "nn.Linear": nn.Linear(2, 2).weight.tolist(),
        "nn.Dropout": nn.Dropout()(torch.ones(60)),
        "DataLoader": [int(each) for each in DataLoader(range(30), shuffle=True)],  # type: ignore[arg-type]
        "np.random.rand": np.random.rand(2),
        "np.random.default_rng": np.random.default_rng().random(),
        "random.random": random.random(),
        "uuid": uuid.uuid4(),
        "tempfile": next(tempfile._get_candidate_names()),  # type: ignore[attr-defined]
    }
    return {name: repr(value) for name, value in drawn.items()}


def assert_all_differ(drawn: list[dict[str, str]]) -> None:
    for name in drawn[0]:
        assert len({each[name] for each in drawn}) == len(drawn), f"{name}: {[each[name] for each in drawn]}"


def test_ranks_draw_other_numbers_than_each_other_and_than_in_the_call_before(cluster: mk.Cluster) -> None:
    assert_all_differ([draw for _ in range(2) for draw in cluster.run(draws)])
