"""Watching a program that was not written for mpkit: what it computes, communicates and holds becomes a Trace.

`mk.watch.step` and `mk.watch.span` are for such programs: they say what mpkit cannot see by itself.
"""

from mpkit.launch.watch.actions import span, step

__all__ = ["span", "step"]
