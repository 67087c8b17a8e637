"""One room for all tests. nbgrader is no dependency: its tests are there where it is installed."""

from importlib.util import find_spec

import pytest

from mpkit.course.framework.room import Room, shared_room
from mpkit.course.sandbox.allowance import Limits
from tests import limits

collect_ignore = ["test_nbgrader.py"] if find_spec("nbgrader") is None else []


@pytest.fixture(scope="session", autouse=True)
def room() -> Room:
    """The room of `mk.check`, in which no case depends on how fast the machine is."""
    room = shared_room()
    room.limits = Limits(seconds=limits.EVENT)
    return room
