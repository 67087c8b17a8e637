"""ClusterHelper: the fork server of a Cluster, started when ranks are needed and ended when nobody has used it.

A fork server holds torch in memory (about 230 MB) so that ranks start at once. In a class of forty, most notebooks are
being read at any moment. So a fork server ends after five to ten minutes without a run, and the next run starts another
one, which takes the seconds of importing torch.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from mpkit.launch.process.fork_server_client import ForkServerClient

if TYPE_CHECKING:
    from mpkit.launch.launch import Launch

__all__ = ["IDLE", "ClusterHelper"]

IDLE = 300.0
"""Seconds between two looks at whether a fork server has been used."""


class ClusterHelper:
    """The fork server that a cluster shares with those that `resized` makes of it.

    Args:
        start: starts a fork server.

    Attributes:
        fork_server: the latest one; None if it has been ended.
        launching: held while a thread checks whether its cluster is busy, and launches.
    """

    def __init__(self, start: Callable[[], ForkServerClient]) -> None:
        self._start = start
        self.launching = threading.Lock()
        self.fork_server: ForkServerClient | None = start()
        self._launches: weakref.WeakSet[Launch] = weakref.WeakSet()
        self._used = True  # since the latest look
        closed = threading.Event()
        self.close = weakref.finalize(self, closed.set)
        """Ends the looks: the cluster is closed, or gone; afterwards its `alive` is False."""
        threading.Thread(
            target=_look, args=(weakref.ref(self), closed), name="mpkit-idle", daemon=True
        ).start()

    def provide(self) -> ForkServerClient:
        """Return a fork server that is alive; the caller holds `launching`."""
        if self.fork_server is None or not self.fork_server.alive:
            self.end()
            self.fork_server = self._start()
        return self.fork_server

    def note(self, launch: Launch) -> None:
        """Keep the fork server while a launch goes on."""
        self._used = True
        self._launches.add(launch)

    def end_if_idle(self) -> None:
        """End the fork server if no launch goes on, and none has since the latest look."""
        with self.launching:
            if not all(launch.has_ended for launch in self._launches):
                self._used = True
            elif not self._used:
                self.end()
            else:
                self._used = False

    def end(self) -> None:
        """End the fork server, and with it every rank."""
        if self.fork_server is not None:
            self.fork_server.close()
            self.fork_server = None


def _look(helper: weakref.ref[ClusterHelper], closed: threading.Event) -> None:
    while not closed.wait(IDLE) and (there := helper()) is not None:
        there.end_if_idle()
        del there
