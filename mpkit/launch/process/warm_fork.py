"""A process that the machine's warm process forks for this one, used as if it were a child: see `warm_process`."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import IO

from mpkit.launch.process.boot import safe_path
from mpkit.launch.process.warm_process import MESSAGE, identity

__all__ = ["WarmFork", "WarmProcessRejects"]


class WarmProcessRejects(Exception):
    """Why the warm process forks nothing for this one."""


class WarmFork:
    """A process forked by the warm process, with the part of `subprocess.Popen` that a fork server's client uses.

    Args:
        path: the socket of the warm process.
        entry: what it calls, as "module:function".
        arguments: strings for that function.
        environment: its environment.

    Attributes:
        pid: its number.
        stdin, stdout: the ends of its standard streams that are here.

    Raises:
        WarmProcessRejects: there is no warm process at `path`, or it rejects this process.
    """

    def __init__(
        self, path: str, entry: str, arguments: tuple[str, ...], environment: Mapping[str, str]
    ) -> None:
        if sys.platform != "linux":
            raise WarmProcessRejects("only Linux says who is at the other end of a socket")
        theirs_in, mine_in = os.pipe()
        mine_out, theirs_out = os.pipe()
        message = {
            "entry": entry, "arguments": arguments, "environment": dict(environment), "path": safe_path(),
            "folder": os.getcwd(), "identity": identity(),
        }  # fmt: skip
        try:
            with socket.socket(socket.AF_UNIX) as warm:
                warm.connect(path)
                content = json.dumps(message).encode() + b"\n"
                sent = socket.send_fds(warm, [content], [theirs_in, theirs_out, _errors()])
                warm.sendall(content[sent:])
                answer = json.loads(warm.recv(MESSAGE) or b'{"rejected": "it ended without an answer"}')
            if "rejected" in answer:
                raise WarmProcessRejects(answer["rejected"])
            self.pid: int = answer["pid"]
            self._handle = os.pidfd_open(self.pid)
        except (OSError, WarmProcessRejects) as error:
            os.close(mine_in)
            os.close(mine_out)
            raise WarmProcessRejects(str(error)) from None
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        self.stdin: IO[bytes] = os.fdopen(mine_in, "wb")
        self.stdout: IO[bytes] = os.fdopen(mine_out, "rb")

    def poll(self) -> int | None:
        """Return None while it runs; its exit code is known to its parent only, and -1 stands for it."""
        return -1 if select.select([self._handle], [], [], 0)[0] else None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: it runs for longer.
        """
        if not select.select([self._handle], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return -1

    def kill(self) -> None:
        """Kill it."""
        if self.poll() is None:
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            os.close(self._handle)


def _errors() -> int:
    """Return this process's stream for errors, or one that leads nowhere."""
    try:
        os.fstat(2)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)
    return 2
