"""All rules, in the order of the report."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mpkit.launch.doctor.findings.finding import CheckupFinding
from mpkit.launch.doctor.findings.gpus import gpus
from mpkit.launch.doctor.findings.host import cpus, limits, memory, ports, shared_memory
from mpkit.launch.doctor.findings.links import links, pci
from mpkit.launch.doctor.findings.measurements import find_measured
from mpkit.launch.doctor.findings.software import software
from mpkit.launch.doctor.findings.variables import variables
from mpkit.launch.doctor.parsers.facts import Facts

__all__ = ["RULES", "findings"]

RULES: tuple[Callable[[Facts], Iterator[CheckupFinding]], ...] = (
    gpus, links, pci, software, memory, cpus, shared_memory, limits, ports, variables, find_measured,
)  # fmt: skip


def findings(facts: Facts) -> list[CheckupFinding]:
    """Return what all rules find."""
    return [finding for rule in RULES for finding in rule(facts)]
