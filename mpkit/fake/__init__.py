"""trace_fake: a Plan at full size, on hardware and rank counts that nobody here has, in seconds and without memory.

play      the rank's side: one rank of many, on tensors without content
"""

from mpkit.fake.trace_fake import trace_fake

__all__ = ["trace_fake"]
