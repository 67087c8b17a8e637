"""The host: memory per GPU, CPUs, shared memory, limits, ports."""

from __future__ import annotations

from collections.abc import Iterator

from mpkit.common.units import memory_share, memory_text
from mpkit.launch.doctor.findings.finding import CheckupFinding, Level, plural
from mpkit.launch.doctor.parsers.facts import Facts, Unknown

__all__ = ["cpus", "limits", "memory", "ports", "shared_memory"]

RAM_PER_GPU = 16e9
"""The guide's rule: 16 GB of system RAM for each GPU."""
SHM = 1 << 30
"""Bytes of /dev/shm below which workers of a DataLoader or nccl may run out; Docker's default is 64 MiB."""
FILES = 4096
"""Open files below which several ranks with loaders and sockets may run out."""
PORTS = 4096


def memory(facts: Facts) -> Iterator[CheckupFinding]:
    """Yield system RAM per GPU, and what is free."""
    if isinstance(facts.memory, Unknown):
        yield CheckupFinding("memory", Level.UNCHECKED, "System RAM.", facts.memory.why)
        return
    total, free = facts.memory
    gpus = len(facts.gpu_list) or facts.torch.gpus
    seen = f"/proc/meminfo: {memory_text(total)} in all, {memory_text(free)} available"
    if not gpus:
        yield CheckupFinding(
            "memory", Level.FINE, f"Ranks share {memory_text(total)} of RAM, {memory_text(free)} free.", seen
        )
    elif total < 0.95 * RAM_PER_GPU * gpus:
        yield CheckupFinding(
            "memory",
            Level.COSTS,
            f"{total / gpus / 1e9:.3g} GB of RAM per GPU, where 16 GB is the rule.",
            f"{seen}; {plural(gpus, 'GPU')}",
            "pinned batches, workers, checkpoints and offloaded optimizer states (12 bytes per parameter) share it: "
            "the system swaps, or kills a rank (SIGKILL)",
            "fewer workers, no offload, checkpoints saved by shard (checkpoint_every=); or more RAM",
            ("out of memory",),
        )
    else:
        yield CheckupFinding(
            "memory", Level.FINE, f"{total / gpus / 1e9:.3g} GB of RAM per GPU (the rule: 16 GB).", seen
        )
    if free < 0.1 * total:
        yield CheckupFinding(
            "memory",
            Level.COSTS,
            f"Only {memory_share(free, total)} RAM are free.",
            seen,
            "the kernel may kill a rank",
            "ps aux --sort=-rss | head  # who has it?",
            ("out of memory",),
        )


def cpus(facts: Facts) -> Iterator[CheckupFinding]:
    """Yield CPUs per GPU, what a container allows, and whether others use them."""
    gpus = len(facts.gpu_list) or facts.torch.gpus
    can = facts.cpus
    seen = f"{facts.process.cpus} CPUs for this process"
    seen += f", of whose time it may use {can:g}" if can < facts.process.cpus else ""
    if gpus and can < 2 * gpus:
        yield CheckupFinding(
            "CPUs",
            Level.COSTS,
            f"{can:g} CPUs for {plural(gpus, 'GPU')}: less than two for each.",
            seen,
            "the process that feeds a GPU and the workers that load its data share a core: the GPU waits",
            "htop; fewer workers and heavier batches, decoded beforehand; in a container: docker run --cpus, SLURM: "
            "--cpus-per-task",
            ("slow scaling", "gpu 0 busier"),
        )
    else:
        yield CheckupFinding("CPUs", Level.FINE, f"{can:g} CPUs.", seen)
    if not isinstance(facts.load, Unknown) and facts.load > facts.process.cpus + 0.5:
        yield CheckupFinding(
            "CPUs",
            Level.COSTS,
            f"Other programs use the CPUs: {facts.load:.3g} want to run on {facts.process.cpus}.",
            f"/proc/loadavg: {facts.load:.3g} in the last minute",
            "measured times (also those below) are too long; times on the virtual clock count CPU time and stay",
            "htop  # who is it?",
            ("slow scaling",),
        )
    threads = facts.environment.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads) > can:
        yield CheckupFinding(
            "CPUs",
            Level.COSTS,
            f"OMP_NUM_THREADS={threads} on {can:g} CPUs.",
            "the environment",
            "threads of one rank take the CPU from each other",
            "export OMP_NUM_THREADS=1  # as torchrun sets it",
        )


def shared_memory(facts: Facts) -> Iterator[CheckupFinding]:
    """Yield the size of /dev/shm, which loaders' workers and nccl use."""
    if facts.process.shm is None:
        yield CheckupFinding("/dev/shm", Level.UNCHECKED, "Shared memory.", "there is no /dev/shm here")
        return
    total, free = facts.process.shm
    seen = f"df /dev/shm: {memory_text(total)}, {memory_text(free)} free"
    if free >= SHM:
        yield CheckupFinding("/dev/shm", Level.FINE, f"{memory_text(free)} of shared memory are free.", seen)
        return
    docker = " (64 MiB is Docker's default)" if total <= 64 << 20 else ""
    yield CheckupFinding(
        "/dev/shm",
        Level.COSTS,
        f"Shared memory is small: {free >> 20} MiB free{docker}.",
        seen,
        "workers of a DataLoader end with `bus error`, and nccl with `unhandled system error`, once it is full",
        "docker run --shm-size=8g (or --ipc=host); outside of a container: sudo mount -o remount,size=8G /dev/shm",
        ("nccl time-outs",),
    )


def limits(facts: Facts) -> Iterator[CheckupFinding]:
    """Yield the limits on open files and locked memory."""
    files, hard = facts.process.limits.get("nofile", (-1, -1))
    if 0 <= files < FILES:
        low = files < 1024
        yield CheckupFinding(
            "limits",
            Level.COSTS if low else Level.NOTE,
            f"This process may open {files} files.",
            f"ulimit -n: {files} (at most {hard})",
            "each rank opens a socket to every other one and each worker some more: `Too many open files`"
            + ("" if low else ", with many ranks or workers"),
            f"ulimit -n {min(hard, 65536) if hard > 0 else 65536}  # before Python starts"
            if hard < 0 or hard >= FILES
            else "the hard limit is as low: docker run --ulimit nofile=65536, LimitNOFILE= of systemd, or limits.conf",
        )
    else:
        yield CheckupFinding(
            "limits", Level.FINE, f"Open files: {'unlimited' if files < 0 else files}.", "ulimit -n"
        )
    locked, _ = facts.process.limits.get("memlock", (-1, -1))
    if 0 <= locked < 1 << 30:
        card = not isinstance(facts.topology, Unknown) and facts.topology.network_cards > 0
        yield CheckupFinding(
            "limits",
            Level.COSTS if card else Level.NOTE,
            f"This process may lock {locked >> 10} KiB of memory.",
            f"ulimit -l: {locked >> 10}",
            "InfiniBand registers its buffers as locked memory: nccl fails with `ibv_reg_mr` or goes over TCP"
            + ("" if card else "; without InfiniBand it does not matter"),
            "ulimit -l unlimited  # docker run --ulimit memlock=-1; SLURM: PropagateResourceLimits",
            ("nccl time-outs",),
        )


def ports(facts: Facts) -> Iterator[CheckupFinding]:
    """Yield what ranks on several machines need of ports; on one machine mpkit uses a file instead."""
    if isinstance(facts.ports, Unknown):
        yield CheckupFinding("ports", Level.UNCHECKED, "Ports for outgoing connections.", facts.ports.why)
    elif facts.ports < PORTS:
        yield CheckupFinding(
            "ports",
            Level.COSTS,
            f"Only {facts.ports} ports for outgoing connections.",
            "net.ipv4.ip_local_port_range",
            "n ranks open up to n(n-1) connections per process group",
            "sudo sysctl net.ipv4.ip_local_port_range='32768 60999'",
            ("nccl time-outs",),
        )
    if facts.process.port_in_use:
        yield CheckupFinding(
            "ports",
            Level.NOTE,
            "Somebody listens on port 29500.",
            "binding 127.0.0.1:29500 fails",
            "torchrun's default port: a second job ends with `address already in use` (mk.Cluster needs no port)",
            "torchrun --standalone, or --rdzv-endpoint=localhost:0, takes a free one; lsof -i :29500 says who it is",
            ("nccl time-outs",),
        )
    elif not isinstance(facts.ports, Unknown) and facts.ports >= PORTS:
        yield CheckupFinding(
            "ports", Level.FINE, f"{facts.ports} ports, and torchrun's 29500 is free.", "ip_local_port_range"
        )
