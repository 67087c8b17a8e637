"""The machines of the catalogue: each one is a function that says where its figures come from.

In `sources` every figure is *published* (read from a data sheet or a published measurement), *fitted* to published
measurements, or *assumed*, with the reason. An assumed figure is a guess; check it before you rely on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache

from mpkit.devices.catalogue.tables import fit_all_reduce, fit_loopback, one, rows, sweep
from mpkit.devices.hardware import RAMP, Device, Hardware, Link, collective_time
from mpkit.trace import Kind

__all__ = ["GIGA", "INFINIBAND", "MACHINES", "gpu"]

GIGA = 1e9
INFINIBAND = 8e-6
"""Seconds per hop between nodes; assumed."""
ONE_NODE = 1 << 30
"""Devices of the local machine: more than there can be ranks."""


def gpu(name: str, mamf: str | None, guess: float = 0.8) -> Device:
    """Build a device from devices.csv, its rates scaled by the share of the peak that large matrix products reach."""
    row = one("devices", device=name)
    if mamf is not None:
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


def _nvlink(name: str, row: str, system: str, message: str, other: float | None = None) -> Link:
    """Build NVLink through a switch, fitted to an all-reduce sweep. `other`: the bus bandwidth of other collectives."""
    fit = fit_all_reduce(system)
    line = float(one("links", link=row)["GBps"]) * GIGA
    rest = other or fit.bandwidth
    bus = {
        Kind.ALL_REDUCE: fit.bandwidth,
        Kind.ALL_GATHER: rest,
        Kind.REDUCE_SCATTER: rest,
        Kind.ALL_TO_ALL: rest,
    }
    fitted = f"fitted to nccl-tests on {system} ({one('links', link=row)['source']})"
    return Link(
        name, fit.latency, 0.88 * line, bus, {"latency": fitted, "bus": fitted, "bandwidth": message}, RAMP
    )


def cpu() -> Hardware:
    """Build this machine's own CPU: each rank has a core of its own and communicates over loopback."""
    core = Device(
        "CPU core", {"float32": 50e9, "float64": 25e9}, bandwidth=10e9, host=10e9, blocked_convolutions=True,
        sources={
            "flops": "assumed: 16 float32 operations a cycle (one AVX2 multiply-add) at 3 GHz. Used only to scale "
            "ops of unknown FLOPs to another device; on the CPU itself ops take what was measured",
            "bandwidth": "assumed: one core's share of two memory channels",
            "host": "assumed: a copy within memory",
        },
    )  # fmt: skip
    latency, rates = fit_loopback()
    source = f"fitted by mpkit.devices.catalogue.tables.fit_loopback to loopback.csv; {rows('loopback')[0]['source']}"
    link = Link(
        "loopback", latency, rates[Kind.SEND], rates, dict.fromkeys(("latency", "bandwidth", "bus"), source)
    )
    return Hardware("cpu", core, link, per_node=ONE_NODE)


def titan_rtx(nvlink: bool) -> Hardware:
    """Build two TITAN RTX, the machine of the Hugging Face guide's DP and DDP experiment.

    Two figures are fitted by `examples.hugging_face.fit`, one to each of the guide's DDP runs,
    which it plays on tensors without content. The guide's third run, DP, was not used.
    """
    card = gpu("TITAN RTX", None)
    guide = "by examples.hugging_face.fit to the guide's DDP"
    peak = float(one("devices", device="TITAN RTX")["float32_tflops"]) * 1e12
    rates = {"float32": 0.504 * peak, "float16": card.flops["float16"]}
    flops = (
        f"fitted {guide} with NVLink, 510 ms per step: 0.504 of the published {peak / 1e12:g} TFLOP/s (float32); "
        f"{card.sources['flops']} (float16)"
    )
    card = replace(card, flops=rates, sources={**card.sources, "flops": flops})
    latency = 10.9e-6
    latency_source = "published: two RTX 4090 without peer-to-peer (gist.github.com/muellerzr/fbfabd0f)"
    if nvlink:
        line = float(one("links", link="NVLink 2 x2 (TITAN RTX NV2)")["GBps"]) * GIGA
        sources = {
            "latency": f"assumed: that of another pair of cards; {latency_source}",
            "bandwidth": f"assumed: 0.8 of the line rate of {line / GIGA:g} GB/s, since published rings reach 0.78 of "
            "it on NVLink 3 and 0.82 on NVLink 4 (stas00/ml-engineering network/README.md)",
        }
        link = Link("NVLink 2 x2", latency, 0.8 * line, {}, sources)
        return Hardware("2x-titan-rtx-nvlink", card, link, per_node=2)
    why = (
        f"fitted {guide} without NVLink, 657 ms per step: what it takes for 498 MB of gradients, reduced behind the "
        "backward as far as they can be, to end 147 ms later"
    )
    link = Link("PCIe 3 through the host", latency, 1.36e9, {}, {"latency": latency_source, "bandwidth": why})
    return Hardware("2x-titan-rtx", card, link, per_node=2)


def rtx_4090() -> Hardware:
    """Build two RTX 4090: fast cards that can communicate only through the host."""
    row = one("links", link="PCIe 4 no-P2P (2x RTX 4090)")
    source = f"published: {row['note']} ({row['source']})"
    link = Link("PCIe 4 through the host", 10.9e-6, float(row["GBps"]) * GIGA, {},
                {"latency": source, "bandwidth": source})  # fmt: skip
    return Hardware("2x-rtx-4090", gpu("RTX 4090", None), link, per_node=2)


def a100() -> Hardware:
    """Build eight A100 SXM on NVLink 3."""
    assumed = "assumed: 0.88 of the line rate, as a pair reaches on NVLink 4"
    link = _nvlink("NVLink 3", "NVLink 3 (A100, 12 links)", "8xA100 NVLink3", assumed)
    return Hardware("8x-a100-nvlink", gpu("A100 SXM 80GB", "A100 SXM"), link)


def _nvlink_4() -> Link:
    """Build NVLink 4, the link of H100 and H200; measured on H200, whose switch helps with the all-reduce (NVLS)."""
    gathers = float(one("collectives", collective="all_gather", system="8xH200")["bus_GBps"]) * GIGA
    pair = "published: a pair of H200 copies 396.4 of 450 GB/s (stas00/ml-engineering network/README.md)"
    return _nvlink(
        "NVLink 4", "NVLink 4 (H100/H200, 18 links)", "8xH200 NVLink4 (NVLS from 2MiB)", pair, gathers
    )


def h100() -> Hardware:
    """Build eight H100 SXM on NVLink 4."""
    return Hardware("8x-h100-nvlink", gpu("H100 SXM", "H100 SXM"), _nvlink_4())


def h200() -> Hardware:
    """Build eight H200 SXM on NVLink 4."""
    # H200 has H100's arithmetic and more memory.
    return Hardware("8x-h200-nvlink", gpu("H200 SXM", "H100 SXM"), _nvlink_4())


def h100_pcie() -> Hardware:
    """Build eight H100 PCIe without NVLink."""
    line = float(one("links", link="PCIe 5 x16")["GBps"]) * GIGA
    ring = one("links", link="A100 PCIe 8 GPU ring")
    shares = {
        Kind.ALL_REDUCE: 0.4176,
        Kind.ALL_GATHER: 0.4497,
        Kind.REDUCE_SCATTER: 0.3688,
        Kind.ALL_TO_ALL: 0.2754,
    }
    sources = {
        "bus": f"assumed: the shares of the line rate that 8 A100 reach over PCIe 4 ({ring['source']})",
        "bandwidth": "published: copies between host and H200 reach 0.88 of PCIe 5 (stas00/ml-engineering)",
        "latency": f"assumed: 10 us, within the 3 to 30 us of A100 over PCIe 4 ({ring['source']})",
    }
    link = Link(
        "PCIe 5 x16",
        10e-6,
        0.88 * line,
        {kind: share * line for kind, share in shares.items()},
        sources,
        RAMP,
    )
    # The PCIe card is assumed to reach the same share of its peak as the SXM card.
    return Hardware("8x-h100-pcie", gpu("H100 PCIe", "H100 SXM"), link)


def b200() -> Hardware:
    """Build eight B200 SXM on NVLink 5."""
    assumed = "assumed: 0.88 of the line rate, as a pair reaches on NVLink 4"
    ring = float(one("collectives", system="B200 NVLS off (ring)", ranks="8")["bus_GBps"]) * GIGA
    link = _nvlink("NVLink 5", "NVLink 5 (B200, 18 links)", "8xB200 NVLink5", assumed, ring)
    return Hardware("8x-b200-nvlink", gpu("B200 SXM", "B200 SXM"), link)


@cache
def _cards(name: str, source: str) -> Link:
    """Build a link with one 400 Gb/s network card per device, fitted to 4 nodes of 8 B200 over EFA."""
    system, least = "4x8xB200 EFAv4 8x400G", 2**19
    n, payload, seconds = sweep(system, least)
    # Eight devices of a node share the ring's traffic among their eight cards.
    bandwidth, inside = fit_all_reduce(system, least).bandwidth / 8, b200().link

    def card(latency: float) -> Link:
        return Link(name, latency, bandwidth, {}, {"latency": source, "bandwidth": source}, RAMP)

    def squared_error(latency: float) -> float:
        between = card(latency)
        return sum(  # type: ignore[no-any-return]
            (collective_time(Kind.ALL_REDUCE, size, n, 4, inside, between) / took - 1) ** 2
            for size, took in zip(payload.tolist(), seconds.tolist(), strict=True)
        )

    return card(min((microseconds / 1e6 for microseconds in range(1, 101)), key=squared_error))


def two_h100_nodes() -> Hardware:
    """Build two nodes of eight H100, with a 400 Gb/s InfiniBand card for each GPU."""
    source = (
        "assumed: as 4x8 B200 over EFA, whose cards have the same line rate of 50 GB/s (fitted to nccl-tests)"
    )
    sources = {"bandwidth": source, "latency": "assumed: 8 us"}
    between = replace(_cards("InfiniBand NDR, a card a GPU", source), latency=INFINIBAND, sources=sources)
    return Hardware("2x8-h100-ib", gpu("H100 SXM", "H100 SXM"), _nvlink_4(), between, nodes=2)


def four_b200_nodes() -> Hardware:
    """Build four nodes of eight B200, with a 400 Gb/s EFA card for each GPU."""
    between = _cards("EFA v4, a card a GPU", "fitted to nccl-tests on 4x8 B200 over EFA, from 512 KiB on")
    return Hardware("4x8-b200-efa", gpu("B200 SXM", "B200 SXM"), b200().link, between, nodes=4)


MACHINES: Mapping[str, Callable[[], Hardware]] = {
    "cpu": cpu,
    "2x-titan-rtx-nvlink": lambda: titan_rtx(nvlink=True),
    "2x-titan-rtx": lambda: titan_rtx(nvlink=False),
    "2x-rtx-4090": rtx_4090,
    "8x-a100-nvlink": a100,
    "8x-h100-nvlink": h100,
    "8x-h100-pcie": h100_pcie,
    "8x-h200-nvlink": h200,
    "8x-b200-nvlink": b200,
    "2x8-h100-ib": two_h100_nodes,
    "4x8-b200-efa": four_b200_nodes,
}
