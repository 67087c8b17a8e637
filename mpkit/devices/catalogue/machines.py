"""Machines: the rows of the catalogue's tables, and machines of any size made from them.

    devices.csv         peak rates, memory and link rates as published; memory_GiB as drivers report it
    names.csv           the short names of devices; whose large products were measured, and the link inside a node
    mamf.csv            the rate that large matrix products really reach
    links.csv           link rates, one direction
    measured_links.csv  links whose latency and rates were measured or fitted (`benchmarks.fit_links`)
    machines.csv        machines that were measured as a whole; and, without a link, names to list
    collectives.csv     nccl-tests sweeps: payload, time, bus bandwidth
    loopback.csv        Gloo over the loopback interface, between two ranks on an idle machine of two cores

Every row names its source. A figure is *published* (a data sheet or a published measurement), *fitted* to published
measurements, or *assumed*, with the reason. An assumed figure is a guess; check it before you rely on it.

mk.hardware("h100", nodes=64, nic="ndr")     64 nodes of 8 H100, a 400 Gb/s card for each
mk.hardware("64x8-h100-ndr")                 the same by name
"""

import csv
import re
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from importlib.resources import files

from mpkit.devices.hardware import RAMP, Device, Hardware, Link
from mpkit.plan.kinds import real, whole
from mpkit.trace import Kind

GIGA = 1e9
LATENCY = 8e-6  # seconds per hop of a network card of which only the rate is given: InfiniBand's, assumed
A_NODE = 8  # devices of a node, if a name leaves them out
REACHED = (
    0.85  # the share of the line rate that a card reaches: 0.74 to 0.95 on the measured clusters; assumed
)


@cache
def rows(table: str) -> tuple[dict[str, str], ...]:
    """Return the rows of a table, as strings by column."""
    with files("mpkit.devices.catalogue").joinpath(f"{table}.csv").open(encoding="utf-8") as file:
        return tuple(csv.DictReader(file))


def one(table: str, **where: str) -> dict[str, str]:
    """Return the one row in which these columns have these values."""
    matching = [row for row in rows(table) if all(row[column] == value for column, value in where.items())]
    assert len(matching) == 1, f"{table}.csv has {len(matching)} rows with {where}"
    return matching[0]


def _cards() -> dict[str, dict[str, str]]:
    """Return the network cards of nics.csv by name. Latencies are assumed; EFA's is fitted to "4x8-b200-efa"."""
    return {row["nic"]: row for row in rows("nics")}


def device_names() -> dict[str, dict[str, str]]:
    """Return the rows of names.csv by short name."""
    return {row["name"]: row for row in rows("names")}


def _gpu(name: str, mamf: str, guess: float = 0.8) -> Device:
    """Build a device from devices.csv, its rates scaled by the share of the peak that large matrix products reach."""
    row = one("devices", device=name)
    if mamf:
        best = one("mamf", device=mamf)
        share = float(best["reached_tflops"]) / float(best["peak_tflops"])
        how = f"published peak, times {share:.3f}, which is reached in bfloat16 ({best['source']})"
    else:
        share, how = guess, f"published peak, times {guess}, which is assumed: no measurement is at hand"
    dtypes = ("float32", "tfloat32", "bfloat16", "float8", "float4")
    published_rates = {dtype: row[f"{dtype}_tflops"] for dtype in dtypes}
    rates = {dtype: float(rate) * 1e12 * share for dtype, rate in published_rates.items() if rate}
    rates["float16"] = rates["bfloat16"]
    rates.setdefault("float32", rates["bfloat16"] / 4)  # not published: matrix units work in 16 bits
    peak = {dtype: rate / share for dtype, rate in rates.items()}
    if row["float32_share"]:
        rates = {"float32": float(row["float32_share"]) * peak["float32"], "float16": rates["float16"]}
        how = f"float32: {row['float32_share']} of the published peak, {row['float32_source']}; others: {how}"
    published = f"published: {row['source']}" + (f" ({row['marks']})" if row["marks"] else "")
    read = row["memory_GiB"]  # what the driver reports, where a trace of torch.profiler says it
    memory = int(float(read) * 2**30) if read else int(float(row["memory_GB"]) * GIGA)
    return Device(
        name, rates, float(row["memory_GBps"]) * GIGA, memory, float(row["host_GBps"] or 16) * GIGA,
        {
            "flops": f"{how}; {published}", "bandwidth": published, "host": published,
            "memory": "reported by a driver (totalGlobalMem)" if read else published,
        },
        peak=peak, half=row["half"],
    )  # fmt: skip


def link_named(name: str) -> Link:
    """Return a link of measured_links.csv.

    >>> link_named("NVLink 4").bandwidth / 1e9
    396.0
    """
    row = one("measured_links", link=name)
    sources = {
        what: row[f"{what}_source"] for what in ("latency", "bandwidth", "bus") if row[f"{what}_source"]
    }
    columns = [
        name for name, rate in row.items() if name.endswith("_Bps") and rate and name != "bandwidth_Bps"
    ]
    bus = {Kind[column.removesuffix("_Bps").upper()]: float(row[column]) for column in columns}
    latency, bandwidth = float(row["latency_s"]), float(row["bandwidth_Bps"])
    return Link(name, latency, bandwidth, bus, sources, float(row["ramp"] or 0))


def machine_names() -> list[str]:
    """Return the names of machines.csv: machines that were measured as a whole, and others to list."""
    return [row["name"] for row in rows("machines")]


def _measured(row: Mapping[str, str]) -> Hardware:
    short = row["device"]
    between = link_named(row["between"]) if row["between"] else None
    device = _core() if short == "cpu" else _device(short)[0]
    link, per_node, nodes = link_named(row["link"]), int(row["per_node"]), int(row["nodes"])
    return Hardware(row["name"], device, link, between, per_node, nodes)


def _core() -> Device:
    """Return a core of this machine's own CPU, of which each rank has one."""
    return Device(
        "CPU core", {"float32": 50e9, "float64": 25e9}, bandwidth=10e9, host=10e9, blocked_convolutions=True,
        sources={
            "flops": "assumed: 16 float32 operations a cycle (one AVX2 multiply-add) at 3 GHz. Used only to scale "
            "ops of unknown FLOPs to another device; on the CPU itself ops take what was measured",
            "bandwidth": "assumed: one core's share of two memory channels",
            "host": "assumed: a copy within memory",
        },
    )  # fmt: skip


def build_machine(
    device: str | Device, *, nodes: int = 1, per_node: int = 8, nic: str | float | None = None
) -> Hardware:
    """Return a machine of any size; `mk.hardware` explains the arguments."""
    for name, value in (("nodes", nodes), ("per_node", per_node)):
        if (whole(value) or 0) < 1:
            raise ValueError(f"hardware({name}={value!r}): a whole number, 1 or more, such as {name}=8")
    if isinstance(device, Device):
        short, made, link = device.name, device, _through_host(device)
    else:
        short, made, link = device, *_device(device)
    between, called = None, "nvlink"
    if nodes > 1:
        if nic is None:
            raise ValueError(
                f"hardware({short!r}, nodes={nodes}) has no network between its nodes: give nic=, one of "
                f"{', '.join(_cards())}, or its GB/s for each device, such as nic=25"
            )
        between, called = _card(nic)
    title = f"{nodes}x{per_node}-{short}-{called}" if nodes > 1 else f"{per_node}x-{short}"
    return Hardware(title, made, link, between, per_node, nodes)


def by_name(name: str) -> Hardware | None:
    """Return the machine of a name, if it has one of these forms; None for another.

        8x-a100-nvlink       a row of machines.csv that was measured, also with another number of devices
        64x8-h100-ndr        nodes, devices per node, device, network card
        4x-l40s, h100        devices of a node; 8 if they are left out

    Raises:
        ValueError: it is of such a form, and there is no such device or card.

    >>> by_name("2x8-h100-ib").between.name, by_name("4x8-h100-ndr").devices, by_name("h100").devices
    ('InfiniBand NDR, a card a GPU', 32, 8)
    """
    measured = {row["name"]: row for row in rows("machines") if row["link"]}
    if name in measured:
        return _measured(measured[name])
    cards = re.fullmatch(r"([1-9]\d*)(x-.+)", name)
    for known, row in measured.items() if cards and name not in machine_names() else ():
        if cards and known.lstrip("0123456789") == cards[2]:
            return replace(_measured(row), name=name, per_node=int(cards[1]))
    nics = "|".join(map(re.escape, _cards()))
    if several := re.fullmatch(rf"(\d+)x(\d+)-([a-z0-9-]+?)-({nics})", name):
        nodes, per_node = int(several[1]), int(several[2])
        return replace(build_machine(several[3], nodes=nodes, per_node=per_node, nic=several[4]), name=name)
    alone = re.fullmatch(r"(?:(\d+)x-)?([a-z0-9-]+?)(-nvlink)?", name)
    if alone and alone[2] in device_names() and (alone[1] or not alone[3]):
        made = build_machine(alone[2], per_node=int(alone[1] or A_NODE))
        return replace(made, name=name) if alone[1] else made
    return None


def _device(short: str) -> tuple[Device, Link]:
    """Return a device of the catalogue, and the link between such devices inside a node."""
    names = device_names()
    if short not in names:
        near = get_close_matches(str(short).lower(), names, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"hardware({short!r}): the catalogue has {', '.join(names)}.{hint}")
    row = names[short]["device"]
    device = _gpu(row, names[short]["mamf"])
    if link := names[short]["link"]:
        return device, link_named(link)
    line = one("devices", device=row)["link_GBps"]
    if not line:
        return device, _through_host(device)
    source = f"assumed: 0.78 of the line rate of {line} GB/s, as rings reach on NVLink 3"
    sources = {"latency": "assumed: NVLink 3's", "bandwidth": source}
    return device, Link(f"link of {row}", 4e-6, 0.78 * float(line) * GIGA, {}, sources, RAMP)


def _through_host(device: Device) -> Link:
    """Return the link of devices that reach each other over PCIe, with the shares that eight A100 reach over it."""
    shares = {
        Kind.ALL_REDUCE: 0.4176, Kind.ALL_GATHER: 0.4497, Kind.REDUCE_SCATTER: 0.3688, Kind.ALL_TO_ALL: 0.2754,
    }  # fmt: skip
    source = "assumed: the shares of the line rate that 8 A100 reach over PCIe 4 (MooreThreads/SimuMax)"
    return Link(
        "PCIe through the host", 10e-6, 0.8 * device.host,
        {kind: share * device.host for kind, share in shares.items()},
        {"latency": "assumed: 10 us", "bandwidth": source, "bus": source}, RAMP,
    )  # fmt: skip


def _card(nic: str | float) -> tuple[Link, str]:
    """Return the link of a network card for each device, and how a machine's name calls it."""
    cards = _cards()
    if isinstance(nic, str):
        if (called := nic.lower()) not in cards:
            raise ValueError(
                f"nic={nic!r}: one of {', '.join(cards)}, or GB/s for each device, such as nic=25"
            )
        rate, latency = float(cards[called]["GBps"]), float(cards[called]["latency_s"])
        what = cards[called]["what"]
    elif not (real(nic) or 0) > 0:
        raise ValueError(
            f"nic={nic!r}: GB/s for each device in one direction, such as nic=25, or a name: {', '.join(cards)}"
        )
    else:
        rate, latency, what = float(nic), LATENCY, f"network, {nic:g} GB/s per device"
        called = f"{nic:g}GBps"
    source = f"assumed: {REACHED} of the published line rate, {rate:g} GB/s per device"
    sources = {"bandwidth": source, "latency": "assumed"}
    return Link(what, latency, REACHED * rate * GIGA, {}, sources, RAMP), called


# ---- enough devices for a number of ranks


def check_enough(machine: Hardware, ranks: int, call: str) -> None:
    """Check that a machine has a device for each rank of a `call`.

    >>> from mpkit.devices.catalogue import hardware
    >>> check_enough(hardware("2x-rtx-4090"), 4, "timeline")
    Traceback (most recent call last):
    ...
    ValueError: timeline(hardware='2x-rtx-4090'): 4 ranks, and it has 2 devices. More of them: hardware='4x-rtx-4090'
    """
    if ranks > machine.devices:
        raise ValueError(
            f"{call}(hardware={machine.name!r}): {ranks} ranks, and it has {machine.devices} device"
            f"{'s' * (machine.devices > 1)}. {_larger(machine, ranks)}"
        )


def enough_a100(ranks: int) -> str:
    """Return the name of a machine of A100 that has a device for each rank.

    >>> enough_a100(4), enough_a100(64)
    ('8x-a100-nvlink', '8x8-a100-hdr')
    """
    return "8x-a100-nvlink" if ranks <= A_NODE else f"{-(-ranks // A_NODE)}x8-a100-hdr"


def _larger(machine: Hardware, ranks: int) -> str:
    """Return the advice which machine of the same devices has enough of them."""
    nodes = -(-ranks // machine.per_node)
    if machine.between is not None:
        return f"More nodes: hardware=dataclasses.replace(mk.hardware({machine.name!r}), nodes={nodes})"
    cards = re.fullmatch(r"(\d+)x-(.+)", machine.name)
    if cards and ranks <= A_NODE:
        return f"More of them: hardware='{ranks}x-{cards[2]}'"
    short = [name for name, row in device_names().items() if row["device"] == machine.device.name]
    if short:
        return f"More nodes: hardware=mk.hardware({short[0]!r}, nodes={-(-ranks // A_NODE)}, nic='ndr')"
    return f"A larger machine of your own: dataclasses.replace(hardware, per_node={ranks})"
