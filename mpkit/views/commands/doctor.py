"""The command `mpkit doctor`."""

from __future__ import annotations

import argparse

from mpkit.common.command_line import Commands, add_command

__all__ = ["add_doctor"]


def add_doctor(commands: Commands) -> None:
    """Add the command to the parser."""
    doctor = add_command(
        commands, "doctor", "examine this machine: devices, links, host and variables",
        "It looks at GPUs and whether they are alike, NVLink, PCI Express, P2P, RAM per GPU, CPUs, shared memory, "
        "limits, ports, NCCL's variables, the driver and torch, and measures two ranks. Each finding has its "
        "evidence, what it costs and what fixes it. The exit status is 1 if something costs.",
        example="mpkit doctor out of memory", run=_doctor,
    )  # fmt: skip
    doctor.add_argument(
        "topic", nargs="*",
        help="a common problem (gpus not found, gpu 0 busier, out of memory, slow scaling, nccl time-outs), or "
        "`variables` for an explanation of NCCL's",
    )  # fmt: skip
    doctor.add_argument("--quick", action="store_true", help="measure nothing on ranks")
    doctor.add_argument("--json", action="store_true", help="print JSON")


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
