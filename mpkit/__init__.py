"""mpkit: learn, try and plan parallel training in PyTorch, from a notebook.

The names below are the public ones. Each is imported when it is first used, so that `import mpkit` is cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpkit.cluster import Cluster
    from mpkit.errors import Deadlock, MpkitError, RankFailed, TraceError
    from mpkit.plan import Plan
    from mpkit.schedule import Schedule
    from mpkit.timeline import Timeline
    from mpkit.trace import Trace

__version__ = "0.1.0"

_HOME = {
    "Cluster": "mpkit.cluster",
    "Deadlock": "mpkit.errors",
    "MpkitError": "mpkit.errors",
    "Plan": "mpkit.plan",
    "RankFailed": "mpkit.errors",
    "Schedule": "mpkit.schedule",
    "Timeline": "mpkit.timeline",
    "Trace": "mpkit.trace",
    "TraceError": "mpkit.errors",
}

__all__ = [
    "Cluster",
    "Deadlock",
    "MpkitError",
    "Plan",
    "RankFailed",
    "Schedule",
    "Timeline",
    "Trace",
    "TraceError",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'mpkit' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
