"""The parent's handle on the fork server: starts it, sends commands, reads events, and notices when it is gone.

Python looks for modules in the current folder or the script's folder before its own. A learner's random.py there, or a
file that someone else put into a shared folder, would be imported in place of the real module. So helper processes
start with `python -P` and get this process's sys.path without these folders (`helper_command`). Ranks set the whole
sys.path afterwards, once all of mpkit has been imported, for the user's own modules.
"""

from __future__ import annotations

import json
import os
import selectors
import site
import subprocess
import sys
import sysconfig
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

START_TIMEOUT = 120.0
"""Seconds that importing torch may take, on a cold and busy disk."""

IDLE, IDLE_MARGIN = 300.0, 30.0
"""Seconds without a launch after which a fork server counts as ended, and how much later it exits by itself."""

STOPPED_FOR = 2.0
"""Seconds that the fork server may be stopped before it is given up."""

FROM = "the process that ranks are started from"
DIED = f"{FROM} has died"
TRY = f"does `{sys.executable} -P -m mpkit.launch.process.fork_server </dev/null` work in a terminal?"
STOPPED = (
    f"{FROM} (pid {{pid}}) was stopped (SIGSTOP: a debugger, a paused container); it and its ranks have been "
    "ended, and the next run starts a new one"
)
"""What is said of a run whose fork server is gone, or is stopped."""


class ForkServerClient:
    """A fork server process. Starting it does not block: it imports torch while the parent continues.

    Args:
        fork: whether ranks may be forked; False starts a fresh interpreter per rank, which is slower but equivalent.
        within: the beginning of a command that runs the fork server enclosed, with its memory closed to its ranks.

    Attributes:
        own_pid: the fork server's process id as itself sees it; 0 until it has imported torch.
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
        self.own_pid = 0
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

    def tell(self, do: str, **command: Any) -> None:
        """Send a command, such as "launch"; it is lost if the fork server is gone, which `events` reports."""
        if do == "launch":
            self._busy, self._used = True, time.monotonic()
        with self._lock, suppress(BrokenPipeError, ValueError):
            self._commands.write(json.dumps({"do": do, **command}).encode() + b"\n")
            self._commands.flush()

    def events(self, timeout: float) -> list[dict[str, Any]]:
        """Return the events that arrive within `timeout` seconds; {"event": "gone", "why": ...} if it is gone."""
        with self._reading:
            if not self._closer.alive:
                return [_gone(DIED)]
            if not self._selector.select(timeout):
                late = not self.own_pid and time.monotonic() - self._used > START_TIMEOUT
                return [_gone(f"{FROM} took over two minutes to import torch; {TRY}")] if late else []
            chunk = os.read(self._events.fileno(), 65536)
            if not chunk:
                self.close()  # its pipe is closed before the system reports it as dead
                ended = f"{FROM} ended with code {self._process.returncode}; {TRY}"
                return [_gone(DIED if self.own_pid else ended)]
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


def _gone(why: str) -> dict[str, Any]:
    return {"event": "gone", "why": why}


def _end(
    process: subprocess.Popen[bytes], selector: selectors.BaseSelector, reading: threading.RLock
) -> None:
    """End the fork server by closing its input: it then kills its ranks and exits."""
    with reading:  # no thread reads from a file that is being closed
        selector.close()
        assert process.stdin is not None and process.stdout is not None
        with suppress(OSError, ValueError):
            os.write(process.stdin.fileno(), b'{"do": "close"}\n')
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):
                pipe.close()
    try:
        process.wait(2.0)
    except subprocess.TimeoutExpired:
        process.kill()  # still importing torch, stopped or stuck; its ranks die with it
        process.wait()


START = """
import json, sys
path, module, function, arguments = json.loads(sys.argv[1])
sys.path[:] = path
getattr(__import__(module, fromlist=[function]), function)(**arguments)
"""


def helper_command(function: str, **arguments: Any) -> list[str]:
    """Return the command of a process that calls a function ("module:name") with arguments of JSON types."""
    module, _, name = function.partition(":")
    return [sys.executable, "-P", "-c", START, json.dumps([safe_path(), module, name, arguments])]


def safe_path() -> list[str]:
    """Return sys.path without the current folder and the script's, unless Python's own packages are there.

    mpkit may lie in one of these, as in a checkout that is not installed; its folder then comes last.
    """
    own = {
        os.path.realpath(folder) for folder in (*sysconfig.get_paths().values(), site.getusersitepackages())
    }
    script = getattr(sys.modules.get("__main__"), "__file__", None) or ""
    unsafe = {os.path.realpath(os.path.dirname(script))} if os.path.isabs(script) else set()
    if os.path.isdir(os.curdir):  # otherwise it has been deleted
        unsafe.add(os.path.realpath(os.curdir))
    safe = [path for path in sys.path if os.path.isabs(path) and os.path.realpath(path) not in unsafe - own]
    home = str(Path(__file__).parents[3])
    return safe if home in safe else [*safe, home]
