"""What each forked rank draws is its own, and what the caller has set for logging holds on ranks too."""

from __future__ import annotations

import io
import logging
import random
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
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


def test_dropout_in_an_own_loop_masks_other_samples_on_each_rank(cluster: mk.Cluster) -> None:
    def loop(ctx: Any) -> list[Any]:
        model = mk.ddp(nn.Sequential(nn.Linear(4, 60), nn.Dropout(0.5)))
        mask = (model(torch.ones(2, 4)) != 0).int()
        return [mask.tolist(), model.module[0].weight.tolist()]  # type: ignore[union-attr, index]

    masks, weights = zip(*cluster.run(loop), strict=True)
    assert all(one != masks[0] for one in masks[1:])
    assert all(one == weights[0] for one in weights), "replicas begin with rank 0's weights"


# ---- logging ---------------------------------------------------------------------------------------------------


@contextmanager
def fresh_logging() -> Iterator[None]:
    """Root's handlers and level as a fresh interpreter has them, restored afterwards; pytest has put its own there."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    root.handlers[:] = []
    root.setLevel(logging.WARNING)
    try:
        yield
    finally:
        root.handlers[:] = before
        root.setLevel(level)


def printed(capsys: pytest.CaptureFixture[str], cluster: mk.Cluster, fn: Callable[..., Any]) -> list[str]:
    capsys.readouterr()
    cluster.run(fn)
    return sorted(capsys.readouterr().out.splitlines())


def test_what_ranks_log_appears_as_the_caller_has_set_it(
    cluster: mk.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = cluster.resized(2)

    def log(ctx: Any) -> None:
        logging.info("step 1")
        logging.getLogger("train").debug("too much")

    with fresh_logging():
        assert printed(capsys, cluster, log) == []
        logging.basicConfig(level=logging.INFO, format="%(levelname)s | %(message)s", stream=io.StringIO())
        assert printed(capsys, cluster, log) == ["[rank 0] INFO | step 1", "[rank 1] INFO | step 1"]


def test_a_logger_of_the_callers_own_logs_once_on_each_rank(
    cluster: mk.Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = cluster.resized(2)
    logger = logging.getLogger("own-logger")
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    handler = logging.StreamHandler(io.StringIO())
    handler.setFormatter(logging.Formatter("own: %(message)s"))
    logger.addHandler(handler)
    try:
        lines = printed(capsys, cluster, lambda ctx: logger.debug("seen"))
        assert lines == ["[rank 0] own: seen", "[rank 1] own: seen"]
        logging.disable(logging.CRITICAL)
        assert printed(capsys, cluster, lambda ctx: logger.debug("seen")) == []
    finally:
        logging.disable(logging.NOTSET)
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
