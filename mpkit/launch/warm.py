"""The parent's handle on the nursery: start it, speak to it, notice when it is gone.

Several launches may go on at a time, each followed by a thread of its own. Whichever thread waits for events reads
them for all, and each launch finds its own in its inbox.
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
from mpkit.launch.boot import boot_command, boot_environment
from mpkit.launch.vitals import is_stopped

__all__ = ["Warm"]

START_TIMEOUT = 120.0
"""Seconds that importing torch may take, on a cold and busy disk."""

STOPPED_FOR = 2.0
"""Seconds that it may be stopped for before it is given up."""

STOPPED = (
    "the process that ranks are started from (pid {pid}) was stopped (SIGSTOP: a debugger, a paused "
    "container); it and its ranks have been ended, and the next run starts a new one"
)
"""What a run says whose nursery does not move."""


class Warm:
    """A nursery process. Starting it costs nothing here: it imports torch while we go on.

    Args:
        fork: whether ranks may be forked; False starts a fresh interpreter a rank, slower and the same otherwise.
    """

    def __init__(self, fork: bool = True) -> None:
        self._environment = boot_environment()
        # A session of its own keeps the terminal's Ctrl-C from it, which goes to whole process groups.
        self._process = subprocess.Popen(
            boot_command("mpkit.launch.nursery:main", *([] if fork else ["--spawn"])),
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
        self._closer = weakref.finalize(self, _end, self._process, self._selector, self._reading)

    @property
    def alive(self) -> bool:
        """Whether it can still be used."""
        return self._closer.alive and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Of the nursery process."""
        return self._process.pid

    def environment_since(self) -> dict[str, str | None]:
        """Return the variables of os.environ that it does not have, or has otherwise; None for those that are gone."""
        gone: dict[str, str | None] = dict.fromkeys(self._environment.keys() - os.environ.keys())
        return gone | {k: v for k, v in os.environ.items() if self._environment.get(k) != v}

    def wait_ready(self) -> None:
        """Until it has imported torch.

        Raises:
            MpkitError: it died on the way, or took longer than two minutes.
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
                    + f"; does `{sys.executable} -P -m mpkit.launch.nursery </dev/null` work in a terminal?"
                )

    def _came_up(self) -> bool:  # a function, since another thread may have read the event
        return self.ready

    def launch(self, folder: str, ranks: int, modules: Sequence[str] = ()) -> int:
        """Ask for ranks; returns the number by which events name this launch.

        Args:
            modules: that ranks need and that do not change, to be imported before they are forked.
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
        """A command; lost, like the nursery itself, if that is gone."""
        with self._lock, contextlib.suppress(BrokenPipeError, ValueError):  # `events` reports the end of file
            self._commands.write(json.dumps(command).encode() + b"\n")
            self._commands.flush()

    def events(self, launch: int, timeout: float) -> list[dict[str, Any]]:
        """Return what happened to a launch, after waiting up to `timeout` seconds for something to happen to any."""
        inbox = self._inboxes[launch]
        if not inbox and self._reading.acquire(timeout=timeout):
            try:
                if not inbox:  # else another thread has read it meanwhile
                    self._read(timeout)
            finally:
                self._reading.release()
        found = [inbox.popleft() for _ in range(len(inbox))]
        return found if found or self._closer.alive else [{"event": "gone"}]

    def forget(self, launch: int) -> None:
        """Keep no events of a launch that is over."""
        self._inboxes.pop(launch, None)

    def _read(self, timeout: float) -> None:
        """Put what comes into the inboxes; by one thread at a time."""
        if not self._closer.alive or not self._selector.select(timeout):
            return
        chunk = os.read(self._events.fileno(), 65536)
        if not chunk:
            self.close()  # its end is closed before the system counts it as dead
            return
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        for line in lines:
            event = json.loads(line)
            self.ready = self.ready or event["event"] == "ready"
            if (inbox := self._inboxes.get(event.get("id"))) is not None:
                inbox.append(event)

    def close(self) -> None:
        """End it, and with it every rank."""
        self._closer()

    def kill(self) -> None:
        """End it where it does not answer: its ranks are told by the system, on Linux."""
        self._process.kill()
        self._closer()


def _end(
    process: subprocess.Popen[bytes], selector: selectors.BaseSelector, reading: threading.RLock
) -> None:
    """Closing its input ends it: it kills its ranks and leaves."""
    with reading:  # nobody reads from a file that is being closed
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
