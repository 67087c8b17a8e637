"""A link with a clock that counts, to be measured: real collectives on real ranks, with known times.

What makes benchmarks wrong on GPUs happens here too, the same in each run:

    asynchronous    a call returns at once, and the link goes on; `synchronize` waits for it
    uneven ranks    after each measurement, every rank is busy with something else for a while; `barrier` aligns them
    warm-up         the first call of each kind and size connects the ranks first
    interruptions   a call now and then takes three times as long

    message         latency + bytes / bandwidth
    ring            2(n-1) messages, one after the other, of 1/n of the bytes each
    tree            2 ceil(log2 n) messages, one after the other, of all bytes each
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mpkit.strategies.rank_context import Context


Algorithm = Literal["ring", "tree"]

LAUNCH = 4e-6
"""Seconds until an asynchronous call returns."""


class TimedLink:
    """A link between the ranks, whose times are given.

    >>> import mpkit as mk, torch
    >>> def one_way(ctx):
    ...     link = TimedLink(ctx, latency=5e-6, bandwidth=10e9)
    ...     for _ in range(2):  # the first one connects
    ...         link.barrier()
    ...         begin = link.clock()
    ...         link.ping_pong(torch.zeros(25_000))
    ...         link.synchronize()
    ...         took = link.clock() - begin
    ...     return round(took / 2 * 1e6, 3)
    >>> with mk.Cluster(ranks=2, device="cpu") as cluster:
    ...     cluster.run(one_way)
    [15.0, 15.0]

    Args:
        ctx: the rank's context.
        latency: of a message, in seconds.
        bandwidth: in bytes per second.
        algorithm: how an all-reduce is done.
        seed: of the ranks' other work.
    """

    def __init__(
        self, ctx: Context, latency: float, bandwidth: float, algorithm: Algorithm = "ring", seed: int = 0
    ) -> None:
        self._ctx = ctx
        self.rank, self.ranks = ctx.rank, ctx.world_size
        self._times = _times(self.ranks, latency, bandwidth, algorithm)
        self._host = self._link = self._late = 0.0
        self._other_work = random.Random(f"{seed} {ctx.rank}")
        self._calls: dict[tuple[str, int], int] = {}

    def clock(self) -> float:
        """Return the time of this rank, in seconds."""
        now, self._host, self._late = self._host, self._host + self._late, 0.0
        return now

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self._host = self._latest()

    def synchronize(self) -> None:
        """Wait until everything that was started is complete."""
        self._host = max(self._host, self._link)
        self._late = 40e-6 * self._other_work.random()

    def ping_pong(self, tensor: Tensor) -> None:
        """Send `tensor` to the neighbour, rank 1 for rank 0, and get it back; the same for every pair at once."""
        other = self.rank ^ 1
        mine, theirs = self._stamp_tensor(tensor), self._stamp_tensor(tensor)
        for sends in (self.rank < other, self.rank > other):
            if sends:
                self._ctx.comm.send(mine, other)
            else:
                self._ctx.comm.recv(theirs, other)
        self._start("ping_pong", tensor, max(self._host, theirs[-1].item()))

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace `tensor` on every rank by the sum over all ranks."""
        self._ctx.comm.all_reduce(tensor)
        self._start("all_reduce", tensor, self._latest())

    def _start(self, what: str, tensor: Tensor, begin: float) -> None:
        """Let the link be busy from when the last rank has come."""
        call = what, tensor.nbytes
        count = self._calls[call] = self._calls.get(call, -1) + 1
        took = self._times[what](tensor.nbytes)
        if count == 0:
            took += 300e-6
        elif count % 4 == 2 + list(self._calls).index(call) % 2:
            took *= 3
        self._link = max(self._link, begin) + took
        self._host += LAUNCH

    def _stamp_tensor(self, tensor: Tensor) -> Tensor:
        """Return the tensor's numbers, and then this rank's time."""
        return torch.cat([tensor.flatten().double(), torch.tensor([self._host], dtype=torch.float64)])

    def _latest(self) -> float:
        return float(self._ctx.comm.all_reduce(torch.tensor(self._host, dtype=torch.float64), op="max"))


def _times(
    n: int, latency: float, bandwidth: float, algorithm: Algorithm
) -> dict[str, Callable[[int], float]]:
    """Return, for each kind of call, the function from bytes to seconds."""

    def message(nbytes: float) -> float:
        return latency + nbytes / bandwidth

    rounds = 2 * (n - 1) if algorithm == "ring" else 2 * (n - 1).bit_length()
    return {
        "ping_pong": lambda nbytes: 2 * message(nbytes),
        "all_reduce": lambda nbytes: rounds * message(nbytes / n if algorithm == "ring" else nbytes),
    }
