"""Ranks apart from the process that judges what they return: enclosed once more, within what encloses the judge.

An answer runs on ranks as the same user as its judge. So these, and the helper process that forks them,

    see no solution        the exercises' files are hidden from them (`catalogue.solution_folders`)
    cannot reach the judge they have processes of their own (namespaces), or may trace their own only (landlock)
    write to one folder    which is emptied after each answer
    leave nobody behind    whatever they started is ended before the verdict is written
"""

import contextlib
import re
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from mpkit.course.sandbox.guard import enclose_command, list_descendants
from mpkit.launch.process.fork_server import ForkServerClient
from mpkit.launch.session.cluster import Cluster

ENDED = 2**30
"""Stands for a process that has ended before it was found; no process has this number."""


class RanksApart(Cluster):
    """A cluster of CPU ranks that are enclosed.

    Args:
        folder: the only folder that ranks write to.
        hidden: the folders that they cannot read.
        way: one of `enclose.WAYS`.
    """

    def __init__(self, folder: Path, hidden: Sequence[str], way: str) -> None:
        self._folder, self._within = folder, enclose_command([], folder, hidden, way)
        super().__init__(1, "cpu")

    def _fork_server_maker(self) -> Callable[[], ForkServerClient]:
        return partial(_EnclosedForkServer, True, self._within)

    def clear(self) -> None:
        """End what ranks have left behind, and remove their files."""
        fork_server = self._helper.fork_server
        if isinstance(fork_server, _EnclosedForkServer):
            fork_server.end_strays()
        for path in self._folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


class _EnclosedForkServer(ForkServerClient):
    """A fork server whose processes may have other numbers than here: it is in a namespace of its own."""

    def events(self, timeout: float) -> list[dict[str, Any]]:
        """Return the events, with the ranks' process ids as they are here."""
        events = super().events(timeout)
        for event in events:
            if event["event"] == "started":
                here = self._numbers()
                event["pids"] = [here.get(pid, ENDED) for pid in event["pids"]]
        return events

    def end_strays(self) -> None:
        """End all processes below the fork server, and those beside it that have lost their parent."""
        here, kept = list_descendants(self.pid), {self.pid}
        server = self._numbers().get(self.own_pid, ENDED)
        with contextlib.suppress(psutil.Error):
            kept |= {server, *(parent.pid for parent in psutil.Process(server).parents())}
        strays = [process for process in here if process.pid not in kept]
        for process in strays:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(strays, timeout=5.0)

    def _numbers(self) -> dict[int, int]:
        """Return the process ids here, by those within."""
        found = {}
        for process in list_descendants(self.pid):
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{process.pid}/status").read_text()
                numbers = re.search(r"^NSpid:(.*)", status, re.M)
                found[int(numbers[1].split()[-1]) if numbers else process.pid] = process.pid
        return found
