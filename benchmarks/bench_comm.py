"""What it costs to compare each communication with its peers': for a small all-reduce and a small message.

For comparison, it also measures an exchange of fingerprints: an all-gather of 8 bytes before each all-reduce, as torch
does with TORCH_DISTRIBUTED_DEBUG=DETAIL.
"""

from __future__ import annotations

from typing import Any

import torch

import mpkit as mk
from benchmarks.pairing import compared, pairs
from mpkit.strategies.comm.communicator import Communicator
from mpkit.strategies.comm.wire import Wire

RANKS, CALLS, ROUNDS, WARM_UP = 4, 100, 60, 6


def measure() -> list[dict[str, Any]]:
    """Measure the medians of the pairs, of 100 calls each."""
    rows = []
    with mk.Cluster(RANKS, device="cpu") as cluster:
        for what, side in (
            ("all_reduce", "unchecked"),
            ("message", "unchecked"),
            ("all_reduce", "exchanged"),
        ):
            name = f"communication: 100 times {what} of 4 bytes, {RANKS} ranks, "
            name += "compared" if side == "unchecked" else "with an exchange of fingerprints"
            found = cluster.run(_sides, what, side)
            rows.append(compared(name, "the same without", found))
    return rows


def _sides(ctx: mk.Context, what: str, side: str) -> list[tuple[float, float]]:
    plain = Communicator(Wire(ctx.rank, ctx.world_size, ctx.record, ctx.device, "gloo"))
    data, fingerprint = torch.ones(1), torch.zeros(1, dtype=torch.int64)

    def all_reduce(comm: Communicator) -> None:
        for _ in range(CALLS):
            comm.all_reduce(data)

    def exchanged(comm: Communicator) -> None:
        for _ in range(CALLS):
            assert not comm.all_gather(fingerprint).any()
            comm.all_reduce(data)

    def message(comm: Communicator) -> None:
        right, left = (ctx.rank + 1) % ctx.world_size, (ctx.rank - 1) % ctx.world_size
        for _ in range(CALLS):
            sent = comm.isend(data, right)
            comm.recv(torch.empty(1), left)
            sent.wait()

    if side == "exchanged":
        return pairs(lambda _: exchanged(plain), lambda _: all_reduce(plain), ROUNDS, WARM_UP)
    do = all_reduce if what == "all_reduce" else message
    return pairs(lambda _: do(ctx.comm), lambda _: do(plain), ROUNDS, WARM_UP)
