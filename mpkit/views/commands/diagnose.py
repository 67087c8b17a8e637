"""`mpkit diagnose PATH`: why a step of a recorded run takes as long as it does."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

__all__ = ["add_diagnose", "diagnose"]


def add_diagnose(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    command = commands.add_parser(
        "diagnose",
        help="say why a recorded run's step takes as long as it does",
        description="Reads traces of torch.profiler, or mpkit's own (Trace.save, mpkit watch --trace), and "
        "prints findings by "
        "what they cost: slow ranks and links, communication that nothing hides, uneven stages, loading, launches, and "
        "more; each with its reason, what to try and what that would gain.",
    )
    command.add_argument(
        "paths", nargs="+", metavar="PATH", help="what mpkit open takes: files, or a folder with one per rank"
    )
    command.add_argument("--step", type=int, help="which step; left out: one of median length")
    command.add_argument(
        "--hardware", help="the machine, if the trace does not name it, such as 8x-a100-nvlink"
    )
    command.add_argument("--clock", choices=("measured", "virtual"), help="left out: that of the run")
    command.add_argument("--critical", action="store_true", help="print the critical path as well")
    command.add_argument("--html", type=Path, help="where a page with pictures goes")
    command.set_defaults(run=_run)


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
    from mpkit.timeline.foreign.opening import open
    from mpkit.timeline.timeline import Timeline

    found = Timeline.of(open(paths), clock=clock).diagnose(step, hardware=hardware)
    print(found)
    if critical:
        print(f"\n{found.path}")
    if html is not None:
        found.to_html(html)
        print(f"\nmpkit: a page with pictures is in {html}")
