"""trace_fake: run a Plan at full size, on hardware and rank counts that are not here, in seconds and without memory.

trace     the caller's side: checks, and a Trace of all ranks from what one process recorded
play      the rank's side: which ranks differ, and each of them alone, on tensors without content
"""

from mpkit.prediction.dry_run.trace import trace_fake

__all__ = ["trace_fake"]
