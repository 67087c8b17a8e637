"""Two hosts on this machine: network namespaces joined by a veth pair, each with a name of its own."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
ADDRESSES = "10.199.7.1", "10.199.7.2"
_ports = itertools.count(29600)


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


@dataclass
class Job:
    """A torchrun on each host, or what else starts ranks there."""

    agents: list[subprocess.Popen[str]]
    outputs: list[str] = field(default_factory=list)

    def wait(self, seconds: float = 120) -> list[int]:
        """Wait for all and return their exit codes; `outputs` is what they printed."""
        try:
            self.outputs = [agent.communicate(timeout=seconds)[0] for agent in self.agents]
        except subprocess.TimeoutExpired as late:
            ended = [agent.poll() for agent in self.agents]
            self.kill()
            self.outputs = [agent.communicate()[0] for agent in self.agents]
            raise AssertionError(f"not all ended: {ended}\n" + "\n".join(self.outputs)) from late
        finally:
            self.kill()
        return [agent.returncode for agent in self.agents]

    def kill(self, host: int | None = None) -> None:
        """Kill what runs on one host, or on both."""
        for agent in self.agents if host is None else [self.agents[host]]:
            for pid in [
                *descendants(agent.pid),
                agent.pid,
            ]:  # the ranks too, which are in sessions of their own
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


class TwoHosts:
    """Hosts "node-a" and "node-b"."""

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

    def cut(self) -> None:
        """Take the link down, as when a host dies without a word."""
        _do(f"ip -n {self.names[1]} link set {self.ends[1]} down")

    def mend(self) -> None:
        _do(f"ip -n {self.names[1]} link set {self.ends[1]} up")

    def srun(self, script: Path, *args: str) -> Job:
        """Start two ranks on each host with the variables that SLURM's srun sets, and no torchrun: rank 0 serves the
        store."""
        port, ranks = next(_ports), []
        for rank in range(4):
            node, local = divmod(rank, 2)
            variables = {
                "SLURM_PROCID": rank, "SLURM_STEP_NUM_TASKS": 4, "SLURM_LOCALID": local, "SLURM_NODEID": node,
                "SLURM_STEP_NODELIST": ",".join(ADDRESSES), "MASTER_PORT": port, "OMP_NUM_THREADS": 1,
            }  # fmt: skip
            command = ["ip", "netns", "exec", self.names[node], sys.executable, str(HERE / "host.py")]
            command += [f"node-{'ab'[node]}", "0.0", sys.executable, str(script), *args]
            ranks.append(_start(command, {name: str(value) for name, value in variables.items()}))
        return Job(ranks)

    def torchrun(self, script: Path, *args: str, ranks: int = 2, ahead: float = 0.0) -> Job:
        """Start torchrun on both hosts; the second's clock is `ahead` seconds."""
        port, agents = next(_ports), []
        for number, (name, end) in enumerate(zip(self.names, "ab", strict=True)):
            command = ["ip", "netns", "exec", name, sys.executable, str(HERE / "host.py"), f"node-{end}"]
            command += [str(ahead if number else 0.0), sys.executable, "-m", "torch.distributed.run"]
            command += ["--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", str(ranks)]
            command += ["--master-addr", ADDRESSES[0], "--master-port", str(port), str(script), *args]
            agents.append(_start(command, {"OMP_NUM_THREADS": "1"}))
        return Job(agents)


def _start(command: list[str], variables: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env={**os.environ, **variables},
    )  # fmt: skip


def descendants(pid: int) -> Sequence[int]:
    """The processes below one; once it has ended they are its no more."""
    found = []
    for each in subprocess.run(["ps", "-eo", "pid,ppid,pgid"], capture_output=True, text=True).stdout.split(
        "\n"
    )[1:]:
        fields = each.split()
        if fields and int(fields[1]) == pid:
            found += [int(fields[0]), *descendants(int(fields[0]))]
    return found


def unshare_time(ahead: float) -> None:
    """Let this process's children have a monotonic clock that is ahead."""
    new_time = 0x80
    if ctypes.CDLL(None, use_errno=True).unshare(new_time):
        raise OSError(ctypes.get_errno(), "unshare(CLONE_NEWTIME)")
    seconds, rest = divmod(ahead, 1.0)
    Path("/proc/self/timens_offsets").write_text(f"monotonic {int(seconds)} {int(rest * 1e9)}\n")


def _do(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True)
