"""Which clock a timeline's times are of, in words: that of this machine's ranks, a replay, or somebody else's trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpkit.timeline.timeline import Timeline

__all__ = ["CLOCKS", "clock_words", "files_words"]

CLOCKS = {
    "measured": "measured clock: the times of this machine's own clock",
    "virtual": "virtual clock: every rank replayed on a device of its own",
    "simulated": "simulated: from the schedule alone, nothing was run",
}
"""By `Timeline.clock`, for what mpkit ran itself."""


def clock_words(timeline: Timeline) -> str:
    """Return which clock the times are of; for a trace that other tools recorded also its files and device.

    >>> import mpkit as mk
    >>> clock_words(mk.simulate(mk.Plan.gpipe(2, 2)))
    'simulated: from the schedule alone, nothing was run'
    """
    words = CLOCKS.get(timeline.clock, timeline.clock)
    imported = timeline.meta.get("imported")
    if not imported:
        return words
    device = imported.get("gpu") or ("the CPU" if timeline.meta.get("device") == "cpu" else "its device")
    if timeline.clock == "measured":
        return f"measured clock: the times of {device} as recorded in {files_words(timeline)}"
    return f"{words}, with the operations of {files_words(timeline)} ({device})"


def files_words(timeline: Timeline) -> str:
    """Return the files that an imported trace is from, the first by its name; "" for mpkit's own."""
    files = (timeline.meta.get("imported") or {}).get("files", [])
    if not files:
        return ""
    return f"{files[0]}" + (f" and {len(files) - 1} more" if len(files) > 1 else "")
