"""Replay: a Trace on a clock.

program    one rank's ops on the axis of its own work, and from there on the clock
network    who has asked for which communication, and when the links get to it
core       Replay: ranks and network, as records come in
held       memory on that clock
costs      what ops take on the machine chosen
measured   the wall clock
"""

from __future__ import annotations

from mpkit.devices import Hardware
from mpkit.replay.core import Replay
from mpkit.replay.measured import measured
from mpkit.timeline import Timeline
from mpkit.trace import Trace

__all__ = ["Replay", "replay"]


def replay(trace: Trace, hardware: Hardware | str | None = None, clock: str | None = None) -> Timeline:
    """Put a trace on a clock.

    Args:
        trace: what each rank did.
        hardware: a name of `mpkit.catalogue()` or a `Hardware`; None is the machine of the run.
        clock: "virtual": each rank on a device of its own; "measured": the wall clock. None: measured where each
            rank had a GPU, virtual on CPUs, and on any hardware but the run's own.

    Raises:
        ValueError: no such clock or hardware, or the wall clock of hardware that the run was not on.
        TraceError: a record says what no run records.
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
        clock = "measured" if hardware is None and trace.meta.get("device") == "cuda" else "virtual"
    if clock == "measured":
        return measured(trace)
    replaying = Replay(trace.world_size, hardware, meta=trace.meta)
    for rank, recorded in enumerate(trace.ranks):
        replaying.feed(rank, recorded.ops, recorded.names, recorded.memory)
    replaying.finish()
    return replaying.timeline()
