"""One room for all tests. nbgrader and Otter are no dependencies: their tests are there where they are installed."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from mpkit.course.framework.local_trial import shared_room
from mpkit.course.framework.room import Room
from mpkit.course.sandbox.allowance import Limits
from tests import limits

OPTIONAL = {"nbgrader": "test_nbgrader.py", "otter": "test_otter.py"}
collect_ignore = [file for package, file in OPTIONAL.items() if find_spec(package) is None]


@pytest.fixture(scope="session", autouse=True)
def room() -> Room:
    """The room of `mk.check`, in which no case depends on how fast the machine is."""
    room = shared_room()
    room.limits = Limits(seconds=limits.EVENT)
    return room
