"""`mk.open`: traces from files, whoever wrote them.

a folder or files of torch.profiler     imported: a file per rank
what `Trace.save` wrote                 loaded as it is
the folder of a run                     loaded as far as it is written
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpkit.common.tracebacks import public
from mpkit.errors import TraceError
from mpkit.plan.plan import Plan
from mpkit.timeline.foreign.announced_plan import InferredStrategy, infer, plan_of_mesh
from mpkit.timeline.foreign.stream import first_bytes, looks_like_json, looks_like_trace
from mpkit.timeline.foreign.torch_profiler import import_traces
from mpkit.timeline.timeline import Timeline
from mpkit.trace import Trace

if TYPE_CHECKING:
    from mpkit.devices.hardware import Hardware


@public
@dataclass(repr=False)
class OpenedTrace(Trace):
    """What `mk.open` returns: a Trace whose timeline is one call away. `mk.compare` takes it as it takes a run."""

    @property
    def notes(self) -> list[str]:
        """Sentences on what a reader should know: absent ranks, repairs of the files, how clocks were aligned."""
        return list(self.meta.get("imported", {}).get("notes", []))

    @cached_property
    def inferred(self) -> InferredStrategy:
        """The plan that the program's libraries announce, with a sentence of evidence for each part.

        There is none where something is sent that no library names; sentences say what that would fit.
        """
        return infer(self)

    def timeline(self, hardware: Hardware | str | None = None, clock: str | None = None) -> Timeline:
        """Return the trace on a clock.

        Args:
            hardware: the name of a catalogued machine or a `Hardware` to replay it on; None: as it was measured.
            clock: "measured" or "virtual", as in `Run.timeline`; None: measured for what other tools recorded.

        Raises:
            ValueError: there is no such hardware or clock.
        """
        if clock is None and hardware is None and "imported" in self.meta:
            clock = "measured"
        timeline = Timeline.of(self, hardware, clock)
        timeline.notes[:0] = self.notes
        return timeline

    def __repr__(self) -> str:
        files = self.meta.get("imported", {}).get("files", [])
        ranks = f"{self.world_size} rank{'s' * (self.world_size != 1)}"
        named = f", {files[0]}" if files else ""
        named += f" and {len(files) - 1} more" if len(files) > 1 else ""
        return f"<OpenedTrace of {ranks}, {len(self):,} ops{named}>"

    def __str__(self) -> str:
        return str(self.timeline())

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        """Show the timeline as a cell's last line."""
        return self.timeline()._repr_mimebundle_(include, exclude)


TAKES = (
    "mk.open takes .json and .json.gz files of torch.profiler (export_chrome_trace), a folder of them, and what "
    "trace.save wrote"
)

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


@public
def open(path: Paths, *, plan: Plan | None = None) -> OpenedTrace:
    """Open traces: torch.profiler's of one rank or many, or mpkit's own.

    The result is a `Trace`, and shows itself as its timeline. What is known of it besides (which ranks of how many,
    what was fixed, how clocks were aligned) is in `notes`.

    Args:
        path: a file, a folder of files with one per rank, or several files. JSON may be zipped by gzip; JSON in a
            folder that is no trace is left out.
        plan: the plan of the program, for views that name its axes; None: the one that its libraries announce.

    Raises:
        TraceError: there is no such file, or it cannot be read as a trace.
        ValueError: groups of the trace do not lie along the axes of the plan.

    >>> import json, pathlib, tempfile
    >>> import mpkit as mk
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "rank0.json")
    ...     event = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 0, "dur": 5}
    ...     _ = path.write_text(json.dumps([event]))
    ...     mk.open(path)
    <OpenedTrace of 1 rank, 2 ops, rank0.json>
    """
    given: Any = path
    several = isinstance(given, Iterable) and not isinstance(given, str | os.PathLike)
    asked: list[Any] = list(given) if several else [given]
    if not all(isinstance(each, str | os.PathLike) for each in asked):
        raise TraceError(f"mk.open({path!r}): a path, or several in a list. {TAKES}")
    if len(asked) == 1 and (own := _own(Path(asked[0]))) is not None:
        return OpenedTrace(own.ranks, own.meta)
    files = [file for each in asked for file in _files(Path(each))]
    if not files:
        raise TraceError(f"an empty list: no trace. {TAKES}")
    trace = import_traces(files)
    opened = OpenedTrace(trace.ranks, trace.meta)
    known = plan_of_mesh(opened, plan or opened.inferred.plan)
    if known is None and plan is not None:
        raise ValueError(
            f"mk.open(..., plan={plan}): the trace has {opened.world_size} ranks, and not all of their groups lie "
            f"along the axes of this plan. mk.open(path).inferred says which communication there is."
        )
    if known is not None:
        opened.meta["plan"] = known.to_json()
        note = f"The plan is the one that the program's libraries announce (trace.inferred): {known}."
        opened.meta["imported"]["notes"] += [note] * (plan is None)
    return opened


def _own(path: Path) -> Trace | None:
    """Return a trace that mpkit wrote; None if the path may be torch.profiler's."""
    if path.is_dir():
        own = (path / "meta.json").is_file() or any(path.glob("rank*.ops"))
        return Trace.read(path) if own else None
    if path.is_file() and looks_like_json(path):
        return None
    if path.is_file() and not first_bytes(path, 2).startswith(b"PK"):
        raise TraceError(f"{path} begins with {first_bytes(path, 40)!r}, which is no trace. {TAKES}")
    return Trace.load(path)


def _files(path: Path) -> list[Path]:
    """Return the file, or the traces in a folder without its other JSON, such as configurations."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise TraceError(f"{path}: no such file or folder")
    files = [file for pattern in ("*.json", "*.json.gz") for file in path.glob(pattern) if file.is_file()]
    traces = sorted(file for file in files if looks_like_trace(file))
    if not traces:
        below = [f"mk.open({str(each)!r})" for each in sorted(path.iterdir()) if each.is_dir()]
        raise TraceError(f"{path}: no trace. {TAKES}" + f"; try {', '.join(below[:4])}" * bool(below))
    return traces
