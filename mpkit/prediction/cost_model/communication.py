"""Communication: what an estimate asks of a machine's links, in terms of ranks per node.

The times are those of `mpkit.devices.hardware`, which replays take as well.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from mpkit.devices.hardware import Hardware, collective_time
from mpkit.trace import Kind

__all__ = ["KAPPA", "Network", "network_of", "overlapped_time"]

T = TypeVar("T", float, NDArray[np.float64])

KAPPA = 0.3
"""How much of the time that communication shares with compute is lost; fitted to all published rows at once."""


class Network:
    """The network of a machine, as an estimate asks for it.

    Args:
        hardware: the machine.
    """

    def __init__(self, hardware: Hardware) -> None:
        self.per_node = hardware.per_node
        self._inside = hardware.link
        self._between = hardware.between
        self._known: dict[tuple[Kind, float, int, int, int], float] = {}

    def time(self, kind: Kind, nbytes: float, n: int, per_node: int, calls: int = 1) -> float:
        """Return the seconds that a collective takes.

        Args:
            kind: of the collective.
            nbytes: its payload, over all calls: what every rank has before a reduce-scatter or after an all-gather.
            n: ranks.
            per_node: of them, those in one node.
            calls: calls that the payload is sent in, one after the other.
        """
        if nbytes <= 0:
            return 0.0
        key = kind, nbytes, n, per_node, calls
        if key not in self._known:
            nodes = max(1, n // per_node)
            self._known[key] = collective_time(kind, nbytes, n, nodes, self._inside, self._between, calls)
        return self._known[key]

    def message(self, nbytes: float, crosses: bool) -> float:
        """Return the seconds of a message from one rank to another.

        Args:
            nbytes: its size.
            crosses: whether the other rank is on another node.
        """
        link = self._between if crosses and self._between is not None else self._inside
        return link.time(Kind.SEND, nbytes)


@lru_cache(64)
def network_of(hardware: Hardware) -> Network:
    """Return the network of a machine; equal machines have one."""
    return Network(hardware)


def overlapped_time(compute: T, communication: T) -> T:
    """Return the seconds that both take side by side; of arrays of steps, each of theirs.

    >>> overlapped_time(1.0, 0.5), overlapped_time(1.0, 2.0)
    (1.15, 2.0)
    """
    if isinstance(compute, np.ndarray):
        return np.maximum(compute + KAPPA * np.minimum(compute, communication), communication)
    return max(compute + KAPPA * min(compute, communication), communication)
