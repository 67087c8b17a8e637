"""What a reader should know of the samples of the ranks' GPUs."""

from __future__ import annotations

from mpkit.trace import Trace

__all__ = ["sample_notes"]


def sample_notes(trace: Trace, elsewhere: bool) -> list[str]:
    """Return a sentence on why a timeline has no samples of GPUs that a reader might expect.

    >>> sample_notes(Trace([], {"gpus_not_sampled": "GPUs were not sampled: ..."}), elsewhere=False)
    ['GPUs were not sampled: ...']

    Args:
        trace: the trace of the run.
        elsewhere: whether it is replayed on other hardware.
    """
    if elsewhere and any(len(rank.samples) for rank in trace.ranks):
        return [
            "Samples of GPUs belong to the machine of the run: mk.Timeline.of(trace).device_samples has them, without "
            "hardware=."
        ]
    why = trace.meta.get("gpus_not_sampled", "")
    return [str(why)] if why and not elsewhere else []
