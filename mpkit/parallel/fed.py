"""FedBatches: batches that the caller's process reads, and gives to a rank as it asks for them.

    ask     for a step's batch: how large it is, and of what shapes; the answer comes when it has been read
    part    for some of its samples

The other end is `mpkit.feeding`. They speak through a socket in the launch's folder.
"""

from __future__ import annotations

import pickle
from collections.abc import Hashable
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

from mpkit.parallel.microbatch import Value

__all__ = ["SOCKET", "FedBatches"]

SOCKET = "data.sock"


class FedBatches:
    """A source of batches (`mpkit.parallel.feed.Source`) on a rank."""

    loads = True
    num_workers = 0
    prefetch: int | None = None
    pin_memory = False

    def __init__(self) -> None:
        self._rank = -1
        self._connection: Connection[Any, Any] | None = None
        self._head: tuple[int, tuple[int, Any]] = (-1, (0, ()))  # a step; its size and signature

    def connect(self, folder: Path, rank: int) -> None:
        """Find the process that reads."""
        self._rank = rank
        self._connection = Client(str(folder / SOCKET), "AF_UNIX")

    def __len__(self) -> int:
        """As many as are asked for."""
        return 2**31 - 1

    def size(self, step: int) -> int:
        """How many samples the batch of a step has; waits until it has been read."""
        return self._ask_for(step)[0]

    def key(self, step: int, which: slice) -> Hashable:
        """The signature of a part."""
        size, whole = self._ask_for(step)
        k = len(range(size)[which])
        return tuple((name, (k, *shape[1:]), dtype) for name, shape, dtype in whole)

    def part(self, step: int, which: slice) -> tuple[Value, Value]:
        """Some samples of the batch of a step."""
        self._ask_for(step)
        found: tuple[Value, Value] = self._call(step, (which.start, which.stop, which.step))
        return found

    def _ask_for(self, step: int) -> tuple[int, Any]:
        if self._head[0] != step:
            self._head = step, self._call(step, None)
        return self._head[1]

    def _call(self, step: int, which: tuple[int, int, int | None] | None) -> Any:
        assert self._connection is not None, "it is connected when the training is placed on the rank"
        self._connection.send_bytes(pickle.dumps((self._rank, step, which)))
        return pickle.loads(self._connection.recv_bytes())
