"""Parsers read what the commands printed on other people's machines: `tests/doctor/data`, each file with its source."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpkit.devices.local.nvidia_smi import parse_gpus
from mpkit.launch.doctor.parsers.driver import parse_driver
from mpkit.launch.doctor.parsers.pci import PciLink, parse_pci
from mpkit.launch.doctor.parsers.topology import Topology, parse_nvlink, parse_p2p, parse_topology
from tests.doctor.stored import CASES, DATA, text

CUBE = {  # the hybrid cube mesh: NVLinks of each GPU to those of a higher number
    0: {1: 1, 2: 1, 3: 2, 4: 2}, 1: {2: 2, 3: 1, 5: 2}, 2: {3: 2, 6: 1}, 3: {7: 1},
    4: {5: 1, 6: 1, 7: 2}, 5: {6: 2, 7: 1}, 6: {7: 2},
}  # fmt: skip


def topology(case: str) -> Topology:
    return parse_topology(text(case, "topology"))


@pytest.mark.parametrize(
    ("case", "gpus", "cards", "kinds", "cpus", "numa"),
    [
        ("8x-a100-nvswitch", 8, 12, {"NV12"}, "48-63,176-191", "3"),
        ("8x-h100-nvswitch", 8, 10, {"NV18"}, "0-55,112-167", "0"),
        ("4x-rtx-4090", 4, 0, {"PHB", "SYS"}, "0-31,64-95", "0"),
        ("2x-rtx-3090-nvlink", 2, 0, {"NV4"}, "0-23", ""),
        ("dgx-1-v100", 8, 4, {"NV1", "NV2", "SYS"}, "0-19,40-59", ""),
        ("mixed-a100-t4", 3, 0, {"SYS", "PHB"}, "0-15", "0"),
        ("1x-titan-rtx-pcie-x8", 1, 0, set(), "0-15", "0"),
        ("1x-t4-virtual", 1, 0, set(), "0-3", ""),
    ],
)
def test_the_matrix_of_each_machine(
    case: str, gpus: int, cards: int, kinds: set[str], cpus: str, numa: str
) -> None:
    found = topology(case)
    assert (found.gpus, found.network_cards) == (gpus, cards)
    assert set(found.links.values()) == kinds
    assert len(found.links) == gpus * (gpus - 1) // 2
    assert (found.cpus[0], found.numa[0]) == (cpus, numa)


def test_the_cube_mesh_of_a_dgx_1() -> None:
    found = topology("dgx-1-v100")
    assert {pair: found.nvlinks(*pair) for pair in found.links if found.nvlinks(*pair)} == {
        (a, b): n for a, row in CUBE.items() for b, n in row.items()
    }
    assert found.worst == "SYS"
    assert all(
        sum(found.nvlinks(a, b) for b in range(8) if b != a) == 6 for a in range(8)
    )  # each V100 has six


@pytest.mark.parametrize(
    ("case", "links", "each"),
    [
        ("8x-a100-nvswitch", 12, 25e9), ("8x-h100-nvswitch", 18, 26.562e9), ("2x-rtx-3090-nvlink", 4, 14.062e9),
        ("dgx-1-v100", 6, 25.781e9), ("4x-rtx-4090", 0, 0),
    ],
)  # fmt: skip
def test_nvlinks(case: str, links: int, each: float) -> None:
    found = parse_nvlink(text(case, "nvlink"))
    assert [gpu.gpu for gpu in found] == list(range(len(found)))
    assert all(gpu.rates == (each,) * links and not gpu.down for gpu in found)


def test_p2p() -> None:
    assert set(parse_p2p(text("8x-a100-nvswitch", "p2p")).values()) == {"OK"}
    assert set(parse_p2p(text("4x-rtx-4090", "p2p")).values()) == {"GNS"}
    cube = parse_p2p(text("dgx-1-v100", "p2p"))
    assert {pair for pair, word in cube.items() if word == "OK"} == {
        (a, b) for a, row in CUBE.items() for b in row
    }


def test_lanes_of_a_card_in_a_slot_that_has_more() -> None:
    [card] = parse_pci(text("1x-titan-rtx-pcie-x8", "pci"))
    assert (card.address, card.name) == ("01:00.0", "TU102 [TITAN RTX]")
    assert (card.card, card.now, card.slot) == (PciLink(3, 16), PciLink(1, 8), PciLink(3, 16))
    assert card.card is not None and card.card.rate == pytest.approx(15.76e9)


def test_lanes_of_two_cards_of_which_one_is_in_a_narrow_slot() -> None:
    wide, narrow = parse_pci(text("2x-rtx-3090-nvlink", "pci"))
    assert (wide.slot, narrow.slot) == (PciLink(4, 16), PciLink(4, 8))
    assert (wide.now, narrow.now) == (PciLink(1, 16), PciLink(1, 8))


def test_lspci_without_root_names_the_card_and_no_lanes() -> None:
    [card] = parse_pci(text("1x-t4-virtual", "pci"))
    assert (card.name, card.card, card.now, card.slot) == ("TU104GL [Tesla T4]", None, None, None)


def test_lspci_with_domains_and_class_codes() -> None:
    """`lspci -D -nn -vv`, as the issue open-mpi/hwloc 653 shows an A100."""
    [card] = parse_pci(
        "0000:d9:01.0 PCI bridge [0604]: Intel Corporation Device 347a\n"
        "\tBus: primary=d9, secondary=da, subordinate=da\n\t\tLnkCap:\tPort #1, Speed 16GT/s, Width x16, ASPM L1\n"
        "0000:da:00.0 3D controller [0302]: NVIDIA Corporation GA100 [A100 SXM4 40GB] [10de:20b0] (rev a1)\n"
        "\t\tLnkCap:\tPort #0, Speed 16GT/s, Width x16, ASPM not supported\n"
        "\t\tLnkSta:\tSpeed 16GT/s (ok), Width x16 (ok)\n"
    )
    assert (card.address, card.slot) == ("0000:da:00.0", PciLink(4, 16))


@pytest.mark.parametrize("case", CASES)
def test_gpus_and_drivers(case: str) -> None:
    gpus = parse_gpus(text(case, "gpus"))
    assert [gpu.index for gpu in gpus] == list(range(len(gpus)))
    assert all(gpu.memory > 14 << 30 and gpu.compute is not None for gpu in gpus)
    driver = parse_driver(text(case, "driver"))
    assert driver.release == gpus[0].driver
    assert driver.cuda is not None and driver.cuda >= (11, 0)


@pytest.mark.parametrize(
    "path", sorted(DATA.glob("*/*.txt")), ids=lambda path: f"{path.parent.name}/{path.stem}"
)
def test_every_stored_output_says_where_its_shape_is_from(path: object) -> None:
    first = path.read_text(encoding="utf-8").splitlines()[0]  # type: ignore[attr-defined]
    assert first.startswith(("## Shape: ", "## Composed"))


@pytest.mark.parametrize("parse", [parse_topology, parse_p2p, parse_driver])
@pytest.mark.parametrize(
    "said", ["", "No devices were found", "Failed to initialize NVML: Driver/library version mismatch"]
)
def test_other_text_is_refused(parse: object, said: str) -> None:
    with pytest.raises(ValueError, match="nvidia-smi"):
        parse(said)  # type: ignore[operator]


@given(st.text())
def test_no_text_breaks_a_parser(said: str) -> None:
    for parse in (parse_topology, parse_p2p, parse_driver, parse_gpus):
        with suppress(ValueError):
            parse(said)  # type: ignore[operator]
    parse_nvlink(said)
    parse_pci(said)
