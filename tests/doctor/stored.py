"""Stored machines, as facts. "source" says where the shape of the outputs is from that the facts were read from."""

import json
from pathlib import Path
from typing import Any

from mpkit.launch.doctor.doctor import judge
from mpkit.launch.doctor.probe import Facts
from mpkit.launch.doctor.report import CheckupReport, find_topic

DATA = Path(__file__).parent / "data"
CASES = sorted(path.stem for path in DATA.glob("*.json"))
GIB = 1 << 30


def torch_of(gpus: int) -> Facts:
    """A build of torch that sees so many GPUs."""
    cuda = {"version": "2.13.0+cu126", "cuda": "12.6", "hip": "", "gpus": gpus, "nccl": True, "error": ""}
    return cuda if gpus else cuda | {"version": "2.13.0+cpu", "cuda": "", "nccl": False}


def facts(case: str | None, **other: Any) -> Facts:
    """The facts of a stored machine with which nothing else is wrong; None: of one without GPUs."""
    nvml: Facts = {"why": "NVIDIA's driver is not installed", "failed": False}
    if case is not None:
        nvml = json.loads((DATA / f"{case}.json").read_text(encoding="utf-8"))
    return {
        "nvml": nvml, "memory": [512 * GIB, 500 * GIB], "cpus": 64, "share": None, "load": 0.0,
        "shm": [32 * GIB, 32 * GIB], "limits": {"nofile": [65536, 1048576], "memlock": [-1, -1]},
        "interfaces": ["lo", "eth0", "ib0"], "infiniband": True,
        "torch": torch_of(len(nvml.get("gpus", []))), "environment": {},
        "measured": {"why": "nothing was measured"},
    } | other  # fmt: skip


def report(case: str | None, topic: str | None = None, **other: Any) -> CheckupReport:
    return judge(facts(case, **other), find_topic(topic) if topic else None)


def costs(found: CheckupReport) -> list[str]:
    """What costs, by subject and sentence."""
    return [f"{finding.subject}: {finding.what}" for finding in found.of("costs")]
