"""How long Gloo's messages and collectives take over loopback: `mpkit/devices/catalogue/loopback.csv`.

    .venv/bin/python -m benchmarks.measure_loopback

It runs two ranks on an otherwise idle machine with two cores or more. A collective uses CPU time on all its ranks at
once, so more ranks than cores would measure the wait for a core.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable
from datetime import date
from pathlib import Path
from statistics import quantiles
from time import monotonic

import torch

import mpkit as mk

Span = tuple[float, float]

RANKS, WARM_UP = 2, 5
PAYLOADS = [4 * 8**power for power in range(8)]
"""Payloads in bytes, from 4 bytes to 8 MiB."""

TABLE = Path(__file__).parents[1] / "mpkit" / "devices" / "catalogue" / "loopback.csv"


def main() -> None:
    """Write the table."""
    with mk.Cluster(RANKS, device="cpu") as cluster:
        found = cluster.run(_measure)
    source = f"measured: gloo of torch {torch.__version__}, {os.cpu_count()} cores, {date.today()}"
    with TABLE.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["kind", "ranks", "bytes", "time_us", "source"])
        for kind, payload in found[0]:
            calls = zip(*(spans[kind, payload] for spans in found), strict=True)
            # From when the last rank arrives until the last rank is done. The fastest tenth is taken, since other
            # load on the machine can only add time.
            times = [max(ends) - max(starts) for starts, ends in (zip(*call, strict=True) for call in calls)]
            seconds = quantiles(times, n=10)[0]
            table.writerow([kind, RANKS, payload, f"{seconds * 1e6:.1f}", source])
            print(f"{kind:15} {payload:>9,} bytes {seconds * 1e6:9.1f} us")


def _measure(ctx: mk.Context) -> dict[tuple[str, int], list[Span]]:
    """Return when each call began and ended, by kind and payload; processes of a machine share the clock."""
    return {
        (kind, payload): _spans(ctx, call, 200 if payload <= 4 * 8**5 else 40)
        for kind in ("send", "all_reduce", "all_gather", "reduce_scatter", "broadcast")
        for payload in PAYLOADS
        if (call := _call(ctx, kind, payload)) is not None
    }


def _spans(ctx: mk.Context, call: Callable[[], object], times: int) -> list[Span]:
    found = []
    for _ in range(WARM_UP + times):
        ctx.comm.barrier()
        start = monotonic()
        call()
        found.append((start, monotonic()))
    return found[WARM_UP:]


def _call(ctx: mk.Context, kind: str, payload: int) -> Callable[[], object] | None:
    """Return the call to measure; None if the payload cannot be divided. A message goes from rank 0 to rank 1."""
    whole = torch.zeros(payload // 4)
    match kind:
        case "send" if ctx.rank == 0:
            return lambda: ctx.comm.send(whole, 1)
        case "send":
            return lambda: ctx.comm.recv(whole, 0)
        case "all_reduce":
            return lambda: ctx.comm.all_reduce(whole)
        case "broadcast":
            return lambda: ctx.comm.broadcast(whole, 0)
    if len(whole) % RANKS:
        return None
    if kind == "all_gather":
        part = whole[: len(whole) // RANKS].clone()
        return lambda: ctx.comm.all_gather(part)
    return lambda: ctx.comm.reduce_scatter(whole)


if __name__ == "__main__":
    main()
