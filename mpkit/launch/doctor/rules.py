"""Rules over the facts: whether something holds, and with which numbers. `findings.toml` has the words.

A rule yields the names of findings, each with the values that its words need; "level" among them replaces the level.
Costs of links are those of an all-reduce on a ring.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from typing import Any

from mpkit.common.units import memory_share, memory_text, seconds
from mpkit.devices.catalogue import hardware
from mpkit.devices.hardware import Link, wire_factor
from mpkit.devices.local.gpus import LocalDevice, visible
from mpkit.launch.doctor.probe import Facts
from mpkit.launch.doctor.report import CheckupFinding, plural, variables, words_of_findings
from mpkit.trace import Kind

Found = Iterator[tuple[str, dict[str, Any]]]

USED = 0.1  # the share of a GPU's memory in use by others from which on it is worth a finding
ENOUGH = 12e9
"""Bytes per second per GPU that the guide takes for enough: PCIe 4 x8 or 3 x16, some 16 GB/s by the data sheet."""
LANE_RATES = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""Bytes per second per lane and direction, by generation: the transfer rate less its encoding (8b/10b up to
generation 2, 128b/130b from 3 on, flits in 6). PCI Express Base Specification."""
FAR_TO_NEAR = ("SYS", "NODE", "PHB", "PXB", "PIX")  # the first three lead across the CPU
# Why GPUs cannot read each other's memory, by NVML's codes.
WHY_NOT = {
    "CNS": "the chipset does not support it",
    "GNS": "the GPU does not support it (GeForce cards since the 4090)",
    "TNS": "the topology does not support it",
    "NS": "it is not supported",
    "DR": "the driver's registry key disables it",
    "U": "unknown",
}
RAM_PER_GPU = 16e9  # bytes of system RAM: the guide's rule
SHM = 1 << 30  # bytes of /dev/shm below which workers or nccl may run out; Docker's default: 64 MiB
FILES = 4096  # open files below which several ranks with loaders and sockets may run out
SLOWER = 3.0  # a link that is slower than the catalogue's by this factor costs


def findings(facts: Facts) -> list[CheckupFinding]:
    """Return what all rules find."""
    rules: tuple[Callable[[Facts], Found], ...] = (
        gpus, links, lanes, software, memory, cpus, shared_memory, limits, variables_set, measured_link,
    )  # fmt: skip
    return [_finding(*each) for rule in rules for each in rule(facts)]


def _finding(name: str, values: dict[str, Any]) -> CheckupFinding:
    words = words_of_findings()[name] | {key: values[key] for key in ("level",) if key in values}
    topics = tuple(words.get("topics", ()))
    filled = {key: text.format(**values) for key, text in words.items() if key != "topics"}
    return CheckupFinding(**filled, topics=topics)


def _listed(facts: Facts) -> list[Facts]:
    return list(facts["nvml"].get("gpus", []))


def gpus(facts: Facts) -> Found:
    """Yield whether there are GPUs, torch sees them, they are alike, and other programs use them."""
    nvml, torch = facts["nvml"], facts["torch"]
    if "why" in nvml:
        if nvml["failed"]:
            known = {"No devices were found": "driver-finds-none", "did not answer": "driver-hangs"}
            yield next((name for said, name in known.items() if said in nvml["why"]), "no-driver"), nvml
        elif torch["gpus"]:
            yield "gpus-unknown", {"gpus": plural(torch["gpus"], "GPU"), "why": nvml["why"]}
        else:
            yield "no-gpu", nvml
        return
    counted = Counter(gpu["name"] for gpu in nvml["gpus"])
    listed = ", ".join(f"{count} x {name}" for name, count in counted.items())
    seen = visible(_as_gpus(nvml["gpus"]), facts["environment"])
    values = {"listed": listed, "gpus": plural(len(nvml["gpus"]), "GPU"), "decided_by": seen.decided_by}
    if torch["gpus"] < len(seen.devices):
        why = f": {torch['error']}" if torch["error"] else ""
        values |= {"gpus": plural(len(seen.devices), "GPU"), "seen": torch["gpus"], "why": why}
        yield "gpus-unseen" if torch["cuda"] or torch["hip"] else "gpus-unbuilt", torch | values
    elif len(seen.devices) < len(nvml["gpus"]):
        yield "gpus-hidden", values | {"seen": len(seen.devices)}
    else:
        yield "gpus", values
    for note in seen.wrong:
        yield "gpus-misnamed", {"note": note, "decided_by": seen.decided_by, "fix": seen.fix}
    yield from _alike(facts)
    for number, gpu in enumerate(nvml["gpus"]):
        if gpu["memory"] and gpu["used"] > USED * gpu["memory"]:
            busy = f", busy {gpu['busy']} % of the time" if gpu["busy"] else ""
            share = memory_share(gpu["used"], gpu["memory"])
            yield "gpu-used", {"gpu": number, "share": share, "used": gpu["used"] >> 20, "busy": busy}


def _as_gpus(listed: list[Facts]) -> list[LocalDevice]:
    same = ("name", "uuid", "bus_id", "memory")
    return [
        LocalDevice(number, **{key: gpu[key] for key in same}, compute=tuple(gpu["compute"] or ()) or None)
        for number, gpu in enumerate(listed)
    ]


def _alike(facts: Facts) -> Found:
    listed = _as_gpus(_listed(facts))
    answer = [gpu for gpu in listed if gpu.memory]
    for gpu in listed:
        if not gpu.memory:
            others = [each.number for each in answer]
            yield "gpu-silent", {"gpu": gpu.number, "bus": gpu.bus_id, "name": gpu.name, "others": others}
    names = list(dict.fromkeys(gpu.name for gpu in answer))
    if len(names) > 1:
        lost = sum(gpu.memory for gpu in answer) - len(answer) * min(gpu.memory for gpu in answer)
        seen = visible(listed, facts["environment"]).devices or listed
        [(most, _)] = Counter(gpu.name for gpu in seen).most_common(1)
        each = "; ".join(f"GPU {gpu.number}: {gpu.name}, {memory_text(gpu.memory)}" for gpu in answer)
        alike = [place for place, gpu in enumerate(seen) if gpu.name == most]
        values = {"names": ", ".join(names), "each": each, "lost": memory_text(lost), "alike": alike}
        yield "gpus-unlike", values
        if "CUDA_DEVICE_ORDER" not in facts["environment"]:
            yield "gpus-order", {}
    elif len(answer) > 1:
        yield "gpus-alike", {"gpus": len(answer), "name": names[0]}


def _nvlinks(link: Facts) -> int:
    return int(link["near"][2:]) if link["near"].startswith("NV") else 0


def links(facts: Facts) -> Found:
    """Yield what connects the GPUs: NVLink, PCI Express, P2P."""
    listed, pairs = _listed(facts), facts["nvml"].get("links", [])
    if len(listed) < 2:
        return
    counted = Counter(link["near"] for link in pairs)
    seen = "NVML, pairs: " + ", ".join(f"{count} x {kind}" for kind, count in counted.items())
    joined = [_nvlinks(link) for link in pairs]
    if all(joined):
        counts = ", ".join(f"NV{count}" for count in sorted(set(joined)))
        best = max(sum(gpu["nvlinks"]) for gpu in listed) / 1e9
        rate = f"; {best:.4g} GB/s per GPU and direction" if best else ""
        yield "nvlink", {"pairs": seen, "counts": counts, "rate": rate}
    elif any(joined):
        apart = next(link for link in pairs if not _nvlinks(link))
        a, b = apart["pair"]
        clique = _clique(len(listed), pairs)
        yield "nvlink-some", {"pairs": seen, "a": a, "b": b, "near": apart["near"], "clique": clique}
    else:
        across = any(link["near"] in FAR_TO_NEAR[:3] for link in pairs)
        wire = wire_factor(Kind.ALL_REDUCE, len(listed)) * 4e9
        yield "nvlink-none", {
            "pairs": seen, "through": ", through the CPU" if across else "", "gpus": len(listed),
            "worst": next((kind for kind in FAR_TO_NEAR if kind in counted), ""), "slow": wire / ENOUGH,
            "fast": wire / 211e9 * 1e3, "level": "costs" if across else "note",
        }  # fmt: skip
    most = max(len(gpu["nvlinks"]) for gpu in listed)
    for number, gpu in enumerate(listed):
        up, down = len(gpu["nvlinks"]), gpu["down"]
        if up and (up < most or down):
            yield "nvlink-down", {
                "gpu": number, "up": plural(up, "NVLink"), "down": max(most - up, len(down)),
                "which": ", ".join(map(str, down)) or "missing", "rate": sum(gpu["nvlinks"]) / 1e9,
            }  # fmt: skip
    refused = [link["p2p"] for link in pairs if link["p2p"] != "OK"]
    if not refused or None in refused:
        yield "p2p-unknown" if refused else "p2p", {}
    else:
        codes = sorted(set(refused))
        words = {"codes": ", ".join(codes), "reasons": "; ".join(WHY_NOT[code] for code in codes)}
        yield "p2p-refused", words | {"pairs": plural(len(refused), "pair")}


def _clique(count: int, pairs: list[Facts]) -> list[int]:
    """Return a largest set of GPUs of which each pair has NVLink, found greedily from each GPU."""
    joined = {tuple(link["pair"]) for link in pairs if _nvlinks(link)}
    best: list[int] = []
    for first in range(count):
        clique = [first]
        for other in range(count):
            if other != first and all((min(other, each), max(other, each)) in joined for each in clique):
                clique.append(other)
        best = max(best, sorted(clique), key=len)
    return best


def lanes(facts: Facts) -> Found:
    """Yield lanes and generation of PCI Express, against what the card could do."""
    listed = list(enumerate(_listed(facts)))
    whole = [(n, gpu) for n, gpu in listed if gpu["lanes"] and gpu["card_lanes"] and gpu["generation"]]
    if len(whole) < len(listed):
        yield "lanes-unknown", {"gpus": ", ".join(str(n) for n, gpu in listed if (n, gpu) not in whole)}
    narrow = 0
    for number, gpu in whole:
        best = gpu["card_generation"] or gpu["generation"]
        does, could = LANE_RATES[gpu["generation"]] * gpu["lanes"], LANE_RATES[best] * gpu["card_lanes"]
        if does >= 0.95 * could:
            continue
        narrow += 1
        enough = does >= ENOUGH
        yield "lanes-few" if gpu["lanes"] < gpu["card_lanes"] else "lanes-slow", {
            **gpu, "card_generation": best, "gpu": number, "does": does / 1e9, "could": could / 1e9,
            "factor": could / does, "level": "note" if enough else "costs",
            "enough": ": enough by the guide's rule (PCIe 4 x8 is PCIe 3 x16, some 16 GB/s)" if enough else "",
        }  # fmt: skip
    if whole and not narrow:
        kinds = Counter(f"PCIe {gpu['generation']} x{gpu['lanes']}" for _, gpu in whole)
        yield "lanes", {"links": ", ".join(f"{count} x {kind}" for kind, count in kinds.items())}


def software(facts: Facts) -> Found:
    """Yield whether the driver runs what torch was built for."""
    torch, nvml = facts["torch"], facts["nvml"]
    kind = f"CUDA {torch['cuda']}" if torch["cuda"] else f"ROCm {torch['hip']}" if torch["hip"] else "CPUs"
    values = {"kind": kind, "version": torch["version"]}
    if "why" in nvml:
        yield ("driver-unknown", values | nvml) if torch["cuda"] else ("torch", values)
        return
    newest = nvml["cuda"]
    wanted = [int(part) for part in torch["cuda"].split(".")[:2]] if torch["cuda"] else None
    values["newest"] = ".".join(map(str, newest or []))
    upto = f", CUDA up to {values['newest']}" if newest else ""
    values["seen"] = f"driver {nvml['driver']}{upto}; torch {torch['version']}"
    if newest is None or wanted is None:
        yield "torch", values
    else:
        yield "driver-old" if newest[0] < wanted[0] else "driver", values
    if torch["cuda"] and not torch["nccl"]:
        yield "no-nccl", {}


def memory(facts: Facts) -> Found:
    """Yield system RAM per GPU, and what is free."""
    if facts["memory"] is None:
        yield "memory-unknown", {}
        return
    total, free = facts["memory"]
    count = len(_listed(facts)) or facts["torch"]["gpus"]
    values = {"total": memory_text(total), "free": memory_text(free), "share": memory_share(free, total)}
    values |= {"each": total / max(1, count) / 1e9, "gpus": plural(count, "GPU")}
    by_gpu = "memory-small" if total < 0.95 * RAM_PER_GPU * count else "memory-per-gpu"
    yield by_gpu if count else "memory", values


def cpus(facts: Facts) -> Found:
    """Yield CPUs per GPU, what a container allows, and whether others use them."""
    count = len(_listed(facts)) or facts["torch"]["gpus"]
    can = min(facts["cpus"], facts["share"] or facts["cpus"])
    less = f", of whose time it may use {can:g}" if can < facts["cpus"] else ""
    seen = f"{facts['cpus']} CPUs for this process{less}"
    values = {"can": can, "seen": seen, "gpus": plural(count, "GPU")}
    yield "cpus-few" if count and can < 2 * count else "cpus", values
    if _is_busy(facts):
        yield "cpus-busy", facts


def _is_busy(facts: Facts) -> bool:
    return facts["load"] is not None and facts["load"] > facts["cpus"] + 0.5


def shared_memory(facts: Facts) -> Found:
    """Yield the size of /dev/shm, which loaders' workers and nccl use."""
    if facts["shm"] is None:
        yield "shm-unknown", {}
        return
    total, free = facts["shm"]
    docker = " (64 MiB is Docker's default)" if total <= 64 << 20 else ""
    values = {"total": memory_text(total), "free": memory_text(free), "mib": free >> 20, "docker": docker}
    yield "shm" if free >= SHM else "shm-small", values


def limits(facts: Facts) -> Found:
    """Yield the limits on open files and locked memory."""
    opened, hard = facts["limits"].get("nofile", (-1, -1))
    if 0 <= opened < FILES:
        most = min(hard, 65536) if hard > 0 else 65536
        values = {"files": opened, "hard": hard, "most": most, "level": "costs" if opened < 1024 else "note"}
        yield "files-few" if hard < 0 or hard >= FILES else "files-capped", values
    else:
        yield "files", {"files": "unlimited" if opened < 0 else opened}
    locked, _ = facts["limits"].get("memlock", (-1, -1))
    if 0 <= locked < 1 << 30:
        card = facts["infiniband"]
        also = "" if card else "; without InfiniBand it does not matter"
        yield "locked-little", {"kib": locked >> 10, "also": also, "level": "costs" if card else "note"}


PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_")


def variables_set(facts: Facts) -> Found:
    """Yield each variable that is set now, explained; mistyped ones, and values that it does not take."""
    known, environment = variables(), facts["environment"]
    set_now = sorted(name for name in environment if name in known or name.startswith(PREFIXES))
    for name in set_now:
        finding, values = _judge(facts, name, environment[name])
        yield finding, {"name": name, "value": environment[name], "idle": "", **values}
    if not set_now:
        yield "variables-none", {}


def _judge(facts: Facts, name: str, value: str) -> tuple[str, dict[str, Any]]:
    known = variables()
    if name not in known:
        if f"TORCH_{name}" in known:  # torch's own variables as they were called before torch 2.2
            return "variable-old", {"near": f"TORCH_{name}"}
        near = get_close_matches(name, known, 1, 0.8)
        return "variable-mistyped" if near else "variable-unknown", {"near": "".join(near)}
    row = known[name]
    words = vars(row) | {"name": name}
    if not row.meaning:
        return "variable-unknown", words
    if not row.takes(value):
        options = {"#": "a number", "*": "something"}.get(row.values, row.values.replace("|", ", "))
        return "variable-refuses", words | {"options": options}
    there = facts["interfaces"]
    if name.endswith("SOCKET_IFNAME") and not _has_interface(there, name, value):
        real = [one for one in there if one != "lo"] or there
        return "variable-interface", words | {"there": ", ".join(there), "real": real[0]}
    words["idle"] = _idle(facts, name)
    if not row.costs_if or value.strip().upper() != row.costs_if:
        return "variable", words | {"costs": ""}
    return "variable" if words["idle"] else "variable-costs", words


def _idle(facts: Facts, name: str) -> str:
    """Return why a variable makes no difference here; "" if it does."""
    gpus = max(len(facts["nvml"].get("gpus", [])), facts["torch"]["gpus"])
    if name.startswith(("NCCL_", "TORCH_NCCL_", "CUDA_")) and gpus < (1 if name.startswith("CUDA_") else 2):
        return "; with fewer than two GPUs nothing reads it" if gpus else "; without GPUs nothing reads it"
    pairs = [link["p2p"] for link in facts["nvml"].get("links", []) if link["p2p"]]
    if name in ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL") and pairs and "OK" not in pairs:
        return "; these GPUs have no P2P anyway"
    return ""


def _has_interface(there: list[str], name: str, value: str) -> bool:
    """Return whether this machine has one of the interfaces that a value names."""
    if value.startswith("^") or not there:
        return True
    wanted = [each for each in value.removeprefix("=").split(",") if each]
    exact = value.startswith("=") or name.startswith("GLOO")
    return any(each == one or (not exact and one.startswith(each)) for each in wanted for one in there)


def measured_link(facts: Facts) -> Found:
    """Yield the speed of the link between ranks beside the catalogue's."""
    measured = facts["measured"]
    if "why" in measured:
        yield "not-measured", measured
        return
    latency, bandwidth, on_wire = (measured[key] for key in ("latency", "bandwidth", "all_reduce"))
    seen = (
        f"{measured['ranks']} ranks over {measured['backend']}: a message of 4 bytes takes {seconds(latency)}, one of "
        f"{measured['nbytes'] >> 20} MiB goes at {bandwidth / 1e9:.3g} GB/s, an all-reduce at {on_wire / 1e9:.3g} GB/s "
        "on the wire"
    )
    link, name = _expected_link(facts)
    if link is None:
        yield "link", {"seen": f"{seen}; the catalogue has none like it"}
        return
    wanted = link.bus.get(Kind.ALL_REDUCE, link.bandwidth)
    rates = f"{link.bandwidth / 1e9:.3g} and {wanted / 1e9:.3g} GB/s"
    seen += f"; the catalogue's {name}: {seconds(link.latency)}, {rates}"
    slower = max(wanted / on_wire, link.bandwidth / bandwidth)
    if slower <= SLOWER:
        yield "link", {"seen": seen}
    elif _is_busy(facts):
        yield "link", {"seen": f"{seen}; others use the CPUs, so it may be faster", "level": "note"}
    else:
        yield "link-slow", {**measured, "seen": seen, "slower": slower}


def _expected_link(facts: Facts) -> tuple[Link | None, str]:
    """Return the link of the catalogue that this machine's should be like."""
    if facts["measured"]["backend"] == "gloo":
        return hardware("cpu").link, "loopback"
    pairs = facts["nvml"].get("links", [])
    if not pairs:
        return None, ""
    if not all(map(_nvlinks, pairs)):
        return hardware("2x-rtx-4090").link, "PCIe 4 without P2P"
    kinds = [kind for kind in ("A100", "H100", "H200", "B200") if kind in _listed(facts)[0]["name"]]
    machines = [f"8x-{kind.lower()}-nvlink" for kind in kinds]
    return (hardware(machines[0]).link, machines[0]) if machines else (None, "")
