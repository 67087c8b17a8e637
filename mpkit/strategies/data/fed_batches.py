"""FedBatches: batches that the caller's process reads and sends to a rank on request.

    ask     request the size and shapes of a step's batch; the answer arrives once the batch has been read
    part    request some of its samples

The other end is `mpkit.strategies.data.feeder`. Both communicate through a socket in the launch's folder.
"""

from __future__ import annotations

import pickle
from collections.abc import Hashable
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

from mpkit.strategies.data.microbatch import Value

__all__ = ["SOCKET", "FedBatches"]

SOCKET = "data.sock"


class FedBatches:
    """A source of batches (`mpkit.strategies.job.feed.BatchSource`) on a rank."""

    loads = True
    num_workers = 0
    prefetch: int | None = None
    pin_memory = False

    def __init__(self) -> None:
        self._rank = -1
        self._connection: Connection[Any, Any] | None = None
        self._head: tuple[int, tuple[int, Any]] = (-1, (0, ()))  # (step, (its size, its signature))

    def connect(self, folder: Path, rank: int) -> None:
        """Connect to the process that reads the data."""
        self._rank = rank
        self._connection = Client(str(folder / SOCKET), "AF_UNIX")

    def __len__(self) -> int:
        """Return a practically unlimited length."""
        return 2**31 - 1

    def size(self, step: int) -> int:
        """Return the number of samples in the batch of a step, after waiting until it has been read."""
        return self._ask_for(step)[0]

    def key(self, step: int, which: slice) -> Hashable:
        """Return the signature of a part."""
        size, whole = self._ask_for(step)
        k = len(range(size)[which])
        return tuple((name, (k, *shape[1:]), dtype) for name, shape, dtype in whole)

    def part(self, step: int, which: slice) -> tuple[Value, Value]:
        """Return some samples of the batch of a step."""
        self._ask_for(step)
        samples: tuple[Value, Value] = self._call(step, (which.start, which.stop, which.step))
        return samples

    def _ask_for(self, step: int) -> tuple[int, Any]:
        if self._head[0] != step:
            self._head = step, self._call(step, None)
        return self._head[1]

    def _call(self, step: int, which: tuple[int, int, int | None] | None) -> Any:
        assert self._connection is not None, "it is connected when the training is placed on the rank"
        self._connection.send_bytes(pickle.dumps((self._rank, step, which)))
        return pickle.loads(self._connection.recv_bytes())
