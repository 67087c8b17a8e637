"""trace_fake: a Plan at full size, on hardware and rank counts that nobody here has, in seconds and without memory.

trace     the caller's side: checks, and a Trace of all ranks from what one process played
play      the rank's side: one rank of many, on tensors without content
kinds     which ranks do the same
mirror    what was recorded of one, for the others
"""

from mpkit.fake.trace import trace_fake

__all__ = ["trace_fake"]
