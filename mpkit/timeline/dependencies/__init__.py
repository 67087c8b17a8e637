"""What each operation of a step had to wait for: a graph of the step, which can be played again.

build          what each rank did, in order, and the pieces of all ranks joined by their messages and collectives
graph          StepGraph: when each piece ends, given how long all of them take; how late each may end
critical_path  CriticalPath: the chain of operations that decides how long the step takes; who waits for whom
"""

from __future__ import annotations

from mpkit.timeline.dependencies.build import graph_of
from mpkit.timeline.dependencies.critical_path import CriticalPath, PathOp, critical_path
from mpkit.timeline.dependencies.graph import Node, StepGraph

__all__ = ["CriticalPath", "Node", "PathOp", "StepGraph", "critical_path", "graph_of"]
