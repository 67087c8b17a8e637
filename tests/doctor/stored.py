"""Stored outputs of commands, as evidence. Lines that begin with "##" say where an output's shape is from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mpkit.common.evidence import CommandOutput
from mpkit.launch.doctor.doctor import judge
from mpkit.launch.doctor.parsers.facts import Unknown
from mpkit.launch.doctor.probes.evidence import COMMANDS, ProbeAnswers, Process
from mpkit.launch.doctor.probes.torch_build import TorchBuild
from mpkit.launch.doctor.report import CheckupReport
from mpkit.launch.doctor.topics import find_topic

DATA = Path(__file__).parent / "data"
CASES = sorted(path.name for path in DATA.iterdir())
GIB = 1 << 30

ROOMY = Process(
    cpus=64,
    shm=(32 * GIB, 32 * GIB),
    limits={"nofile": (65536, 1048576), "memlock": (-1, -1)},
    interfaces=("lo", "eth0", "ib0"),
)
"""A process that nothing is wrong with."""


def text(case: str, name: str) -> str:
    lines = (DATA / case / f"{name}.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("##"))


def evidence(
    case: str | None,
    *,
    environment: dict[str, str] | None = None,
    torch: TorchBuild | None = None,
    **process: Any,
) -> ProbeAnswers:
    """The evidence of a stored machine; None: of one without GPUs, on which nothing is installed."""
    answers = {
        name: CommandOutput(" ".join(command), text(case, name))
        if case is not None and (DATA / case / f"{name}.txt").exists()
        else CommandOutput(" ".join(command), missing=f"{command[0]} is not installed")
        for name, command in COMMANDS.items()
    }
    answers["memory"] = CommandOutput(
        "/proc/meminfo", f"MemTotal: {512 << 20} kB\nMemAvailable: {500 << 20} kB\n"
    )
    answers["ports"] = CommandOutput("ip_local_port_range", "32768\t60999\n")
    gpus = len(text(case, "gpus").splitlines()) if case is not None else 0
    build = torch or (
        TorchBuild("2.13.0+cu126", "12.6", "", gpus, True) if gpus else TorchBuild("2.13.0+cpu")
    )
    return ProbeAnswers(
        answers, environment or {}, Process(**{**vars(ROOMY), **process}), build, f"stored outputs of {case}"
    )


def report(case: str | None, topic: str | None = None, **how: Any) -> CheckupReport:
    return judge(evidence(case, **how), Unknown("nothing was measured"), find_topic(topic) if topic else None)


def costs(found: CheckupReport) -> list[str]:
    """What costs, by subject and sentence."""
    return [f"{finding.subject}: {finding.what}" for finding in found.of("costs")]
