"""The runs of this notebook, or of a folder: what each was and what came out; two are compared.

keep    a run that has ended leaves a row, and the timeline of its last step
runs    the rows so far; or of the traces that were saved in a folder, which outlast the notebook
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, overload

from mpkit.common.disk import check_folder
from mpkit.common.display import data_frame, draw
from mpkit.common.tracebacks import level_of_user, public
from mpkit.errors import MpkitError
from mpkit.plan.plan import Plan
from mpkit.timeline.comparison import Comparison, compare_timelines
from mpkit.timeline.foreign.open_trace import open as open_trace

if TYPE_CHECKING:
    import pandas as pd

    from mpkit.launch.session.run import Run
    from mpkit.timeline.timeline import Timeline

__all__ = ["KeptRun", "RunList", "keep", "runs"]

KEPT = 100
"""The most runs that are kept; the oldest go first."""


@dataclass(frozen=True)
class KeptRun:
    """What is kept of a run.

    Attributes:
        number: counts the runs of this process, or the files of a folder, from 1.
        plan: its plan.
        status: "finished", "stopped" or "failed"; of a file "finished" or "unfinished".
        steps: the steps that it did.
        step_time: seconds of its step of median length on the virtual clock, without the first; None if it did none.
        bubble: the idle share of that step; None if it did none.
        memory: bytes that the fullest rank held at its peak.
        loss: of its last step; None if it did none.
        timeline: of its last step; None if it did none.
        name: of its file, without the ending; "" if it comes from none.
    """

    number: int
    plan: Plan
    status: str
    steps: int
    step_time: float | None
    bubble: float | None
    memory: int
    loss: float | None
    timeline: Timeline | None = field(repr=False)
    name: str = ""


class RunList(Sequence[KeptRun]):
    """The runs of this notebook, the oldest first; in a notebook, a table."""

    def __init__(self, rows: Sequence[KeptRun]) -> None:
        self._rows = list(rows)

    @overload
    def __getitem__(self, index: int) -> KeptRun: ...
    @overload
    def __getitem__(self, index: slice) -> RunList: ...
    def __getitem__(self, index: int | slice) -> KeptRun | RunList:
        return RunList(self._rows[index]) if isinstance(index, slice) else self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[KeptRun]:
        return iter(self._rows)

    def compare(self, *numbers: int) -> Comparison:
        """Compare the last steps of some runs, by the numbers in the table: timelines on one axis, and why ranks idle.

        Raises:
            ValueError: there is no such run, or it did no step.
        """
        known = {row.number: row for row in self._rows if row.timeline is not None}
        chosen = numbers or tuple(known)[-2:]
        for number in chosen:
            if number not in known:
                there = ", ".join(map(str, known)) or "none yet"
                raise ValueError(
                    f"compare({number}): there is no run {number} with a step. There are: {there}"
                )
        return compare_timelines(
            [(f"{known[n].name or f'run {n}'}: {known[n].plan!r}", known[n].timeline) for n in chosen]
        )

    def to_dataframe(self) -> pd.DataFrame:
        """Return a row per run, with a column for each field in which their plans differ."""
        names = ("number", "name", "plan", "status", "steps", "step_time", "bubble", "memory", "loss")
        differ = [
            each.name for each in fields(Plan)
            if len({repr(getattr(row.plan, each.name)) for row in self._rows}) > 1
        ]  # fmt: skip
        rows = [
            [getattr(row, name) for name in names] + [getattr(row.plan, name) for name in differ]
            for row in self._rows
        ]
        return data_frame(rows, [*names, *differ])

    def __str__(self) -> str:
        return str(draw(self, "text"))

    __repr__ = __str__

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display(draw(self, "widget"))  # type: ignore[no-untyped-call]


_kept: deque[KeptRun] = deque(maxlen=KEPT)
_numbers = count(1)


def keep(run: Run) -> KeptRun:
    """Keep a run that has ended; a notebook's runs are kept by themselves.

    Returns:
        Its row.
    """
    timeline = run.timeline() if run.losses else None
    row = _row_of(next(_numbers), run.plan, run.status, run.losses, timeline)
    _kept.append(row)
    return row


def _row_of(
    number: int, plan: Plan, status: str, losses: Sequence[float], timeline: Timeline | None, name: str = ""
) -> KeptRun:
    """Return the row of a run whose timeline is this."""
    steps = timeline.steps if timeline is not None else []
    each = [timeline.step(step) for step in steps[1:] or steps] if timeline is not None else []
    typical = sorted(each, key=lambda step: step.step_time)[len(each) // 2] if each else None
    memory = (
        max((held["total"] for held in timeline.peak_memory_of_run), default=0) if timeline is not None else 0
    )
    return KeptRun(
        number, plan, status, len(losses), typical.step_time if typical is not None else None,
        typical.bubble if typical is not None else None, memory, losses[-1] if losses else None, typical, name,
    )  # fmt: skip


@public
def runs(folder: str | Path | None = None) -> RunList:
    """Return the runs of this notebook that have ended, the oldest first; or those whose traces lie in a folder.

    >>> import torch, mpkit as mk
    >>> from mpkit.launch.session.run_list import keep
    >>> with mk.Cluster(ranks=2, device="cpu") as cluster:
    ...     for plan in (mk.Plan.ddp(2), mk.Plan.gpipe(2, 2)):
    ...         _ = keep(cluster.train(
    ...             mk.models.MLP(2, 3), [(torch.ones(4, 2), torch.zeros(4, dtype=torch.long))], plan,
    ...             loss=torch.nn.functional.cross_entropy, optimizer=torch.optim.SGD, steps=2).wait())
    >>> found = mk.runs()
    >>> [row.plan for row in found[-2:]]
    [Plan(dp=2), Plan(pp=2, schedule='gpipe', microbatches=2)]
    >>> len(found.compare().rows)
    2

    Args:
        folder: where traces were saved (`run.trace.save("runs/first.mpkit")`); None: this notebook's runs.

    Raises:
        ValueError: there is no such folder, or no saved trace in it.
    """
    if folder is None:
        return RunList([*_kept])
    path = check_folder("mk.runs", folder).expanduser()
    files = sorted(path.glob("*.mpkit"))
    if not files:
        what = "no saved trace (*.mpkit) is in it" if path.is_dir() else "there is no such folder"
        raise ValueError(
            f"runs({str(folder)!r}): {what}; run.trace.save({str(path / 'first.mpkit')!r}) saves one"
        )
    rows: list[KeptRun] = []
    for file in files:
        try:
            trace = open_trace(file)
            plan = Plan.from_json(trace.meta["plan"])
        except (MpkitError, ValueError, KeyError) as error:
            warnings.warn(
                f"runs({str(folder)!r}): {file.name} is left out: {error}", stacklevel=level_of_user()
            )
            continue
        done = int(trace.meta.get("first_step", 0)) + len(trace.losses) >= int(trace.meta.get("steps", 0))
        timeline = trace.timeline() if trace.losses else None
        status = "finished" if done else "unfinished"
        rows.append(_row_of(len(rows) + 1, plan, status, trace.losses, timeline, file.stem))
    return RunList(rows)
