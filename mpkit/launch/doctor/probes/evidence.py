"""Everything the doctor asks this machine, gathered at once: commands side by side, files, this process."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from mpkit.common.evidence import CommandOutput, ask, read
from mpkit.common.this_process import cores
from mpkit.devices.local.nvidia_smi import QUERY
from mpkit.launch.doctor.probes.torch_build import TorchBuild, torch_build

__all__ = ["COMMANDS", "FILES", "ProbeAnswers", "Process", "gather"]

COMMANDS: dict[str, tuple[str, ...]] = {
    "gpus": QUERY,
    "driver": ("nvidia-smi",),
    "topology": ("nvidia-smi", "topo", "-m"),
    "nvlink": ("nvidia-smi", "nvlink", "--status"),
    "p2p": ("nvidia-smi", "topo", "-p2p", "r"),
    "pci": ("lspci", "-vv"),
}
"""The commands, by the name of what they tell."""

FILES = {
    "memory": "/proc/meminfo",
    "memory_limit": "/sys/fs/cgroup/memory.max",
    "cpu_limit": "/sys/fs/cgroup/cpu.max",
    "ports": "/proc/sys/net/ipv4/ip_local_port_range",
    "load": "/proc/loadavg",
}
"""The files, likewise."""

TORCHRUN_PORT = 29500
"""The port on which torchrun's first node listens by default."""


@dataclass(frozen=True)
class Process:
    """What this process is allowed.

    Attributes:
        cpus: CPUs that it may run on.
        shm: bytes that /dev/shm has in all, and that are free; None where there is no such folder.
        limits: the soft and hard limits of resources, such as "nofile" and "memlock"; -1 is unlimited.
        interfaces: the network interfaces.
        port_in_use: whether somebody listens on `TORCHRUN_PORT`.
    """

    cpus: int
    shm: tuple[int, int] | None
    limits: Mapping[str, tuple[int, int]]
    interfaces: tuple[str, ...] = ()
    port_in_use: bool = False


@dataclass(frozen=True)
class ProbeAnswers:
    """What was asked, and what the answers were.

    Attributes:
        answers: what commands printed and files hold, by the names in `COMMANDS` and `FILES`.
        environment: the environment variables.
        process: what this process is allowed.
        torch: what torch was built for, and what it sees.
        composed: where the evidence is from if not from this machine; a report then says so.
    """

    answers: Mapping[str, CommandOutput]
    environment: Mapping[str, str]
    process: Process
    torch: TorchBuild
    composed: str = field(default="")

    def answer(self, name: str) -> CommandOutput:
        """Return one answer; of what nobody asked, the reason says so."""
        return self.answers.get(name) or CommandOutput(name, missing=f"{name} was not asked")


def gather(limit: float = 10.0) -> ProbeAnswers:
    """Ask this machine. Commands run side by side, so this takes as long as the slowest, `limit` seconds at most."""
    with ThreadPoolExecutor(len(COMMANDS)) as pool:
        asked = {name: pool.submit(ask, command, limit) for name, command in COMMANDS.items()}
        answers = {name: read(path) for name, path in FILES.items()}
        process, build = this_process(), torch_build()
        answers |= {name: future.result() for name, future in asked.items()}
    return ProbeAnswers(answers, dict(os.environ), process, build)


def this_process() -> Process:
    """Return what this process is allowed."""
    cpus = cores()
    try:
        usage = shutil.disk_usage("/dev/shm")
        shm = (usage.total, usage.free)
    except OSError:
        shm = None
    return Process(
        cpus, shm, _limits(), tuple(name for _, name in socket.if_nameindex()), _listens(TORCHRUN_PORT)
    )


def _limits() -> dict[str, tuple[int, int]]:
    import resource

    kinds = {"nofile": "RLIMIT_NOFILE", "memlock": "RLIMIT_MEMLOCK", "nproc": "RLIMIT_NPROC"}
    return {
        name: resource.getrlimit(getattr(resource, constant))
        for name, constant in kinds.items()
        if hasattr(resource, constant)
    }


def _listens(port: int) -> bool:
    """Return whether this machine's own port is taken. Nothing listens meanwhile: the socket is bound and closed."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False
