"""OpenedTrace: a Trace that came from files, with its timeline."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mpkit.common.tracebacks import public
from mpkit.timeline.foreign.inference.infer import InferredStrategy, infer
from mpkit.timeline.foreign.notes import host_notes
from mpkit.timeline.timeline import Timeline
from mpkit.trace import Trace

if TYPE_CHECKING:
    from mpkit.devices.hardware import Hardware

__all__ = ["OpenedTrace"]


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
        """The plan that the program ran as far as the trace tells it, with a sentence of evidence for each part."""
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
        if "imported" in self.meta and timeline.clock == "virtual":
            timeline.notes += host_notes(Timeline.of(self, None, "measured"), timeline)
        return timeline

    def __repr__(self) -> str:
        files = self.meta.get("imported", {}).get("files", [])
        ranks = f"{self.world_size} rank{'s' * (self.world_size != 1)}"
        named = (f", {files[0]}" + (f" and {len(files) - 1} more" if len(files) > 1 else "")) if files else ""
        return f"<OpenedTrace of {ranks}, {len(self):,} ops{named}>"

    def __str__(self) -> str:
        return str(self.timeline())

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        """Show the timeline as a cell's last line."""
        return self.timeline()._repr_mimebundle_(include, exclude)
