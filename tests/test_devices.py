"""Which rank gets which device, and what ops and collectives cost there."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

import mpkit as mk
from benchmarks.fit_links import SYSTEMS, fit_all_reduce, fit_cards, fit_loopback, sweep
from mpkit.devices.catalogue.machines import link_named
from mpkit.devices.hardware import wire_factor
from mpkit.devices.local import gpus as local
from mpkit.devices.local.choose import DeviceChoice, choose
from mpkit.devices.local.gpus import Inventory, LocalDevice, inventory_of_gpus, unnamed_devices, visible
from mpkit.trace import Kind

# ---- Which rank gets which device: chosen from inventories of machines that are no real ones, and on CPUs for real.

A100 = [
    LocalDevice(i, "A100", f"GPU-{i}a5f", f"00000000:0{i}:00.0", 80 << 30, compute=(8, 0)) for i in range(4)
]
T4_AND_A100 = [replace(A100[0], name="T4", memory=15 << 30, compute=(7, 5)), A100[1], A100[2]]


def machine(gpus: list[LocalDevice], **environment: str) -> Callable[[str], Inventory | None]:
    """What `inventory_of` would be on a machine with these GPUs."""
    found = inventory_of_gpus(gpus, environment, len(visible(gpus, environment).devices))
    return lambda kind: found if kind == "cuda" and found.devices else None


FOUR = machine(A100)


@pytest.mark.parametrize(("devices", "ranks", "numbers", "count"), [
    ([2, 0], None, (2, 0), 2),
    (3, None, (3,), 1),
    ("cuda:1", None, (1,), 1),
    ("cuda:1", 3, (1,), 3),
    ("cuda:3, cuda:0", None, (3, 0), 2),
    ("2,0", None, (2, 0), 2),
    (["cuda:1", 2], None, (1, 2), 2),
    ("cuda", None, (0, 1, 2, 3), 4),
    ("gpu:1", None, (1,), 1),
    (range(4), 8, (0, 1, 2, 3), 8),
    ([torch.device("cuda", 1), torch.device("cuda:0")], None, (1, 0), 2),
    ([0, 0], None, (0, 0), 2),
])  # fmt: skip
def test_devices_as_people_write_them(
    devices: object, ranks: int | None, numbers: tuple[int, ...], count: int
) -> None:
    assert choose(devices, ranks, FOUR) == DeviceChoice("cuda", numbers, count)


@pytest.mark.parametrize(("devices", "ranks", "words"), [
    (
        [4],
        None,
        r"names cuda:4, and torch sees 4: cuda:0 to cuda:3 \(no variable is set.*such as devices=\[0, 1\]",
    ),
    ([-1], None, "-1 is no device"),
    ([True], None, "True is no device"),
    ([1.0], None, "1.0 is no device"),
    ("cuba:0", None, "did you mean 'cuda'"),
    ("cuda:x", None, "'cuda:x' is no device"),
    ([], None, "names no device"),
    ("", None, "names no device"),
    (["cuda:0", "cpu"], None, "mixes cuda and cpu"),
    ([0, 1, 2], 2, "names 3 devices for ranks=2"),
    ("xpu:0", None, "torch sees no xpu device here, it sees cuda"),
    ("mps", None, "torch sees no mps device"),
])  # fmt: skip
def test_devices_that_cannot_be(devices: object, ranks: int | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        choose(devices, ranks, FOUR)


@pytest.mark.parametrize(("kind", "environment", "decided"), [
    ("xpu", {"ZE_AFFINITY_MASK": "0"}, "ZE_AFFINITY_MASK=0"),
    ("cuda", {"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0"}, "HIP_VISIBLE_DEVICES=0, ROCR_"),
    ("hpu", {"CUDA_VISIBLE_DEVICES": "0"}, "no variable is set"),
])  # fmt: skip
def test_other_accelerators_name_their_variables(
    kind: str, environment: dict[str, str], decided: str
) -> None:
    assert unnamed_devices(kind, 2, environment).decided_by.startswith(decided)


def test_a_cluster_on_gpus_prints_who_is_where_and_which_variable_decided(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local, "inventory_of", machine(T4_AND_A100, CUDA_VISIBLE_DEVICES="1,0"))
    with mk.Cluster(devices=[1, 0]) as cluster:
        assert (cluster.ranks, cluster.device, cluster.devices, cluster.backend) == (2, "cuda", 2, "nccl")
        first, head, *rows = str(cluster).splitlines()
        assert first == "Cluster(ranks=2, device='cuda')  # nccl"
        assert head.split() == ["rank", "device", "name", "UUID", "or", "bus", "id", "memory"]
        # CUDA counts A100, A100, T4; of these the second and the first are visible.
        assert [row.split() for row in rows[:2]] == [
            ["0", "cuda:1", "A100", "GPU-1a5f", "80.0", "GiB"],
            ["1", "cuda:0", "A100", "GPU-2a5f", "80.0", "GiB"],
        ]
        assert rows[2] == "decided by: CUDA_VISIBLE_DEVICES=1,0"
        assert "CUDA_DEVICE_ORDER is not set" in capsys.readouterr().out
        assert cluster._repr_html_().count("<tr>") == 3
        shared = cluster.resized(3)
        assert shared.backend == "gloo"  # ranks 0 and 2 share cuda:1
        assert [row.split()[1] for row in str(shared).splitlines()[2:5]] == ["cuda:1", "cuda:0", "cuda:1"]


# ---- What ops and collectives cost, and where the figures are from.

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


@pytest.mark.parametrize(("name", "words"), [
    ("8x-h10", "'8x-h10'.*'8x-h100-pcie'.*mpkit.hardware"),
    ("abacus", "none of that name"),
    (8, "give a name"),
])  # fmt: skip
def test_machines_that_there_are_not(name: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        mk.hardware(name)  # type: ignore[call-overload]
