"""The parent's handle on the fork server: starts it, sends commands, reads events, and notices when it is gone.

Several launches may run at a time, each followed by its own thread. Whichever thread waits for events reads them for
all launches, and each launch finds its own events in its inbox.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import selectors
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

from mpkit.errors import MpkitError
from mpkit.launch.process.boot import boot_command, boot_environment
from mpkit.launch.process.vitals import is_stopped

__all__ = ["ForkServerClient"]

START_TIMEOUT = 120.0
"""Seconds that importing torch may take, on a cold and busy disk."""

STOPPED_FOR = 2.0
"""Seconds that the fork server may be stopped before it is given up."""

STOPPED = (
    "the process that ranks are started from (pid {pid}) was stopped (SIGSTOP: a debugger, a paused "
    "container); it and its ranks have been ended, and the next run starts a new one"
)
"""The error of a run whose fork server is stopped."""


ENTRY = "mpkit.launch.process.fork_server:main"


class ForkServerClient:
    """A fork server process. Starting it does not block: it imports torch while the parent continues.

    Args:
        fork: whether ranks may be forked; False starts a fresh interpreter per rank, which is slower but equivalent.
        within: the beginning of a command that runs the fork server enclosed, with its memory closed to its ranks.
    """

    def __init__(self, fork: bool = True, within: Sequence[str] = ()) -> None:
        self._environment = boot_environment()
        options = [*([] if fork else ["--spawn"]), *(["--closed"] if within else [])]
        # A session of its own shields it from the terminal's Ctrl-C, which goes to whole process groups.
        self._process = subprocess.Popen(
            [*within, *boot_command(ENTRY, *options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if sys.stderr is None else None,
            env=self._environment,
            start_new_session=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._commands = self._process.stdin
        self._events = self._process.stdout
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._events, selectors.EVENT_READ)
        self._pending = b""
        self._lock = threading.Lock()  # held while a command is written
        self._reading = threading.RLock()  # held while events are read
        self._inboxes: dict[int, deque[dict[str, Any]]] = {}
        self._launches = itertools.count(1)
        self._fork = fork
        self._imported: set[str] = set()
        self.ready = False
        self.own_pid = 0  # the fork server's process id as itself sees it, once it is ready
        self._closer = weakref.finalize(self, _end, self._process, self._selector, self._reading)

    @property
    def alive(self) -> bool:
        """Whether the fork server can still be used."""
        return self._closer.alive and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The process id of the fork server, or of what encloses it."""
        return self._process.pid

    def environment_since(self) -> dict[str, str | None]:
        """Return the variables of os.environ that differ from the fork server's, with None for removed ones."""
        gone: dict[str, str | None] = dict.fromkeys(self._environment.keys() - os.environ.keys())
        return gone | {k: v for k, v in os.environ.items() if self._environment.get(k) != v}

    def wait_ready(self) -> None:
        """Wait until the fork server has imported torch.

        Raises:
            MpkitError: it died before that, or took longer than two minutes.
        """
        deadline, stopped = time.monotonic() + START_TIMEOUT, 0
        while not self._came_up():
            with self._reading:
                if not self._came_up():
                    self._read(0.5)
            stopped = stopped + 1 if is_stopped(self.pid) else 0
            if stopped > STOPPED_FOR / 0.5:
                self.kill()
                raise MpkitError(STOPPED.format(pid=self.pid))
            if self._came_up():
                return
            if not self.alive or time.monotonic() > deadline:
                code = self._process.poll()
                self.close()
                raise MpkitError(
                    "the process that ranks are started from "
                    + ("took over two minutes to import torch" if code is None else f"ended with code {code}")
                    + f"; does `{sys.executable} -P -m mpkit.launch.process.fork_server </dev/null` work in a terminal?"
                )

    def _came_up(self) -> bool:  # a function, since another thread may have read the event
        return self.ready

    def launch(self, folder: str, ranks: int, modules: Sequence[str] = ()) -> int:
        """Request ranks and return the number by which events identify this launch.

        Args:
            modules: modules that the ranks need and that do not change, to be imported before the ranks are forked.
        """
        new = [name for name in modules if name not in self._imported]
        if new and self._fork:
            self._imported.update(new)
            self.tell(do="import", modules=new)
        number = next(self._launches)
        self._inboxes[number] = deque()
        self.tell(do="launch", id=number, folder=folder, ranks=ranks)
        return number

    def tell(self, **command: Any) -> None:
        """Send a command; it is lost if the fork server is gone."""
        with self._lock, contextlib.suppress(BrokenPipeError, ValueError):  # `events` reports the end of file
            self._commands.write(json.dumps(command).encode() + b"\n")
            self._commands.flush()

    def events(self, launch: int, timeout: float) -> list[dict[str, Any]]:
        """Return the events of a launch, after waiting up to `timeout` seconds for an event of any launch."""
        inbox = self._inboxes[launch]
        if not inbox and self._reading.acquire(timeout=timeout):
            try:
                if not inbox:  # otherwise another thread has read it in the meantime
                    self._read(timeout)
            finally:
                self._reading.release()
        events = [inbox.popleft() for _ in range(len(inbox))]
        return events if events or self._closer.alive else [{"event": "gone"}]

    def forget(self, launch: int) -> None:
        """Discard the events of a launch that is over."""
        self._inboxes.pop(launch, None)

    def _read(self, timeout: float) -> None:
        """Put arriving events into the inboxes; only one thread at a time calls this."""
        if not self._closer.alive or not self._selector.select(timeout):
            return
        chunk = os.read(self._events.fileno(), 65536)
        if not chunk:
            self.close()  # its pipe is closed before the system reports it as dead
            return
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        for line in lines:
            event = json.loads(line)
            if event["event"] == "ready":
                self.ready, self.own_pid = True, event["pid"]
            if (inbox := self._inboxes.get(event.get("id"))) is not None:
                inbox.append(event)

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
