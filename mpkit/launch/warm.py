"""The parent's handle on the nursery: start it, speak to it, notice when it is gone."""

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

__all__ = ["Warm"]

START_TIMEOUT = 120.0
"""Seconds that importing torch may take, on a cold and busy disk."""


class Warm:
    """A nursery process. Starting it costs nothing here: it imports torch while we go on.

    Args:
        fork: whether ranks may be forked; False starts a fresh interpreter a rank, slower and the same otherwise.
    """

    def __init__(self, fork: bool = True) -> None:
        command = [sys.executable, "-m", "mpkit.launch.nursery", *([] if fork else ["--spawn"])]
        # What makes mpkit importable here makes it importable there; a session of its own keeps the terminal's
        # Ctrl-C from it, which goes to whole process groups.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if sys.stderr is None else None,
            env=environment,
            start_new_session=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._commands = self._process.stdin
        self._events = self._process.stdout
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._events, selectors.EVENT_READ)
        self._pending = b""
        self._lock = threading.Lock()
        self._launches = 0
        self._fork = fork
        self._imported: set[str] = set()
        self.ready = False
        self._closer = weakref.finalize(self, _end, self._process, self._selector)

    @property
    def alive(self) -> bool:
        """Whether it can still be used."""
        return self._closer.alive and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Of the nursery process."""
        return self._process.pid

    def wait_ready(self) -> None:
        """Until it has imported torch.

        Raises:
            MpkitError: it died on the way, or took longer than two minutes.
        """
        deadline = time.monotonic() + START_TIMEOUT
        while not self.ready:
            for event in self.events(1.0):
                self.ready = self.ready or event["event"] == "ready"
            if not self.ready and (not self.alive or time.monotonic() > deadline):
                code = self._process.poll()
                self.close()
                raise MpkitError(
                    "the process that ranks are started from "
                    + ("took over two minutes to import torch" if code is None else f"ended with code {code}")
                    + f"; does `{sys.executable} -m mpkit.launch.nursery </dev/null` work in a terminal?"
                )

    def launch(self, folder: str, ranks: int, modules: Sequence[str] = ()) -> int:
        """Ask for ranks; returns the number by which events name this launch.

        Args:
            modules: that ranks need and that do not change, to be imported before they are forked.
        """
        new = [name for name in modules if name not in self._imported]
        if new and self._fork:
            self._imported.update(new)
            self.tell(do="import", modules=new)
        self._launches += 1
        self.tell(do="launch", id=self._launches, folder=folder, ranks=ranks)
        return self._launches

    def tell(self, **command: Any) -> None:
        """A command; lost, like the nursery itself, if that is gone."""
        with self._lock, contextlib.suppress(BrokenPipeError, ValueError):  # `events` reports the end of file
            self._commands.write(json.dumps(command).encode() + b"\n")
            self._commands.flush()

    def events(self, timeout: float) -> list[dict[str, Any]]:
        """What happened, after waiting up to `timeout` seconds for something to."""
        if not self._closer.alive:
            return [{"event": "gone"}]
        if not self._selector.select(timeout):
            return []
        chunk = os.read(self._events.fileno(), 65536)
        if not chunk:
            self.close()  # its end is closed before the system counts it as dead
            return [{"event": "gone"}]
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """End it, and with it every rank."""
        self._closer()


def _end(process: subprocess.Popen[bytes], selector: selectors.BaseSelector) -> None:
    """Closing its input ends it: it kills its ranks and leaves."""
    selector.close()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    try:
        process.wait(2.0)
    except subprocess.TimeoutExpired:
        process.kill()  # still importing torch, or stuck; its ranks die with it
        process.wait()
