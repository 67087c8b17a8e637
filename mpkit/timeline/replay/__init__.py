"""Replay: a Trace on a clock.

program     one rank's ops on the axis of its own work, and from there on the clock
network     which ranks have issued which communication, and when the links serve it
core        Replay: ranks and network, as records arrive
spans       operations with their times, memory, samples of GPUs, parts of all-to-alls; ReplayResult
costs       how long ops take on the chosen machine

`as_measured` puts a Trace on the wall clock instead.
"""

from dataclasses import replace

from mpkit.devices.hardware import Hardware
from mpkit.timeline.replay.core import Replay
from mpkit.timeline.replay.spans import DEVICE_SAMPLE, HELD, SPAN, ReplayResult, as_measured
from mpkit.trace import TIMED_BY_EVENTS, Trace

__all__ = ["DEVICE_SAMPLE", "HELD", "SPAN", "Replay", "ReplayResult", "replay"]


def replay(trace: Trace, hardware: Hardware | str | None = None, clock: str | None = None) -> ReplayResult:
    """Put a trace on a clock; `Timeline.of` says more.

    A clock of None is "measured" if each rank had a GPU and the hardware is the run's own, else "virtual".
    """
    if clock not in (None, "virtual", "measured"):
        raise ValueError(f"clock={clock!r}: there are clock='virtual' and clock='measured'")
    if clock == "measured" and hardware is not None:
        raise ValueError(
            f"clock='measured' with hardware={hardware!r}: the wall clock was that of the run's own machine. For other "
            "hardware leave the clock out; for the wall clock leave the hardware out."
        )
    trace.check()
    if clock is None:
        clock = "measured" if hardware is None and trace.meta.get("device") in TIMED_BY_EVENTS else "virtual"
    if clock == "measured":
        return as_measured(trace)
    replaying = Replay(trace.world_size, hardware, meta=trace.meta)
    for rank, recorded in enumerate(trace.ranks):
        elsewhere = hardware is not None  # other devices would have been busy otherwise
        replaying.feed(rank, replace(recorded, samples=recorded.samples[:0]) if elsewhere else recorded)
    replaying.finish()
    return replaying.collect()
