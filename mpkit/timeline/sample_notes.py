"""What a reader should know of samples: of the ranks' GPUs, and of the memory of watched programs."""

from __future__ import annotations

from mpkit.trace import Trace

__all__ = ["sample_notes"]

REPEATED = (
    "Memory was measured in the first steps, until one repeated another; each later step of that kind is drawn as it "
    "was measured then."
)


def sample_notes(trace: Trace, elsewhere: bool) -> list[str]:
    """Return sentences on samples of GPUs that a reader might expect, and on memory that is not measured anew.

    >>> sample_notes(Trace([], {"gpus_not_sampled": "GPUs were not sampled: ..."}), elsewhere=False)
    ['GPUs were not sampled: ...']

    Args:
        trace: the trace of the run.
        elsewhere: whether it is replayed on other hardware.
    """
    watched = trace.meta.get("watched") and any(len(rank.memory) for rank in trace.ranks)
    repeated = [REPEATED] if watched else []
    if elsewhere and any(len(rank.samples) for rank in trace.ranks):
        return [
            *repeated,
            "Samples of GPUs belong to the machine of the run: mk.Timeline.of(trace).device_samples has them, without "
            "hardware=.",
        ]
    why = trace.meta.get("gpus_not_sampled", "")
    return repeated + ([str(why)] if why and not elsewhere else [])
