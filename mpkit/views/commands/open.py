"""`mpkit open PATH`: a trace from a file, on the timeline."""

from __future__ import annotations

import argparse

__all__ = ["add_open"]


def add_open(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser's."""
    command = commands.add_parser(
        "open",
        help="open traces of torch.profiler, or mpkit's own, and see their timeline",
        description="Opens the Chrome traces that torch.profiler exported (.json or .json.gz, one file per rank, or a "
        "folder of them), or what trace.save wrote, and prints the timeline of all ranks.",
    )
    command.add_argument("paths", nargs="+", metavar="PATH", help="files, or a folder with one file per rank")
    command.add_argument("--hardware", help="replay it on a catalogued machine; mk.hardware() lists them")
    command.add_argument("--html", help="where an interactive timeline goes")
    command.add_argument("--perfetto", help="where all ranks go in one trace for ui.perfetto.dev")
    command.add_argument("--trace", help="where the trace goes, for Trace.load and mpkit open")
    command.set_defaults(run=_open)


def _open(options: argparse.Namespace) -> None:
    from mpkit.timeline.foreign.opening import open

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
