"""The catalogue's measured links, fitted: `python -m benchmarks.fit_links` prints what stands in measured_links.csv.

NVLink     the latency, and the rate of an all-reduce, of nccl-tests sweeps (collectives.csv)
EFA        the latency of a hop between nodes, to the sweep of 4 nodes of 8 B200
loopback   the latency, and a rate for each kind (loopback.csv)
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

from mpkit.devices.catalogue.machines import link_named, rows
from mpkit.devices.hardware import RAMP, Link, collective_time, hops, wire_factor
from mpkit.trace import Kind


def sweep(system: str, least: float = 0.0) -> tuple[int, np.ndarray, np.ndarray]:
    """Return a system's all-reduce sweep: the number of ranks, payloads in bytes from `least` on, and seconds."""
    measured = [row for row in rows("collectives") if row["system"] == system and row["time_us"]]
    table = np.array([(float(row["bytes"]), float(row["time_us"]) * 1e-6) for row in measured])
    table = table[table[:, 0] >= least]
    return int(measured[0]["ranks"]), table[:, 0], table[:, 1]


class Fit(NamedTuple):
    """A link fitted to a sweep: seconds per hop, and bytes per second on the bus."""

    latency: float
    bandwidth: float


@cache
def fit_all_reduce(system: str, least: float = 0.0) -> Fit:
    """Fit the latency and bandwidth that come closest to a measured sweep.

    `time = hops * latency + wire factor * bytes / bandwidth` is linear in the latency and in one over the bandwidth,
    so least squares fits both. The errors are relative to the measured times, which span four orders of magnitude.
    The model is within a factor of 1.6 of the 20 times measured for 8 A100, and within 1.13 from 64 MiB on.

    >>> fit = fit_all_reduce("8xA100 NVLink3")
    >>> round(fit.latency * 1e6, 1), round(fit.bandwidth / 1e9)     # us a hop, GB/s
    (4.0, 211)
    """
    n, payload, seconds = sweep(system, least)
    terms = np.stack(
        [np.full(len(payload), hops(Kind.ALL_REDUCE, n)), wire_factor(Kind.ALL_REDUCE, n) * payload], axis=1
    )
    (latency, inverse), *_ = np.linalg.lstsq(terms / seconds[:, None], np.ones(len(seconds)), rcond=None)
    return Fit(float(latency), float(1 / inverse))


@cache
def fit_loopback() -> tuple[float, dict[Kind, float]]:
    """Return the latency, in seconds per hop, and the rate of each kind, in bytes per second, closest to loopback.csv.

    There is one latency for all kinds and a rate for each; the fit is linear, as in `fit_all_reduce`.

    >>> latency, rates = fit_loopback()
    >>> 10e-6 < latency < 500e-6 and rates[Kind.ALL_REDUCE] < 10e9
    True
    """
    measured = rows("loopback")
    kinds = list(dict.fromkeys(row["kind"] for row in measured))
    terms = np.zeros((len(measured), 1 + len(kinds)))
    for term, row in zip(terms, measured, strict=True):
        kind, n, seconds = Kind[row["kind"].upper()], int(row["ranks"]), float(row["time_us"]) * 1e-6
        term[0] = hops(kind, n) / seconds
        term[1 + kinds.index(row["kind"])] = wire_factor(kind, n) * float(row["bytes"]) / seconds
    (latency, *inverse), *_ = np.linalg.lstsq(terms, np.ones(len(terms)), rcond=None)
    return float(latency), {
        Kind[kind.upper()]: float(1 / each) for kind, each in zip(kinds, inverse, strict=True)
    }


def fit_cards() -> Fit:
    """Fit a 400 Gb/s network card per device to 4 nodes of 8 B200 over EFA: microseconds per hop, and its rate.

    >>> fit_cards()
    Fit(latency=5.5e-05, bandwidth=45652713523.018234)
    """
    system, least = "4x8xB200 EFAv4 8x400G", 2**19
    n, payload, seconds = sweep(system, least)
    # Eight devices of a node share the ring's traffic among their eight cards.
    bandwidth, inside = fit_all_reduce(system, least).bandwidth / 8, link_named("NVLink 5")

    def squared_error(latency: float) -> float:
        between = Link("card", latency, bandwidth, ramp=RAMP)
        return sum(  # type: ignore[no-any-return]
            (collective_time(Kind.ALL_REDUCE, size, n, 4, inside, between) / took - 1) ** 2
            for size, took in zip(payload.tolist(), seconds.tolist(), strict=True)
        )

    return Fit(min((microseconds / 1e6 for microseconds in range(1, 101)), key=squared_error), bandwidth)


SYSTEMS = {
    "NVLink 3": "8xA100 NVLink3",
    "NVLink 4": "8xH200 NVLink4 (NVLS from 2MiB)",
    "NVLink 5": "8xB200 NVLink5",
}
"""By link, the system whose sweep it is fitted to."""


if __name__ == "__main__":
    for link, system in SYSTEMS.items():
        print(f"{link}: {fit_all_reduce(system)}")
    print(f"EFA v4: {fit_cards()}")
    print(f"loopback: {fit_loopback()}")
