"""`mpkit diagnose PATH`: why a step of a recorded run takes as long as it does."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from mpkit.common.command_line import Commands, add_command

__all__ = ["add_diagnose", "diagnose"]


def add_diagnose(commands: Commands) -> None:
    """Add the command."""
    command = add_command(
        commands, "diagnose", "say why a recorded step takes as long as it does",
        "It prints findings in the order of what they cost: slow ranks and links, communication that nothing hides, "
        "uneven stages, data loading, launches and more. Each finding has its reason, what to try, and what that "
        "would gain.",
        example="mpkit diagnose traces/ --html findings.html", run=_run,
    )  # fmt: skip
    command.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help="what `mpkit open` reads: files, or a folder with one per rank",
    )
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


def _run(options: argparse.Namespace) -> None:
    diagnose(
        options.paths, step=options.step, hardware=options.hardware, clock=options.clock, critical=options.critical,
        html=options.html,
    )  # fmt: skip


def diagnose(
    paths: Sequence[str | Path], *, step: int | None = None, hardware: str | None = None, clock: str | None = None,
    critical: bool = False, html: Path | None = None,
) -> None:  # fmt: skip
    """Print the diagnosis of a trace.

    Args:
        paths: as for `mk.open`.
        step: as for `Timeline.diagnose`.
        hardware: the machine that it ran on, for its memory and latency.
        clock: "measured" or "virtual"; None: that of the run.
        critical: whether the critical path is printed as well.
        html: where a page goes; None: nowhere.

    Raises:
        ValueError: there is no such step or hardware.
        TraceError: the file is no trace.
    """
    from mpkit.timeline.foreign.open_trace import open
    from mpkit.timeline.timeline import Timeline

    found = Timeline.of(open(paths), clock=clock).diagnose(step, hardware=hardware)
    print(found)
    if critical:
        print(f"\n{found.path}")
    if html is not None:
        found.to_html(html)
        print(f"\nmpkit: a page with pictures is in {html}")
