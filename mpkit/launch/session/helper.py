"""What a Cluster has others do ahead: its helper process, and a thread that imports what the first training needs.

Preparing a training runs the model on fake tensors, for which torch imports its compiler (torch._dynamo) and sympy:
about a second in a fresh process, which `import torch` spares those who do not need it. The thread begins with this
when a Cluster is made, as its fork server begins to import torch, and `train` waits for the rest.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpkit.launch.launch import RankLaunch
    from mpkit.launch.process.fork_server_client import ForkServerClient
    from mpkit.launch.session.run import Run


class Helper:
    """What a cluster shares with those that `resized` makes of it: the process that their ranks are forked from.

    Args:
        start: starts a fork server; None under a launcher, whose processes are the ranks.

    Attributes:
        fork_server: the latest one. It ends by itself when nobody has used it for minutes, and the next launch starts
            another.
        latest: the latest launch: one may run at a time.
        training: the latest training.
        closed: whether one of the clusters was closed.
        launching: held while a thread checks whether the helper is busy, and launches.
    """

    def __init__(self, start: Callable[[], ForkServerClient] | None) -> None:
        self._start = start
        self.fork_server = None if start is None else start()
        self.latest: RankLaunch | None = None
        self.training: Run | None = None
        self.closed = False
        self.launching = threading.Lock()

    def provide(self) -> ForkServerClient:
        """Return a fork server that is alive."""
        assert self._start is not None and self.fork_server is not None  # no launcher started this process
        if not self.fork_server.alive:
            self.fork_server.close()
            self.fork_server = self._start()
        return self.fork_server


NEEDED = (
    "sympy",
    "torch.distributed.tensor",
    "torch._dynamo",
    "mpkit.strategies.prepare.prepare",
    "mpkit.launch.session.run",
)
"""What `train` imports at its first call. Each is imported after what it imports itself, so that a thread that imports
one of them at the same time waits for it, rather than for a ring of modules that wait for each other."""


def import_ahead() -> threading.Thread:
    """Start a thread that imports these modules, and return it.

    The thread is no daemon: an interpreter that ends while it imports would abort in the middle of torch's C++ code.
    An import that fails here fails in `train` too, where the error is reported.
    """
    thread = threading.Thread(target=_import, name="mpkit-import-ahead", daemon=False)
    thread.start()
    return thread


def _import() -> None:
    collects = gc.isenabled()
    gc.disable()  # what imports create stays: looking for garbage in it takes a quarter of their time
    try:
        with contextlib.suppress(ImportError):
            for name in NEEDED:
                importlib.import_module(name)
    finally:
        if collects:
            gc.enable()
