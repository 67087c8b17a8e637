"""Keep what a tutorial records, while it runs: imported by the tutorial's kernel.

start     from now on note each launch of ranks and each opened trace, with the cell and the name it is assigned to
save      save the traces of those that finished
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mpkit.timeline.foreign.open_trace as opening
from mpkit.launch.launch import Launch
from mpkit.launch.session.run import Run
from mpkit.plan.plan import Plan
from mpkit.timeline.timeline import Timeline
from mpkit.trace import Trace

MOST = 500_000
"""Bytes of a trace that is kept."""


class Recorder:
    """Notes what the cells of a notebook record.

    Args:
        shell: the notebook's IPython shell.
    """

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self.cell = 0
        self.found: list[dict[str, Any]] = []

    def start(self) -> Recorder:
        """Note launches and opened traces from the next cell on, which is number 0."""
        begin, read = Launch.__init__, opening.open

        def launched(launch: Launch, *args: Any, **kwargs: Any) -> None:
            begin(launch, *args, **kwargs)
            self.found.append({"cell": self.cell, "what": launch, "name": ""})

        def opened(path: Any) -> Any:
            trace = read(path)
            self.found.append({"cell": self.cell, "what": trace, "name": ""})
            return trace

        Launch.__init__, opening.open = launched, opened
        self.shell.events.register("post_run_cell", self._ended)
        self.cell = -1  # the cell that calls this ends next
        return self

    def _ended(self, result: Any) -> None:
        """Look up the names that what the cell recorded is assigned to."""
        for name, value in self.shell.user_ns.items():
            for each in self.found:
                of_run = isinstance(value, Run) and value._launch is each["what"]
                if each["cell"] == self.cell and (of_run or value is each["what"]) and name[0] != "_":
                    each["name"] = name
        self.cell += 1

    def save(self, folder: str) -> None:
        """Save the traces that have something to show, and an index: each one's cell, name and plan."""
        index = []
        for each in self.found:
            what = each["what"]
            if isinstance(what, Launch) and (not what.has_ended or what.error is not None):
                continue
            trace: Trace = what.trace if isinstance(what, Launch) else what
            if not len(Timeline.of(trace).spans):
                continue
            path = trace.save(Path(folder, f"{len(index) + 1}.mpkit"))
            if path.stat().st_size > MOST:
                path.unlink()
                continue
            plan = trace.meta.get("plan")
            plan = repr(Plan.from_json(plan)) if plan else ""
            index.append({"cell": each["cell"], "name": each["name"], "plan": plan})
        Path(folder, "index.json").write_text(json.dumps(index))
