"""The tables of the catalogue, and the links that are fitted to them.

    devices.csv         peak rates, memory and link rates as published; memory_GiB as drivers report it
    mamf.csv            the rate that large matrix products really reach
    links.csv           link rates, one direction
    collectives.csv     nccl-tests sweeps: payload, time, bus bandwidth
    loopback.csv        Gloo over the loopback interface, measured by `benchmarks.measure_loopback`

Every row names its source. `marks` says which of its cells were derived or not read from a source.
"""

from __future__ import annotations

import csv
from functools import cache
from importlib.resources import files
from typing import NamedTuple

import numpy as np

from mpkit.devices.hardware import hops, wire_factor
from mpkit.trace import Kind

__all__ = ["Fit", "fit_all_reduce", "fit_loopback", "one", "rows", "sweep"]


@cache
def rows(table: str) -> tuple[dict[str, str], ...]:
    """Return the rows of a table, as strings by column."""
    with files("mpkit.devices.catalogue").joinpath(f"{table}.csv").open(encoding="utf-8") as file:
        return tuple(csv.DictReader(file))


def one(table: str, **where: str) -> dict[str, str]:
    """Return the one row in which these columns have these values.

    >>> one("devices", device="A100 SXM 80GB")["memory_GBps"]
    '2039'
    """
    matching = [row for row in rows(table) if all(row[column] == value for column, value in where.items())]
    assert len(matching) == 1, f"{table}.csv has {len(matching)} rows with {where}"
    return matching[0]


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
