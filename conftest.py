"""What holds for every test: which are soak by name, how long one may take, the doctests' fork server."""

import sys
from collections.abc import Iterator

import pytest
import torch
from pytest import MonkeyPatch

from mpkit.launch.process.fork_server import ForkServerClient
from tests import limits

sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]
"""Else jsonschema, which nbformat imports, builds a grammar of addresses for two seconds in each process of pytest."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark whole notebooks as soak, and scale pytest's own limit."""
    for item in items:
        if item.path.suffix == ".ipynb":
            item.add_marker(pytest.mark.soak)
        if limits.SCALE != 1:
            mark = item.get_closest_marker("timeout")
            seconds = mark.args[0] if mark else float(config.getini("timeout"))
            item.add_marker(pytest.mark.timeout(seconds * limits.SCALE), append=False)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Compute on one thread: torch's threads spin while they wait for each other, and the cores are shared.

    Beside three busy processes on two cores, 90 steps of three small models take 39 s on two threads and 3 s on one.
    """
    torch.set_num_threads(1)


class SharedForkServer(ForkServerClient):
    """A fork server that outlives the clusters that use it."""

    def close(self) -> None:
        """Leave it running; it ends with the session."""


@pytest.fixture(scope="session")
def shared_fork_server() -> Iterator[SharedForkServer]:
    """Return the fork server of all doctests of the session."""
    server = SharedForkServer()
    yield server
    ForkServerClient.close(server)


@pytest.fixture(autouse=True)
def one_fork_server_for_doctests(request: pytest.FixtureRequest, monkeypatch: MonkeyPatch) -> None:
    """Docstrings that make a cluster use one fork server, which saves the import of torch in each."""
    if isinstance(request.node, pytest.DoctestItem):
        server = request.getfixturevalue("shared_fork_server")
        monkeypatch.setattr("mpkit.launch.session.cluster.ForkServerClient", lambda fork: server)
