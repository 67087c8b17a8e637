"""What ops and collectives cost, and where the figures are from."""

from __future__ import annotations

import numpy as np
import pytest

import mpkit as mk
from benchmarks.fit_links import SYSTEMS, fit_all_reduce, fit_cards, fit_loopback, sweep
from mpkit.devices.catalogue.machines import link_named
from mpkit.devices.hardware import wire_factor
from mpkit.trace import Kind

SWEEPS = {
    # system: its link, from which payload on, within which factor there, and from 64 MiB on
    "8xA100 NVLink3": ("8x-a100-nvlink", 0, 1.6, 1.15),
    "8xH200 NVLink4 (NVLS from 2MiB)": ("8x-h100-nvlink", 0, 1.3, 1.15),
    "8xB200 NVLink5": ("8x-b200-nvlink", 0, 1.6, 1.4),
    "4x8xB200 EFAv4 8x400G": ("4x8-b200-efa", 2**19, 1.3, 1.2),
}


@pytest.mark.parametrize("system", SWEEPS)
def test_links_come_near_the_times_that_were_measured(system: str) -> None:
    name, least, everywhere, large = SWEEPS[system]
    n, payload, seconds = sweep(system, least)
    machine = mk.hardware(name)
    ratio = np.array([machine.time(Kind.ALL_REDUCE, size, range(n)) for size in payload]) / seconds
    off = np.maximum(ratio, 1 / ratio)
    assert off.max() < everywhere
    assert off[payload >= 2**26].max() < large


def test_the_rows_of_measured_links_are_the_fits() -> None:
    for name, system in SYSTEMS.items():
        link, fit = link_named(name), fit_all_reduce(system)
        assert (link.latency, link.bus[Kind.ALL_REDUCE]) == pytest.approx(fit)
    card, (latency, rates) = link_named("EFA v4, a card a GPU"), fit_loopback()
    assert (card.latency, card.bandwidth) == pytest.approx(fit_cards())
    assert link_named("loopback").latency == pytest.approx(latency)
    assert dict(link_named("loopback").bus) == pytest.approx(rates)


def test_a_card_has_the_memory_that_its_driver_reports() -> None:
    assert mk.hardware("8x-h100-nvlink").device.memory == int(79.18 * 2**30)


@pytest.mark.parametrize("name", list(mk.hardware()))
def test_every_machine_has_sane_figures_and_their_sources(name: str) -> None:
    machine = mk.hardware(name)
    assert machine.name == name
    links = [link for link in (machine.link, machine.between) if link is not None]
    for link in links:
        assert 0 < link.latency < 1e-3
        assert 1e9 < link.bandwidth < 1e12
        assert {"latency", "bandwidth"} <= link.sources.keys()
        assert "bus" in link.sources or not link.bus
    device = machine.device
    assert device.rate() > 0
    assert device.rate("bfloat16") >= device.rate()
    assert device.rate("no such dtype") == device.rate()
    for source in [*device.sources.values(), *(s for link in links for s in link.sources.values())]:
        assert any(mark in source for mark in ("published", "reported", "fitted", "assumed")), source


def test_wire_factors_are_those_of_nccl_tests() -> None:
    """nccl-tests, doc/PERFORMANCE.md."""
    for n in (2, 3, 8):
        assert wire_factor(Kind.ALL_REDUCE, n) == 2 * (n - 1) / n
        for kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL):
            assert wire_factor(kind, n) == (n - 1) / n
        for kind in (Kind.BROADCAST, Kind.REDUCE, Kind.SEND):
            assert wire_factor(kind, n) == 1


def test_the_order_of_ranks_decides_who_talks_across_nodes() -> None:
    mesh = mk.Plan(pp=2, dp=2, tp=2).mesh
    wires = mk.devices.Link("bus", 1e-6, 80e9), mk.devices.Link("network", 5e-6, 25e9)
    device = mk.devices.Device("d", {"float32": 1e12}, 1e11)
    for outermost in ("pp", "dp", "tp"):
        order = mesh.order(outermost)
        machine = mk.devices.Hardware("toy", device, *wires, per_node=4, nodes=2, order=order)
        assert sorted(order) == list(range(8))
        for axis in ("pp", "dp", "tp"):
            links = {machine.link_of(group).name for group in mesh.groups(axis)}
            assert links == {"network" if axis == outermost else "bus"}
    assert mesh.order("pp") == mesh.order() == tuple(range(8))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("8x-h10", "'8x-h10'.*'8x-h100-pcie'.*mpkit.hardware"),
        ("abacus", "none of that name"),
        (8, "give a name"),
    ],
)
def test_machines_that_there_are_not(name: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        mk.hardware(name)  # type: ignore[call-overload]
