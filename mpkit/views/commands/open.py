"""`mpkit open PATH`: a trace from a file, on the timeline."""

from __future__ import annotations

import argparse

from mpkit.common.command_line import Commands, add_command

__all__ = ["add_open"]


def add_open(commands: Commands) -> None:
    """Add the command to the parser's."""
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
