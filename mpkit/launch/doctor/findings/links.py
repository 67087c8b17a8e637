"""What connects the GPUs: NVLink, PCI Express and its lanes, P2P. Costs are those of an all-reduce on a ring."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from mpkit.devices.hardware import wire_factor
from mpkit.launch.doctor.findings.finding import CheckupFinding, Level, plural
from mpkit.launch.doctor.parsers.facts import Facts, Unknown
from mpkit.launch.doctor.parsers.pci import PciGpu
from mpkit.launch.doctor.parsers.topology import ACROSS_CPU, WHY_NOT, Topology
from mpkit.trace import Kind

__all__ = ["links", "pci"]

SLOW = ("slow scaling",)
ENOUGH = 12e9
"""Bytes per second per GPU that the guide takes for enough: PCIe 4 x8 or 3 x16, some 16 GB/s by the data sheet."""


def links(facts: Facts) -> Iterator[CheckupFinding]:
    """Yield how the GPUs are connected."""
    if len(facts.gpu_list) < 2:
        return
    if isinstance(facts.topology, Unknown):
        yield CheckupFinding(
            "links", Level.UNCHECKED, "How the GPUs are connected.", facts.topology.why, topics=SLOW
        )
        return
    yield _topology(facts, facts.topology)
    yield from _nvlink_down(facts)
    yield from _p2p(facts)


def _topology(facts: Facts, topology: Topology) -> CheckupFinding:
    pairs = Counter(topology.links.values())
    seen = "nvidia-smi topo -m, pairs: " + ", ".join(f"{count} x {kind}" for kind, count in pairs.items())
    if all(topology.nvlinks(*pair) for pair in topology.links):
        counts = sorted({topology.nvlinks(*pair) for pair in topology.links})
        return CheckupFinding(
            "links",
            Level.FINE,
            f"Every pair of GPUs has NVLink ({', '.join(f'NV{n}' for n in counts)}).",
            f"{seen}{_rate(facts)}",
            topics=SLOW,
        )
    if any(topology.nvlinks(*pair) for pair in topology.links):
        apart = next(pair for pair in topology.links if not topology.nvlinks(*pair))
        return CheckupFinding(
            "links",
            Level.NOTE,
            f"Some pairs have NVLink and others not: GPU {apart[0]} and {apart[1]} talk over {topology.links[apart]}.",
            seen,
            "a tensor-parallel group that crosses to a GPU without NVLink goes at the speed of PCI Express; rings of "
            "nccl over all GPUs find a way along NVLinks where there is one",
            f"put groups of tp on GPUs that NVLink joins: mk.Cluster(devices={_clique(topology)})",
            SLOW,
        )
    n, how = topology.gpus, topology.worst
    across = [pair for pair in topology.links if topology.kind(*pair) in ACROSS_CPU]
    seconds = wire_factor(Kind.ALL_REDUCE, n) * 4e9 / ENOUGH
    return CheckupFinding(
        "links",
        Level.COSTS if across else Level.NOTE,
        f"No NVLink: the GPUs talk over PCI Express{', through the CPU' if across else ''} ({how} at worst).",
        seen,
        f"an all-reduce of 1 G parameters in float32 takes {seconds:.2g} s among {n} GPUs at 12 GB/s (the catalogue's "
        "figure for PCIe 4 without P2P), where NVLink 3 takes some "
        f"{wire_factor(Kind.ALL_REDUCE, n) * 4e9 / 211e9 * 1e3:.2g} ms",
        "without NVLink pipelines beat tensor parallelism and ZeRO: mk.Plan.gpipe(n, m), or DDP with fewer, larger "
        "steps; run.timeline(hardware='2x-rtx-4090') shows the difference",
        SLOW,
    )


def _rate(facts: Facts) -> str:
    if isinstance(facts.nvlink, Unknown) or not any(gpu.rates for gpu in facts.nvlink):
        return ""
    best = max(sum(gpu.rates) for gpu in facts.nvlink)
    return f"; nvlink --status: {best / 1e9:.4g} GB/s per GPU and direction"


def _clique(topology: Topology) -> list[int]:
    """Return a largest set of GPUs of which each pair has NVLink, found greedily from each GPU."""
    best: list[int] = []
    for first in range(topology.gpus):
        found = [first]
        for other in range(topology.gpus):
            if other != first and all(topology.nvlinks(other, each) for each in found):
                found.append(other)
        best = max(best, sorted(found), key=len)
    return best


def _nvlink_down(facts: Facts) -> Iterator[CheckupFinding]:
    if isinstance(facts.nvlink, Unknown):
        return
    most = max((len(gpu.rates) for gpu in facts.nvlink), default=0)
    for gpu in facts.nvlink:
        if (gpu.rates and len(gpu.rates) < most) or (gpu.down and gpu.rates):
            down = max(most - len(gpu.rates), len(gpu.down))
            yield CheckupFinding(
                "links",
                Level.COSTS,
                f"GPU {gpu.gpu} has {plural(len(gpu.rates), 'NVLink')} up, and {down} down.",
                f"nvidia-smi nvlink --status: link {', '.join(map(str, gpu.down)) or 'missing'} inactive",
                f"rings go at the pace of this GPU, {sum(gpu.rates) / 1e9:.4g} GB/s",
                "nvidia-smi nvlink -e -i "
                + str(gpu.gpu)
                + "  # error counters; then reseat the bridge, or restart "
                "nvidia-fabricmanager",
                SLOW,
            )


def _p2p(facts: Facts) -> Iterator[CheckupFinding]:
    if isinstance(facts.p2p, Unknown):
        yield CheckupFinding(
            "links",
            Level.UNCHECKED,
            "Whether GPUs read each other's memory (P2P).",
            facts.p2p.why,
            topics=SLOW,
        )
        return
    refused = {why for why in facts.p2p.values() if why != "OK"}
    if not refused:
        yield CheckupFinding(
            "links", Level.FINE, "All GPUs read each other's memory directly (P2P).", "nvidia-smi topo -p2p r"
        )
        return
    reasons = "; ".join(WHY_NOT.get(why, why) for why in sorted(refused))
    count = sum(why != "OK" for why in facts.p2p.values())
    yield CheckupFinding(
        "links",
        Level.COSTS,
        f"{plural(count, 'pair')} of GPUs cannot read each other's memory (P2P): {reasons}.",
        f"nvidia-smi topo -p2p r: {', '.join(sorted(refused))}",
        "nccl copies through the host's memory: some 12 GB/s between two RTX 4090 (the catalogue), and CPU time",
        "if nccl hangs there: NCCL_P2P_DISABLE=1; on servers turn ACS off in the BIOS (nccl's troubleshooting guide)",
        ("slow scaling", "nccl time-outs"),
    )


def pci(facts: Facts) -> Iterator[CheckupFinding]:
    """Yield lanes and generation of PCI Express, against what card and slot could do."""
    if not facts.gpu_list and (isinstance(facts.pci, Unknown) or not facts.pci):
        return
    if isinstance(facts.pci, Unknown):
        yield CheckupFinding(
            "PCI Express", Level.UNCHECKED, "Lanes and generation.", facts.pci.why, topics=SLOW
        )
        return
    silent = [card for card in facts.pci if card.now is None or card.card is None]
    if silent or not facts.pci:
        yield CheckupFinding(
            "PCI Express",
            Level.UNCHECKED,
            "Lanes and generation.",
            f"lspci says nothing of {', '.join(card.address for card in silent) or 'GPUs'}: sudo lspci -vv may",
            topics=SLOW,
        )
    whole = [card for card in facts.pci if card.now is not None and card.card is not None]
    findings = [finding for card in whole if (finding := _narrow(card)) is not None]
    yield from findings
    if whole and not findings:
        links = ", ".join(
            f"{count} x {link}" for link, count in Counter(str(each.card) for each in whole).items()
        )
        yield CheckupFinding(
            "PCI Express",
            Level.FINE,
            f"All lanes are in use: {links}.",
            "lspci -vv: LnkSta is LnkCap",
            topics=SLOW,
        )


def _narrow(card: PciGpu) -> CheckupFinding | None:
    """Return a finding where fewer lanes, or a lower generation, are in use than the card could."""
    assert card.card is not None and card.now is not None
    slot = card.slot
    lanes = card.now.lanes
    generation = min(card.card.generation, slot.generation) if slot else card.card.generation
    could = card.card.rate
    does = type(card.now)(generation, lanes).rate
    if does >= 0.95 * could:
        return None
    seen = f"lspci -vv: {card.address} LnkCap {card.card}, LnkSta {card.now}" + (
        f", slot {slot}" if slot else ""
    )
    if slot is not None and slot.lanes < card.card.lanes and lanes >= slot.lanes:
        why = f"its slot has {slot.lanes} lanes"
        fix = "a slot with all lanes: the board's manual says which share theirs (x16/x8/x8 is common)"
    elif lanes < card.card.lanes:
        why = f"{lanes} of {card.card.lanes} lanes are in use"
        fix = "shut down, reseat card and riser, and see in the BIOS whether the slot shares its lanes with a drive"
    else:
        why = f"its slot is of generation {generation}"
        fix = "set the slot's generation in the BIOS to Auto, or use a newer board"
    enough = does >= ENOUGH
    return CheckupFinding(
        "PCI Express",
        Level.NOTE if enough else Level.COSTS,
        f"{card.name} at {card.address}: {why}, {does / 1e9:.3g} GB/s of the {could / 1e9:.3g} GB/s that it could do.",
        seen,
        f"what goes to and from this GPU takes {could / does:.2g} times as long"
        + (": enough by the guide's rule (PCIe 4 x8 is PCIe 3 x16, some 16 GB/s)" if enough else ""),
        fix,
        SLOW,
    )
