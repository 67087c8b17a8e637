"""Planted runs are played on the tests' shared cluster."""

from collections.abc import Callable

import pytest

import mpkit as mk
from tests.diagnosis import planted


@pytest.fixture(scope="session", autouse=True)
def _shared(clusters: Callable[[int], mk.Cluster]) -> None:
    planted.CLUSTERS.append(clusters(1))
