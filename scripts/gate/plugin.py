"""A pytest plugin (`-p scripts.gate.plugin`): choose and order tests, and record each one as it ends.

The record is a file of JSON lines, written at once, so that it is whole however the run ends. Under xdist the process
that distributes the tests writes it. A process that gets SIGUSR1 writes the stacks of all its threads beside it.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.limits import SCALE

LONG = 300.0 * SCALE
"""Seconds: a test that is allowed more than this is not begun in a run with `--until`."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the plugin's options, which xdist hands on to its workers."""
    group = parser.getgroup("gate")
    group.addoption("--record", help="the file of JSON lines")
    group.addoption("--part", help="K/N: the K-th of N parts, drawn by the tests' names")
    group.addoption("--draw", help="run the tests in an order drawn from this word")
    group.addoption("--until", type=float, help="begin no test after this time (seconds since the epoch)")


def pytest_configure(config: pytest.Config) -> None:
    """Open the record, and the file of stacks."""
    if path := config.getoption("--record"):
        stacks = os.open(f"{path}.{os.getpid()}.stacks", os.O_CREAT | os.O_WRONLY)
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        if not hasattr(config, "workerinput"):
            config.pluginmanager.register(_Record(Path(path)), "mpkit-record")


def draw(seed: str, nodeid: str) -> int:
    """Return a number for a test that only its name and the seed decide."""
    return int.from_bytes(hashlib.sha1(f"{seed} {nodeid}".encode()).digest()[:8], "big")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep one part of the tests, and put them in the order drawn."""
    if part := config.getoption("--part"):
        number, parts = map(int, part.split("/"))
        kept = [item for item in items if draw("part", item.nodeid) % parts == number - 1]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept
    if seed := config.getoption("--draw"):
        items.sort(key=lambda item: draw(seed, item.nodeid))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Leave out a test once the time is over, and one that may take longer than the whole slice."""
    until = item.config.getoption("--until")
    if until is None:
        return None
    mark = item.get_closest_marker("timeout")
    return True if time.time() > until or (mark and mark.args[0] > LONG) else None


class _Record:
    """Writes what begins, what ends and how, and warnings that belong to no test."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("a", encoding="utf-8")

    def write(self, **event: Any) -> None:
        self.file.write(json.dumps({"time": time.time(), **event}) + "\n")
        self.file.flush()

    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self.write(event="start", id=nodeid, file=location[0], line=(location[1] or 0) + 1)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.write(event="report", id=report.nodeid, when=report.when, outcome=report.outcome,
                   seconds=report.duration, error=_error(report))  # fmt: skip

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.write(event="finish", id=nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.write(event="report", id=report.nodeid, when="collect", outcome="failed", seconds=0.0,
                       error=_error(report))  # fmt: skip

    def pytest_warning_recorded(self, warning_message: Any, nodeid: str) -> None:
        if issubclass(warning_message.category, pytest.PytestUnraisableExceptionWarning):
            self.write(event="warning", id=nodeid, error=str(warning_message.message).splitlines()[:1])


def _error(report: pytest.TestReport | pytest.CollectReport) -> list[str]:
    """Return the error's first line, and the last lines that say how a process or an exception ended."""
    if not report.failed:
        return []
    crash = getattr(report.longrepr, "reprcrash", None)
    text = [line.strip() for line in report.longreprtext.splitlines() if line.strip()]
    told = [line for line in text if line.startswith("E ")] or text[-1:]
    first = crash.message.splitlines()[0] if crash is not None and crash.message else told[0] if told else "?"
    words = ("Error", "terminate", "exit", "signal", "Timeout")
    last = [line for line in text[-60:] if any(word in line for word in words) and first not in line][-2:]
    return [first, *last]
