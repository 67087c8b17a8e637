"""What every test shares."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from torch import nn

import mpkit as mk
from mpkit.api.run import Run

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


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> Iterator[None]:
    """An interrupt is a KeyboardInterrupt, also in a shell's background, where Python starts with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


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


@pytest.fixture(scope="session")
def train(clusters: Callable[[int], mk.Cluster]) -> Callable[..., Run]:
    """`train(model, data, plan, ...)` on as many ranks as the plan takes, waited for."""

    def run(model: nn.Module, data: Any, plan: mk.Plan, **how: Any) -> Run:
        return clusters(plan.ranks).train(model, data, plan, **how).wait()

    return run


def _is_gone(pid: int) -> bool:
    """Whether no process of that number runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.fixture(scope="session")
def wait_until_gone() -> Callable[[list[int], float], None]:
    """wait_until_gone(pids, seconds): fails if one of the processes is still there after so many seconds."""

    def wait(pids: list[int], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not all(map(_is_gone, pids)):
            os.sched_yield()  # to those that we wait for
            assert time.monotonic() < deadline, f"still there after {seconds} s: {pids}"

    return wait
