"""What every test shares."""

from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, settings

import mpkit as mk

# The same examples every time: what fails here fails there. No deadline: on two busy cores
# an example's time says nothing.
settings.register_profile(
    "mpkit",
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
# Other examples, more of them, for a search: pytest --hypothesis-profile=search
settings.register_profile("search", deadline=None, max_examples=2000)
settings.load_profile("mpkit")


@pytest.fixture(scope="session")
def clusters() -> Iterator[Callable[[int], mk.Cluster]]:
    """Clusters of CPU processes by number of ranks, each started once and shared by all tests."""
    made: dict[int, mk.Cluster] = {}

    def of(ranks: int) -> mk.Cluster:
        if ranks not in made:
            made[ranks] = mk.Cluster(ranks, device="cpu")
        return made[ranks]

    yield of
    for cluster in made.values():
        cluster.close()


@pytest.fixture(scope="session")
def cluster(clusters: Callable[[int], mk.Cluster]) -> mk.Cluster:
    """Four CPU processes."""
    return clusters(4)
