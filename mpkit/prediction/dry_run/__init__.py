"""trace_fake: run a Plan at full size, on hardware and rank counts that are not here, in seconds and without memory.

trace     the caller's side: checks, and a Trace of all ranks from what one process recorded; what each rank would hold
          when it holds most, by category
play      the rank's side: one rank of many, on tensors without content
mirror    which ranks do the same, and the records of one of them rewritten for the others
"""

from mpkit.prediction.dry_run.trace import trace_fake

__all__ = ["trace_fake"]
