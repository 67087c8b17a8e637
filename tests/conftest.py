"""What every test shares."""

import signal
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import pytest
from hypothesis import HealthCheck, Phase, settings
from torch import nn

import mpkit as mk
import tests
from mpkit.launch.session.run import Run

cloudpickle.register_pickle_by_value(tests)  # ranks import neither a test's module nor pytest

# The same examples every time: what fails here fails there. No deadline: on two busy cores an example's time says
# nothing. No shrinking: by launches it takes longer than a test may, and then the example is never shown.
settings.register_profile(
    "mpkit", derandomize=True, deadline=None, phases=[Phase.explicit, Phase.generate], print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
# Other examples, more of them, for a search: pytest --hypothesis-profile=search
settings.register_profile("search", deadline=None, max_examples=2000)
settings.load_profile("mpkit")


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> Iterator[None]:
    """An interrupt is a KeyboardInterrupt, also in a shell's background, where Python starts with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def clusters(all_clusters: dict[int, mk.Cluster]) -> Callable[[int], mk.Cluster]:
    """Clusters of CPU processes by number of ranks. All tests share them, and they share one fork server."""

    def of(ranks: int) -> mk.Cluster:
        if ranks not in all_clusters:
            first = next(iter(all_clusters.values()), None)
            all_clusters[ranks] = first.resized(ranks) if first else mk.Cluster(ranks, device="cpu")
            if first is None:  # each rank of a test that refers to these would import them
                all_clusters[ranks].launch(bool, (), modules=("pytest", "torch.distributed.optim")).work()
        return all_clusters[ranks]

    return of


@pytest.fixture(scope="session")
def all_clusters() -> Iterator[dict[int, mk.Cluster]]:
    """The shared clusters made so far, by number of ranks."""
    made: dict[int, mk.Cluster] = {}
    yield made
    for cluster in made.values():
        cluster.close()


@pytest.fixture(autouse=True)
def nothing_left_running(all_clusters: dict[int, mk.Cluster]) -> Iterator[None]:
    """A training that a test has left running on a shared cluster ends with that test."""
    yield
    for cluster in all_clusters.values():
        training = cluster._helper.training
        if training is not None and not training.done:
            training.stop()


@pytest.fixture(scope="session")
def cluster(clusters: Callable[[int], mk.Cluster]) -> mk.Cluster:
    """Four CPU processes."""
    return clusters(4)


@pytest.fixture(scope="session")
def train(clusters: Callable[[int], mk.Cluster]) -> Callable[..., Run]:
    """`train(model, data, plan, ...)` on as many ranks as the plan takes, waited for; the run proves its first step."""

    def run(model: nn.Module, data: Any, plan: mk.Plan, **how: Any) -> Run:
        return clusters(plan.ranks).train(model, data, plan, **{"verify": 1, **how}).wait()

    return run
