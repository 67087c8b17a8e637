"""`mpkit launch --nodes 4 --gpus 8 train.py`: the commands that start a script on several machines, explained.

It prints, and starts nothing. torchrun, sbatch with srun, accelerate and deepspeed; the same script runs under each.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from mpkit.views.commands.watch import CommandProgram

__all__ = ["LaunchPlan", "commands"]

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
    def script(self) -> str:
        """The program and its arguments, as a shell takes them."""
        module = ["-m"] if self.program.is_module else []
        return shlex.join([*module, self.program.name, *self.program.arguments])


def commands(plan: LaunchPlan) -> str:
    """Return the commands for each launcher, with every flag explained.

    >>> text = commands(LaunchPlan(CommandProgram("train.py", ("--lr", "0.1")), nodes=2, gpus=4, address="n1"))
    >>> [line for line in text.splitlines() if line.startswith("torchrun") and "--node-rank 1" in line]
    ['torchrun --nnodes 2 --nproc-per-node 4 --node-rank 1 --master-addr n1 --master-port 29500 train.py --lr 0.1']

    Args:
        plan: what is to be started.

    """
    parts = [_torchrun(plan), _slurm(plan), _accelerate(plan), _deepspeed_commands(plan), _explain_use(plan)]
    ranks = plan.nodes * plan.gpus
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
    return "\n\n".join([head, *parts])


def _torchrun(plan: LaunchPlan) -> str:
    if plan.nodes == 1:
        return _section(
            "torchrun",
            [f"torchrun --standalone --nproc-per-node {plan.gpus} {plan.script}"],
            {
                "--standalone": "one machine: torchrun chooses a free port itself",
                f"--nproc-per-node {plan.gpus}": "processes, one per GPU; each finds RANK, LOCAL_RANK, WORLD_SIZE",
            },
        )
    lines = [
        f"torchrun --nnodes {plan.nodes} --nproc-per-node {plan.gpus} --node-rank {node} --master-addr {plan.address} "
        f"--master-port {plan.port} {plan.script}"
        for node in range(plan.nodes)
    ]
    shown = (
        lines if plan.nodes <= 8 else [*lines[:2], f"# ... --node-rank 2 to {plan.nodes - 2} ...", lines[-1]]
    )
    return _section(
        "torchrun, one command on each node, in any order",
        shown,
        {
            f"--nnodes {plan.nodes}": "machines; torchrun waits until all have come",
            f"--nproc-per-node {plan.gpus}": "processes per machine, one per GPU",
            "--node-rank": "which machine this is, from 0; ranks are numbered node by node",
            f"--master-addr {plan.address}": "machine 0, as the others reach it; its interface is the one that is used",
            f"--master-port {plan.port}": "a free port there, which firewalls let the other nodes reach",
        },
    )


def _slurm(plan: LaunchPlan) -> str:
    minutes = max(1, round(plan.hours * 60))
    lines = [
        "#!/bin/bash",
        f"#SBATCH --nodes={plan.nodes}",
        f"#SBATCH --ntasks-per-node={plan.gpus}",
        f"#SBATCH --gpus-per-node={plan.gpus}",
        "#SBATCH --cpus-per-task=8",
        f"#SBATCH --time={minutes // 60:02d}:{minutes % 60:02d}:00",
        "#SBATCH --output=%x-%j.log",
        'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        f"export MASTER_PORT=$(({plan.port} + SLURM_JOB_ID % 1000))",
        f"srun --kill-on-bad-exit=1 python {plan.script}",
    ]
    return _section(
        "SLURM: save as job.sbatch, then `sbatch job.sbatch`",
        lines,
        {
            f"--ntasks-per-node={plan.gpus}": "processes per machine: srun starts each rank itself, without torchrun",
            f"--gpus-per-node={plan.gpus}": "GPUs; each rank takes the one of its SLURM_LOCALID",
            "--cpus-per-task=8": "cores per rank, for data loading; adjust to the node",
            "--time": "after which SLURM ends the job; save checkpoints more often than that",
            "MASTER_ADDR, MASTER_PORT": "where ranks meet; a port by job, so that two jobs on a node do not collide",
            "--kill-on-bad-exit=1": "ends all ranks when one fails; without it the others may wait until --time",
        },
    )


def _accelerate(plan: LaunchPlan) -> str:
    ranks = plan.nodes * plan.gpus
    return _section(
        "accelerate, on each node with its own --machine_rank" if plan.nodes > 1 else "accelerate",
        [
            f"accelerate launch {'--multi_gpu ' if ranks > 1 else ''}--num_machines {plan.nodes} "
            f"--num_processes {ranks} "
            + (
                f"--machine_rank 0 --main_process_ip {plan.address} --main_process_port {plan.port} "
                if plan.nodes > 1
                else ""
            )
            + plan.script
        ],
        {
            f"--num_processes {ranks}": f"of all machines: {plan.nodes} x {plan.gpus} (torchrun counts per machine)",
            **({"--machine_rank": "which machine this is, from 0"} if plan.nodes > 1 else {}),
            **(
                {"--main_process_ip, _port": "torchrun's --master-addr and --master-port"}
                if plan.nodes > 1
                else {}
            ),
        },
    )


def _deepspeed_commands(plan: LaunchPlan) -> str:
    flags = {f"--num_gpus {plan.gpus}": "GPUs per machine"}
    if plan.nodes == 1:
        return _section("deepspeed", [f"deepspeed --num_gpus {plan.gpus} {plan.script}"], flags)
    hosts = [f"{plan.address if n == 0 else f'NODE{n}'} slots={plan.gpus}" for n in range(min(plan.nodes, 8))]
    more = [f"# ... {plan.nodes - 8} more lines"] * (plan.nodes > 8)
    return _section(
        "deepspeed, once, on the first node, which reaches the others by ssh without a password",
        [
            *(f"# hostfile: {host}" for host in hosts),
            *more,
            f"deepspeed --hostfile hostfile --num_nodes {plan.nodes} --num_gpus {plan.gpus} "
            f"--master_addr {plan.address} --master_port {plan.port} {plan.script}",
        ],
        {
            "--hostfile": "a line per machine, with its GPUs as slots",
            f"--num_nodes {plan.nodes}": "machines",
            **flags,
        },
    )


def _explain_use(plan: LaunchPlan) -> str:
    plain = f"mk.Plan.ddp({plan.nodes * plan.gpus})"
    return (
        f"# In {plan.program.name}: cluster = mk.Cluster.from_env(), then cluster.train(..., plan={plain}, ...).\n"
        "# A script that does not know mpkit: put `-m mpkit watch` before its name, and it is drawn all the same.\n"
        "# docs/many-machines.md has more."
    )


def _section(title: str, lines: list[str], flags: dict[str, str]) -> str:
    width = max(map(len, flags))
    explained = [f"#   {flag:<{width}}  {words}" for flag, words in flags.items()]
    return "\n".join([f"# ---- {title}", *explained, *lines])
