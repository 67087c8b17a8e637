"""Planted runs are played on the tests' shared cluster."""

import pytest

from tests.diagnosis import planted
from tests.serial import Clusters


@pytest.fixture(scope="session", autouse=True)
def _shared(clusters: Clusters) -> None:
    planted.CLUSTERS.append(clusters(1))
