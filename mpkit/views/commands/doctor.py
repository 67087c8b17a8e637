"""The command `mpkit doctor`."""

from __future__ import annotations

import argparse

__all__ = ["add_doctor"]


def add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    doctor = commands.add_parser(
        "doctor",
        help="examine this machine: devices, links, host, variables; what that costs, and what fixes it",
        description="Examines this machine: GPUs and whether they are alike, NVLink, PCI Express, P2P, RAM per GPU, "
        "CPUs, shared memory, limits, ports, variables of nccl, the driver against torch, and what two ranks measure. "
        "Each finding has its evidence, what it costs and what fixes it. Exits with 1 if something costs.",
    )
    doctor.add_argument(
        "topic", nargs="*",
        help="a common issue: 'gpus not found', 'gpu 0 busier', 'out of memory', 'slow scaling', 'nccl time-outs'; or "
        "variables, which explains those of nccl",
    )  # fmt: skip
    doctor.add_argument("--quick", action="store_true", help="leave out what is measured on ranks")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> None:
    from rich.console import Console

    from mpkit.common.display import draw
    from mpkit.launch.doctor.doctor import doctor

    report = doctor(" ".join(options.topic) or None, quick=options.quick)
    if options.json:
        print(report.to_json())
    else:
        draw(report, "terminal", Console(highlight=False))
    raise SystemExit(0 if report.ok else 1)
