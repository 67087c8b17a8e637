"""Two hosts on this machine: network namespaces joined by a veth pair, each with a name of its own.

Ranks are forked from one process that has imported torch, with the variables that torchrun or srun sets, and with a
process that serves the store as torchrun's agent does: a tenth of the CPU time of torchrun itself.
"""

import atexit
import contextlib
import ctypes
import multiprocessing
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

from mpkit.launch.launch import NEEDED
from tests.limits import PROGRAM, wait_for

HERE = Path(__file__).parent
ADDRESSES = "10.199.7.1", "10.199.7.2"
NEW_NET, NEW_UTS, NEW_TIME = 0x40000000, 0x04000000, 0x80  # of unshare(2) and setns(2)
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["pytest", "mpkit", *NEEDED, __name__])


def why_not() -> str:
    """Why there can be no two hosts here; "" if there can."""
    if os.geteuid() != 0:
        return "network namespaces take root here"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "ip and tc (iproute2) are not installed"
    done = subprocess.run(["ip", "netns", "add", f"mpkit{os.getpid()}"], capture_output=True, text=True)
    if done.returncode:
        return f"network namespaces are not permitted: {done.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", f"mpkit{os.getpid()}"], check=True)
    return ""


# ---- jobs ------------------------------------------------------------------------------------------------------


@dataclass
class Started:
    """A rank on one of the hosts, and the file of what it prints."""

    host: int
    process: ForkServerProcess
    output: Path

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        return self.process.exitcode

    def kill(self) -> None:
        """Kill it, and what it has forked: each rank leads a session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)


@dataclass
class Job:
    """A launch: the ranks, and the store that they do not serve."""

    started: list[Started]
    store: ForkServerProcess | None = None

    @property
    def outputs(self) -> list[str]:
        """What was printed, by host."""
        hosts = sorted({each.host for each in self.started})
        return [
            "\n".join(each.output.read_text() for each in self.started if each.host == host) for host in hosts
        ]

    def wait_for_files(self, files: list[Path]) -> None:
        """Wait until all files are there, while all of the job runs."""
        wait_for(
            lambda: any(each.poll() is not None for each in self.started) or all(f.exists() for f in files),
            PROGRAM,
        )
        assert all(file.exists() for file in files), "\n".join(self.outputs)

    def wait(self) -> list[int | None]:
        """Wait for the end and return the exit codes."""
        try:
            wait_for(lambda: all(each.poll() is not None for each in self.started), PROGRAM)
        except AssertionError as late:
            raise AssertionError(f"not all ended: {late}\n" + "\n".join(self.outputs)) from None
        finally:
            codes = [each.poll() for each in self.started]
            self.kill()
        return codes

    def kill(self, host: int | None = None) -> None:
        """Kill what runs on one host, or on both, and then the store too."""
        for each in self.started:
            if host in (None, each.host) and each.poll() is None:
                each.kill()
        if host is None and self.store is not None:
            self.store.kill()


def forked(ranks: int, script: Path, *args: str) -> Job:
    """Start ranks on this machine as torchrun would."""
    port, store = _store("127.0.0.1", "")
    started = []
    for rank in range(ranks):
        variables = _as_torchrun(rank, ranks, rank, ranks, 0, "127.0.0.1", port)
        started.append(_fork(0, "", "", 0.0, variables, script, args))
    return Job(started, store)


def _as_torchrun(
    rank: int, size: int, local: int, per_node: int, node: int, address: str, port: int
) -> dict[str, object]:
    return {
        "RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": per_node, "GROUP_RANK": node,
        "MASTER_ADDR": address, "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True,
    }  # fmt: skip


def _fork(
    host: int, namespace: str, name: str, ahead: float, variables: dict[str, object], script: Path, args: Sequence[str]
) -> Started:  # fmt: skip
    handle, path = tempfile.mkstemp(prefix="mpkit-nodes-")
    os.close(handle)
    output, where = Path(path), (namespace, name, ahead)
    atexit.register(output.unlink, missing_ok=True)
    process = _forks.Process(target=_rank, args=(where, variables, str(script), args, output), daemon=True)
    process.start()
    return Started(host, process, output)


# ---- in a forked process ---------------------------------------------------------------------------------------


def _rank(
    where: tuple[str, str, float], variables: dict[str, object], script: str, args: list[str], output: Path
) -> None:
    """Run a script as a rank whose variables and host are these."""
    os.setsid()
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(file, standard)
    sys.stdout, sys.stderr = (os.fdopen(standard, "w", buffering=1, closefd=False) for standard in (1, 2))
    _enter(*where)
    os.environ.update({name: str(value) for name, value in variables.items()})
    tempfile.tempdir = None  # asks TMPDIR anew
    torch.set_num_threads(1)
    sys.argv = [script, *args]
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        atexit._run_exitfuncs()


def _enter(namespace: str, name: str, ahead: float) -> None:
    """Let this process be on a host, of this name, whose clock is ahead."""
    if namespace:
        with open(f"/run/netns/{namespace}") as network:
            _call("setns", network.fileno(), NEW_NET)
        _call("unshare", NEW_UTS)
        socket.sethostname(name)
    if ahead:
        _call("unshare", NEW_TIME)
        seconds, rest = divmod(ahead, 1.0)
        Path("/proc/self/timens_offsets").write_text(f"monotonic {int(seconds)} {int(rest * 1e9)}\n")
        child = os.fork()  # the clock is that of the children
        if child:
            os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 255)
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _call(name: str, *args: int) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*args):
        raise OSError(ctypes.get_errno(), name)


def _store(address: str, namespace: str) -> tuple[int, ForkServerProcess]:
    """Serve a store, as torchrun's agent does; return its port and the process."""
    here, there = _forks.Pipe()
    process = _forks.Process(target=_serve, args=(address, namespace, there), daemon=True)
    process.start()
    return here.recv(), process


def _serve(address: str, namespace: str, pipe: Any) -> None:
    _enter(namespace, "node-a", 0.0)
    store = TCPStore(address, 0, 1, True, wait_for_workers=False)
    pipe.send(store.port)
    signal.pause()


# ---- hosts -----------------------------------------------------------------------------------------------------


class TwoHosts:
    """Hosts "node-a" and "node-b", each with two ranks."""

    def __init__(self) -> None:
        self.names = [f"mpkit-{os.getpid()}-{end}" for end in "ab"]
        ends = [f"mp{os.getpid() % 100000}{end}" for end in "ab"]
        for name in self.names:
            _do(f"ip netns add {name}")
        _do(
            f"ip link add {ends[0]} netns {self.names[0]} type veth peer name {ends[1]} netns {self.names[1]}"
        )
        for name, end, address in zip(self.names, ends, ADDRESSES, strict=True):
            _do(f"ip -n {name} address add {address}/24 dev {end}")
            _do(f"ip -n {name} link set {end} up")
            _do(f"ip -n {name} link set lo up")
        self.ends = ends

    def close(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], check=False)

    def shape(self, *rule: str) -> bool:
        """Set a queueing discipline on both ends, such as "tbf", "rate", "100mbit", ...; whether the kernel has it."""
        return all(
            subprocess.run(
                ["ip", "netns", "exec", name, "tc", "qdisc", "replace", "dev", end, "root", *rule],
                capture_output=True,
            ).returncode
            == 0
            for name, end in zip(self.names, self.ends, strict=True)
        )

    def unshape(self) -> None:
        for name, end in zip(self.names, self.ends, strict=True):
            subprocess.run(
                ["ip", "netns", "exec", name, "tc", "qdisc", "del", "dev", end, "root"], check=False
            )

    def start(self, script: Path, *args: str, ahead: float = 0.0, srun: bool = False) -> Job:
        """Start two ranks on each host, with the variables of torchrun or srun; the second host's clock is ahead."""
        port, store = (29600, None) if srun else _store(ADDRESSES[0], self.names[0])  # srun: rank 0 serves it
        started = []
        for rank in range(4):
            node, local = divmod(rank, 2)
            variables: dict[str, object] = {
                "SLURM_PROCID": rank, "SLURM_STEP_NUM_TASKS": 4, "SLURM_LOCALID": local, "SLURM_NODEID": node,
                "SLURM_STEP_NODELIST": ",".join(ADDRESSES), "MASTER_PORT": port,
            }  # fmt: skip
            if store is not None:
                variables = _as_torchrun(rank, 4, local, 2, node, ADDRESSES[0], port)
            where = self.names[node], f"node-{'ab'[node]}", ahead * node
            started.append(_fork(node, *where, variables, script, args))
        return Job(started, store)


def _do(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True)
