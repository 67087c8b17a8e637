"""`mpkit launch --nodes 4 --gpus 8 train.py`: the commands that start a script on several machines, explained.

It prints, and starts nothing. torchrun, sbatch with srun, accelerate and deepspeed; the same script runs under each.
`launch.toml` has the commands.
"""

import re
import shlex
import tomllib
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from mpkit.cli.watch import CommandProgram

MOST_GPUS = 64
"""GPUs per node; more are taken for a mistake."""

ADDRESS = "NODE0"
"""Stands for the first node where no --address is given."""


@dataclass(frozen=True)
class LaunchPlan:
    """What is to be started.

    Attributes:
        program: the script and its arguments.
        nodes: the number of machines.
        gpus: the processes per machine, one per GPU.
        address: the name or address of the first machine.
        port: the port there at which the processes meet.
        hours: the time limit of the batch job.
    """

    program: CommandProgram
    nodes: int = 1
    gpus: int = 8
    address: str = ADDRESS
    port: int = 29500
    hours: float = 1.0

    def check(self) -> None:
        """Check the numbers, and that the script exists.

        Raises:
            ValueError: something cannot be.
        """
        name = self.program.name
        if not self.program.is_module and not Path(name).is_file():
            raise ValueError(
                f"{name}: no such file here; mpkit launch takes a script and its arguments, such as "
                "mpkit launch --nodes 4 --gpus 8 train.py --lr 0.1"
            )
        for option, value in (("nodes", self.nodes), ("gpus", self.gpus)):
            if value < 1:
                raise ValueError(
                    f"--{option} {value}: at least 1, as in mpkit launch --nodes 4 --gpus 8 {name}"
                )
        if self.gpus > MOST_GPUS:
            each = self.gpus // self.nodes
            can_be = self.nodes > 1 and each * self.nodes == self.gpus and each <= MOST_GPUS
            meant = f" Did you mean --gpus {each}?" if can_be else ""
            raise ValueError(
                f"--gpus {self.gpus}: no machine has so many. --gpus counts the GPUs of one node, not of all: "
                f"{self.nodes} x {self.gpus} would be {self.nodes * self.gpus:,} ranks.{meant}"
            )
        if not 1024 <= self.port <= 64535:
            raise ValueError(f"--port {self.port}: from 1024 to 64535, such as --port 29500")
        if not re.fullmatch(r"[A-Za-z0-9_.:-]+", self.address):
            raise ValueError(
                f"--address {self.address!r}: the name or address of the first node, such as node01"
            )
        if self.nodes > 1 and self.address in ("localhost", "127.0.0.1", "::1"):
            raise ValueError(
                f"--address {self.address}: that is each node itself, so the {self.nodes} nodes would never meet; "
                "`hostname -I` on the first node prints an address that the others can reach"
            )
        if not self.hours > 0:
            raise ValueError(f"--hours {self.hours:g}: more than 0, such as --hours 2")

    @property
    def fields(self) -> dict[str, object]:
        """What fills the fields in braces of `launch.toml`."""
        nodes, minutes = self.nodes, max(1, round(self.hours * 60))
        script = shlex.join([*["-m"] * self.program.is_module, self.program.name, *self.program.arguments])
        torchruns = [
            f"torchrun --nnodes {nodes} --nproc-per-node {self.gpus} --node-rank {node} --master-addr {self.address} "
            f"--master-port {self.port} {script}"
            for node in range(nodes)
        ]
        if nodes > 8:
            torchruns[2:-1] = [f"# ... --node-rank 2 to {nodes - 2} ..."]
        hosts = [self.address, *(f"NODE{node}" for node in range(1, min(nodes, 8)))]
        hosts = [f"# hostfile: {host} slots={self.gpus}" for host in hosts]
        return {
            "nodes": nodes, "gpus": self.gpus, "ranks": nodes * self.gpus, "address": self.address, "port": self.port,
            "script": script, "time": f"{minutes // 60:02d}:{minutes % 60:02d}:00", "torchruns": "\n".join(torchruns),
            "multi_gpu": "--multi_gpu " * (nodes * self.gpus > 1),
            "hosts": "\n".join(hosts + [f"# ... {nodes - 8} more lines"] * (nodes > 8)),
        }  # fmt: skip


def commands(plan: LaunchPlan) -> str:
    """Return the commands for each launcher, with every flag explained.

    >>> text = commands(LaunchPlan(CommandProgram("train.py", ("--lr", "0.1")), nodes=2, gpus=4, address="n1"))
    >>> [line for line in text.splitlines() if line.startswith("torchrun") and "--node-rank 1" in line]
    ['torchrun --nnodes 2 --nproc-per-node 4 --node-rank 1 --master-addr n1 --master-port 29500 train.py --lr 0.1']
    """
    fields, ranks = plan.fields, plan.nodes * plan.gpus
    head = (
        f"# {plan.nodes} node{'s' * (plan.nodes > 1)} x {plan.gpus} GPU{'s' * (plan.gpus > 1)} = {ranks} ranks. "
        "Nothing has been started: copy the one that your cluster has."
    )
    if plan.nodes > 1 and plan.address == ADDRESS:
        head += (
            f"\n# {ADDRESS} stands for the first node: put in its name, or mpkit launch --address node01 ..."
        )
    if plan.nodes > 1:
        head += "\n# docs/many-machines.md says who else can reach a launch"
    parts = [head]
    for section in tomllib.loads((files(__package__) / "launch.toml").read_text(encoding="utf-8"))["section"]:
        if section.get("if") != ("several" if plan.nodes == 1 else "one"):
            flags = {
                flag.format(**fields): words.format(**fields) for flag, words in section["flags"].items()
            }
            width = max(map(len, flags))
            explained = [f"#   {flag:<{width}}  {words}" for flag, words in flags.items()]
            parts.append(
                "\n".join([f"# ---- {section['title']}", *explained, section["lines"].format(**fields)])
            )
    parts.append(
        f"# In {plan.program.name}: cluster = mk.Cluster.from_env(), then cluster.train(..., "
        f"plan=mk.Plan.ddp({ranks}), ...).\n"
        "# A script that does not know mpkit: put `-m mpkit watch` before its name, and it is drawn all the same.\n"
        "# docs/many-machines.md has more."
    )
    return "\n\n".join(parts)
