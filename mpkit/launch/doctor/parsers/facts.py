"""Everything that is known about a machine, or why it is not: evidence, parsed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from mpkit.devices.local.nvidia_smi import Gpu, parse_gpus
from mpkit.launch.doctor.parsers.driver import Driver, parse_driver
from mpkit.launch.doctor.parsers.host import (
    parse_cpu_limit,
    parse_load,
    parse_memory,
    parse_memory_limit,
    parse_ports,
)  # fmt: skip
from mpkit.launch.doctor.parsers.pci import PciGpu, parse_pci
from mpkit.launch.doctor.parsers.topology import NvLinks, Topology, parse_nvlink, parse_p2p, parse_topology
from mpkit.launch.doctor.probes.evidence import ProbeAnswers, Process
from mpkit.launch.doctor.probes.torch_build import TorchBuild

if TYPE_CHECKING:
    from mpkit.launch.doctor.probes.measure import RankMeasurements

__all__ = ["Facts", "Unknown", "facts_of"]

Value = TypeVar("Value")


@dataclass(frozen=True)
class Unknown:
    """Something that was not found out, and why.

    Attributes:
        why: the reason.
        failed: whether the command that tells it is there, and failed or did not answer.
    """

    why: str
    failed: bool = False


@dataclass(frozen=True)
class Facts:
    """A machine, as far as it is known.

    Attributes:
        gpus, driver, topology, nvlink, p2p, pci: what nvidia-smi and lspci say; `Unknown` where they say nothing.
        memory: bytes in all and available; within a container what it allows.
        cpus: CPUs that this process may use, a container's share counted.
        ports: how many ports outgoing connections may use.
        load: processes that ran or wanted to run in the last minute, on average.
        process, torch, environment: see `ProbeAnswers`.
        measured: what ranks measured; `Unknown` where that was left out.
        composed: see `ProbeAnswers`.
    """

    gpus: list[Gpu] | Unknown
    driver: Driver | Unknown
    topology: Topology | Unknown
    nvlink: list[NvLinks] | Unknown
    p2p: Mapping[tuple[int, int], str] | Unknown
    pci: list[PciGpu] | Unknown
    memory: tuple[int, int] | Unknown
    cpus: float
    ports: int | Unknown
    load: float | Unknown
    process: Process
    torch: TorchBuild
    environment: Mapping[str, str]
    measured: RankMeasurements | Unknown
    composed: str = ""

    @property
    def gpu_list(self) -> list[Gpu]:
        """The GPUs that are known; none where nothing is."""
        return [] if isinstance(self.gpus, Unknown) else self.gpus


def facts_of(evidence: ProbeAnswers, measured: RankMeasurements | Unknown | None = None) -> Facts:
    """Parse the evidence. What cannot be parsed is unknown, with the parser's reason."""

    def value_of(name: str, parse: Callable[[str], Value]) -> Value | Unknown:
        answer = evidence.answer(name)
        if answer.missing:
            return Unknown(answer.missing, answer.failed)
        try:
            return parse(answer.text)
        except ValueError as error:
            return Unknown(f"{answer.source} was not understood: {error}")

    memory, limit = value_of("memory", parse_memory), value_of("memory_limit", parse_memory_limit)
    if not isinstance(memory, Unknown) and isinstance(limit, int):
        memory = min(memory[0], limit), min(memory[1], limit)
    share = value_of("cpu_limit", parse_cpu_limit)
    cpus: float = evidence.process.cpus
    if isinstance(share, float):
        cpus = min(cpus, share)
    return Facts(
        value_of("gpus", parse_gpus), value_of("driver", parse_driver), value_of("topology", parse_topology),
        value_of("nvlink", parse_nvlink), value_of("p2p", parse_p2p), value_of("pci", parse_pci),
        memory, cpus, value_of("ports", parse_ports), value_of("load", parse_load),
        evidence.process, evidence.torch, evidence.environment,
        measured if measured is not None else Unknown("left out"), evidence.composed,
    )  # fmt: skip
