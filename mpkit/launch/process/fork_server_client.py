"""The parent's handle on the fork server: starts it, sends commands, reads events, and notices when it is gone."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

from mpkit.errors import MpkitError
from mpkit.launch.process.boot import helper_command
from mpkit.launch.process.rank_processes import is_stopped

__all__ = ["ForkServerClient"]

START_TIMEOUT = 120.0
"""Seconds that importing torch may take, on a cold and busy disk."""

IDLE, IDLE_MARGIN = 300.0, 30.0
"""Seconds without a launch after which a fork server counts as ended, and how much later it exits by itself."""

STOPPED_FOR = 2.0
"""Seconds that the fork server may be stopped before it is given up."""

STOPPED = (
    "the process that ranks are started from (pid {pid}) was stopped (SIGSTOP: a debugger, a paused "
    "container); it and its ranks have been ended, and the next run starts a new one"
)
"""The error of a run whose fork server is stopped."""


class ForkServerClient:
    """A fork server process. Starting it does not block: it imports torch while the parent continues.

    Args:
        fork: whether ranks may be forked; False starts a fresh interpreter per rank, which is slower but equivalent.
        within: the beginning of a command that runs the fork server enclosed, with its memory closed to its ranks.
    """

    def __init__(self, fork: bool = True, within: Sequence[str] = ()) -> None:
        # Without PYTHONPATH: it receives its sys.path separately.
        self._environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        start = helper_command(
            "mpkit.launch.process.fork_server:main", fork=fork, closed=bool(within), idle=IDLE + IDLE_MARGIN
        )
        # A session of its own shields it from the terminal's Ctrl-C, which goes to whole process groups.
        self._process = subprocess.Popen(
            [*within, *start], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=self._environment,
            stderr=subprocess.DEVNULL if sys.stderr is None else None, start_new_session=True,
        )  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None
        self._commands, self._events = self._process.stdin, self._process.stdout
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._events, selectors.EVENT_READ)
        self._pending = b""
        self._lock = threading.Lock()  # held while a command is written
        self._reading = threading.RLock()  # held while events are read
        self._used = time.monotonic()
        self._busy = False
        self.own_pid = 0  # the fork server's process id as itself sees it, once it is ready
        self._closer = weakref.finalize(self, _end, self._process, self._selector, self._reading)

    @property
    def alive(self) -> bool:
        """Whether the fork server can still be used."""
        ends_soon = not self._busy and time.monotonic() - self._used > IDLE
        return self._closer.alive and not ends_soon and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The process id of the fork server, or of what encloses it."""
        return self._process.pid

    def environment_since(self) -> dict[str, str | None]:
        """Return the variables of os.environ that differ from the fork server's, with None for removed ones."""
        gone: dict[str, str | None] = dict.fromkeys(self._environment.keys() - os.environ.keys())
        return gone | {k: v for k, v in os.environ.items() if self._environment.get(k) != v}

    def wait_ready(self) -> None:
        """Wait until the fork server has imported torch, and count it as used.

        Raises:
            MpkitError: it died before that, or took longer than two minutes.
        """
        deadline, stopped = time.monotonic() + START_TIMEOUT, 0
        while not self.own_pid:
            self.events(0.5)
            if self.own_pid:
                break
            stopped = stopped + 1 if is_stopped(self.pid) else 0
            if stopped > STOPPED_FOR / 0.5:
                self.kill()
                raise MpkitError(STOPPED.format(pid=self.pid))
            if not self._closer.alive or self._process.poll() is not None or time.monotonic() > deadline:
                code = self._process.poll()
                self.close()
                raise MpkitError(
                    "the process that ranks are started from "
                    + ("took over two minutes to import torch" if code is None else f"ended with code {code}")
                    + f"; does `{sys.executable} -P -m mpkit.launch.process.fork_server </dev/null` work in a terminal?"
                )
        self._busy = True

    def tell(self, **command: Any) -> None:
        """Send a command; it is lost if the fork server is gone."""
        with self._lock, contextlib.suppress(BrokenPipeError, ValueError):  # `events` reports the end of file
            self._commands.write(json.dumps(command).encode() + b"\n")
            self._commands.flush()

    def events(self, timeout: float) -> list[dict[str, Any]]:
        """Return the events that arrive within `timeout` seconds; {"event": "gone"} if the fork server is gone."""
        with self._reading:
            if not self._closer.alive:
                return [{"event": "gone"}]
            if not self._selector.select(timeout):
                return []
            chunk = os.read(self._events.fileno(), 65536)
            if not chunk:
                self.close()  # its pipe is closed before the system reports it as dead
                return [{"event": "gone"}]
            *lines, self._pending = (self._pending + chunk).split(b"\n")
            events: list[dict[str, Any]] = [json.loads(line) for line in lines]
            for event in events:
                if event["event"] == "ready":
                    self.own_pid = event["pid"]
                elif event["event"] == "over":
                    self._busy, self._used = False, time.monotonic()
            return events

    def close(self) -> None:
        """End the fork server, and with it every rank."""
        self._closer()

    def kill(self) -> None:
        """Kill a fork server that does not answer; on Linux the system then kills its ranks."""
        self._process.kill()
        self._closer()


def _end(
    process: subprocess.Popen[bytes], selector: selectors.BaseSelector, reading: threading.RLock
) -> None:
    """End the fork server by closing its input: it then kills its ranks and exits."""
    with reading:  # no thread reads from a file that is being closed
        selector.close()
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(OSError, ValueError):
            os.write(process.stdin.fileno(), b'{"do": "close"}\n')
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()
    try:
        process.wait(2.0)
    except subprocess.TimeoutExpired:
        process.kill()  # still importing torch, stopped or stuck; its ranks die with it
        process.wait()
