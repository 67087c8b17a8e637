"""The loop of the process that ranks are forked from, with its events in an order that is rare."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.limits import EVENT

DEATHS_FIRST = """
import os, selectors
from mpkit.launch.process.fork_server import ForkServer

class DeathsFirst(selectors.DefaultSelector):
    '''Once ranks are there, waits until their deaths and the end of their pipe are both known: deaths first.'''
    def select(self, timeout=None):
        ready = super().select(timeout)
        while len(self.get_map()) > 2 and {key.data for key, _ in ready} < {"child", "done"}:
            ready = super().select(timeout)
        return sorted(ready, key=lambda pair: pair[0].data != "child")

class Short(ForkServer):
    '''Its ranks leave at once.'''
    def start(self, *args):
        return os.fork() or os._exit(0)

server = Short(1)
server.selector = DeathsFirst()
server.serve(0)
"""


def test_a_launch_that_ends_within_one_round_of_events() -> None:
    fork_server = subprocess.Popen(
        [sys.executable, "-c", DEATHS_FIRST], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert fork_server.stdin is not None and fork_server.stdout is not None
    for _ in range(2):
        fork_server.stdin.write(json.dumps({"do": "launch", "folder": "", "ranks": 2, "modules": []}) + "\n")
        fork_server.stdin.flush()
        seen: list[str] = []
        while "over" not in seen:
            line = fork_server.stdout.readline()
            assert line, f"the fork server ended after {seen}"
            seen.append(json.loads(line)["event"])
        assert seen.count("exit") == 2
    fork_server.communicate(timeout=EVENT)
    assert fork_server.returncode == 0
