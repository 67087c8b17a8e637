"""The commands that explain what ran, and where: `mpkit open`, `mpkit diagnose` and `mpkit doctor`."""

from __future__ import annotations

import argparse
from pathlib import Path

from mpkit.cli.parser import Commands, add_command

__all__ = ["add_understand"]


def add_understand(commands: Commands) -> None:
    """Add the commands."""
    _add_open(commands)
    _add_diagnose(commands)
    _add_doctor(commands)


def _add_open(commands: Commands) -> None:
    command = add_command(
        commands, "open", "show the timeline of traces that torch.profiler or mpkit wrote",
        "It reads Chrome traces (.json or .json.gz, one file per rank, or a folder of them) and what `trace.save` "
        "wrote, and prints the timeline of all ranks.",
        example="mpkit open traces/ --html timeline.html", run=_open,
    )  # fmt: skip
    command.add_argument("paths", nargs="+", metavar="PATH", help="files, or a folder with one file per rank")
    command.add_argument(
        "--hardware", metavar="MACHINE", help="replay the trace on this machine, such as 8x-h100-nvlink"
    )
    command.add_argument("--html", metavar="FILE", help="file for the interactive timeline")
    command.add_argument("--perfetto", metavar="FILE", help="file for ui.perfetto.dev, with all ranks")
    command.add_argument("--trace", metavar="FILE", help="file for the trace, which `mpkit open` reads")


def _open(options: argparse.Namespace) -> None:
    from mpkit.timeline.foreign.open_trace import open

    trace = open(options.paths)
    timeline = trace.timeline(options.hardware)
    print(timeline)
    print(f"inferred: {trace.inferred}")
    if options.html:
        timeline.to_html(options.html)
        print(f"mpkit: an interactive timeline is in {options.html}")
    if options.perfetto:
        print(f"mpkit: a trace for ui.perfetto.dev is in {timeline.to_perfetto(options.perfetto)}")
    if options.trace:
        print(f"mpkit: the trace is in {trace.save(options.trace)}")


def _add_diagnose(commands: Commands) -> None:
    command = add_command(
        commands, "diagnose", "say why a recorded step takes as long as it does",
        "It prints findings in the order of what they cost: slow ranks and links, communication that nothing hides, "
        "uneven stages, data loading, launches and more. Each finding has its reason, what to try, and what that "
        "would gain.",
        example="mpkit diagnose traces/ --html findings.html", run=_diagnose,
    )  # fmt: skip
    command.add_argument(
        "paths", nargs="+", metavar="PATH", help="what `mpkit open` reads: files, or a folder with one per rank"
    )  # fmt: skip
    command.add_argument("--step", type=int, metavar="N", help="the step (default: the last complete one)")
    command.add_argument(
        "--hardware", metavar="MACHINE",
        help="the machine that it ran on, such as 8x-a100-nvlink (default: the one that the trace names)",
    )  # fmt: skip
    command.add_argument(
        "--clock", choices=("measured", "virtual"), help="the clock of the times (default: that of the run)"
    )
    command.add_argument("--critical", action="store_true", help="print the critical path as well")
    command.add_argument("--html", type=Path, metavar="FILE", help="file for a page with pictures")


def _diagnose(options: argparse.Namespace) -> None:
    from mpkit.timeline.foreign.open_trace import open
    from mpkit.timeline.timeline import Timeline

    timeline = Timeline.of(open(options.paths), clock=options.clock)
    found = timeline.diagnose(options.step, hardware=options.hardware)
    print(found)
    if options.critical:
        print(f"\n{found.path}")
    if options.html is not None:
        found.to_html(options.html)
        print(f"\nmpkit: a page with pictures is in {options.html}")


def _add_doctor(commands: Commands) -> None:
    doctor = add_command(
        commands, "doctor", "examine this machine: devices, links, host and variables",
        "It looks at GPUs and whether they are alike, NVLink, PCI Express, P2P, RAM per GPU, CPUs, shared memory, "
        "limits, NCCL's variables, the driver and torch, and measures two ranks. Each finding has its "
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
