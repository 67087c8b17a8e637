"""What ranks measured here, beside the catalogue: messages, all-reduces, and loading data."""

from __future__ import annotations

from collections.abc import Iterator

from mpkit.common.units import seconds
from mpkit.devices.catalogue import hardware
from mpkit.devices.hardware import Link
from mpkit.launch.doctor.findings.finding import CheckupFinding, Level
from mpkit.launch.doctor.parsers.facts import Facts, Unknown
from mpkit.launch.doctor.probes.measure import LoaderSpeed, RankMeasurements
from mpkit.trace import Kind

__all__ = ["find_measured"]

SLOWER = 3.0
"""A link that is slower than the catalogue's by this factor costs."""


def find_measured(facts: Facts) -> Iterator[CheckupFinding]:
    """Yield the speed of the link between ranks beside the catalogue's, and the speed of loading data."""
    found = facts.measured
    if isinstance(found, Unknown):
        yield CheckupFinding(
            "measured", Level.UNCHECKED, "The link between ranks, and loading data.", found.why
        )
        return
    yield from _link(facts, found)
    if found.loading is not None:
        yield _check_loading(found.loading)


def _link(facts: Facts, found: RankMeasurements) -> Iterator[CheckupFinding]:
    expected, name = _expected_link(facts, found)
    rate = found.all_reduce / 1e9
    seen = (
        f"{found.ranks} ranks over {found.backend}: a message of 4 bytes takes {seconds(found.latency)}, one of "
        f"{found.nbytes >> 20} MiB goes at {found.bandwidth / 1e9:.3g} GB/s, "
        f"an all-reduce at {rate:.3g} GB/s on the wire"
    )
    if expected is None:
        yield CheckupFinding(
            "measured", Level.NOTE, "The link between ranks; the catalogue has none like it.", seen
        )
        return
    wanted = expected.bus.get(Kind.ALL_REDUCE, expected.bandwidth)
    seen += (
        f"; the catalogue's {name}: {seconds(expected.latency)}, {expected.bandwidth / 1e9:.3g} and "
        f"{wanted / 1e9:.3g} GB/s"
    )
    slower = max(wanted / found.all_reduce, expected.bandwidth / found.bandwidth)
    busy = not isinstance(facts.load, Unknown) and facts.load > facts.process.cpus + 0.5
    if slower > SLOWER and not busy:
        yield CheckupFinding(
            "measured",
            Level.COSTS,
            f"The link between ranks is {slower:.2g} times slower than the catalogue's.",
            seen,
            f"communication takes {slower:.2g} times as long as run.timeline() predicts",
            "the findings on links above; or put what is measured into the prediction: mk.devices.Link('mine', "
            f"latency={found.latency:.2g}, bandwidth={found.bandwidth:.3g})",
            ("slow scaling",),
        )
    else:
        also = "; others use the CPUs, so it may be faster" if slower > SLOWER else ""
        yield CheckupFinding(
            "measured",
            Level.NOTE if also else Level.FINE,
            "The link between ranks, beside the catalogue's.",
            seen + also,
            topics=("slow scaling",),
        )


def _expected_link(facts: Facts, found: RankMeasurements) -> tuple[Link | None, str]:
    """Return the link of the catalogue that this machine's should be like."""
    if found.backend == "gloo":
        return hardware("cpu").link, "loopback"
    if isinstance(facts.topology, Unknown) or facts.topology.gpus < 2:
        return None, ""
    if all(facts.topology.nvlinks(*pair) for pair in facts.topology.links):
        names = facts.gpu_list[0].name if facts.gpu_list else ""
        kinds = {
            "A100": "8x-a100-nvlink",
            "H100": "8x-h100-nvlink",
            "H200": "8x-h200-nvlink",
            "B200": "8x-b200-nvlink",
        }
        kind = next((machine for part, machine in kinds.items() if part in names), None)
        return (hardware(kind).link, kind) if kind else (None, "")
    return hardware("2x-rtx-4090").link, "PCIe 4 without P2P"


def _check_loading(found: LoaderSpeed) -> CheckupFinding:
    best = max(found.rates, key=lambda workers: found.rates[workers])
    each = ", ".join(
        f"{workers} workers {rate:,.0f} samples/s ({rate * found.nbytes / 1e6:,.0f} MB/s)"
        for workers, rate in found.rates.items()
    )
    seen = f"DataLoader, {found.what}: {each}"
    if best == 0 or found.rates[best] < 1.3 * found.rates[0]:
        what = "Loading data: workers make it no faster here."
        more = "" if found.own else "mk.doctor(data=my_dataset) measures yours, whose samples may take longer"
        return CheckupFinding(
            "measured", Level.FINE, what, seen, fix=more, topics=("gpu 0 busier", "slow scaling")
        )
    gain = found.rates[best] / found.rates[0]
    return CheckupFinding(
        "measured",
        Level.NOTE,
        f"Loading data is {gain:.2g} times faster with {best} workers.",
        seen,
        f"a step that needs more than {found.rates[0]:,.0f} samples/s per rank waits for its data without workers",
        f"mk.Batches(dataset, batch_size=..., num_workers={best}); DataLoader(num_workers={best})",
        ("gpu 0 busier", "slow scaling"),
    )
