"""mpkit: learn, try and plan parallel training in PyTorch, from a notebook.

The names below are the public ones. Each is imported when it is first used, so that `import mpkit` is cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpkit.catalogue import hardware
    from mpkit.classroom.check import check, progress
    from mpkit.cluster import Cluster
    from mpkit.comparing import compare
    from mpkit.cutting import find_cut
    from mpkit.data_batches import Batches
    from mpkit.devices import Device, Hardware, Link
    from mpkit.errors import (
        ArgumentError,
        CommMismatch,
        Deadlock,
        MpkitError,
        RankFailed,
        TraceError,
        UnwisePlan,
    )
    from mpkit.experiments.hugging_face import hf_experiment
    from mpkit.experiments.soap import soap
    from mpkit.explorer import explore
    from mpkit.fake import trace_fake
    from mpkit.launch.context import Context
    from mpkit.learning_rate import linear_scaling, sqrt_scaling
    from mpkit.loss.mean import mean_loss
    from mpkit.loss.whole_batch import whole_batch_loss
    from mpkit.memory import memory_by_strategy
    from mpkit.parallel.digest import data_digest, sample_digests
    from mpkit.parallel.optimizer import by_name, elementwise
    from mpkit.parallel.tensor import find_tensor_plan, tensor_parallel
    from mpkit.placing import placement
    from mpkit.plan import Plan
    from mpkit.reference.reading import source
    from mpkit.scale import scaling
    from mpkit.schedule import Schedule
    from mpkit.search import search_schedule
    from mpkit.simulation import simulate
    from mpkit.tensor_plan import Region, TensorPlan
    from mpkit.timeline import Timeline
    from mpkit.times import stage_times
    from mpkit.trace import Trace
    from mpkit.tracebacks import show_internals

__version__ = "0.1.0"

_HOME = {
    "ArgumentError": "mpkit.errors",
    "Batches": "mpkit.data_batches",
    "Cluster": "mpkit.cluster",
    "Context": "mpkit.launch.context",
    "CommMismatch": "mpkit.errors",
    "Deadlock": "mpkit.errors",
    "Device": "mpkit.devices",
    "Hardware": "mpkit.devices",
    "Link": "mpkit.devices",
    "MpkitError": "mpkit.errors",
    "Plan": "mpkit.plan",
    "RankFailed": "mpkit.errors",
    "Region": "mpkit.tensor_plan",
    "Schedule": "mpkit.schedule",
    "TensorPlan": "mpkit.tensor_plan",
    "Timeline": "mpkit.timeline",
    "Trace": "mpkit.trace",
    "TraceError": "mpkit.errors",
    "UnwisePlan": "mpkit.errors",
    "by_name": "mpkit.parallel.optimizer",
    "check": "mpkit.classroom.check",
    "compare": "mpkit.comparing",
    "data_digest": "mpkit.parallel.digest",
    "elementwise": "mpkit.parallel.optimizer",
    "explore": "mpkit.explorer",
    "find_cut": "mpkit.cutting",
    "find_tensor_plan": "mpkit.parallel.tensor",
    "hardware": "mpkit.catalogue",
    "hf_experiment": "mpkit.experiments.hugging_face",
    "linear_scaling": "mpkit.learning_rate",
    "mean_loss": "mpkit.loss.mean",
    "memory_by_strategy": "mpkit.memory",
    "placement": "mpkit.placing",
    "progress": "mpkit.classroom.check",
    "sample_digests": "mpkit.parallel.digest",
    "scaling": "mpkit.scale",
    "search_schedule": "mpkit.search",
    "show_internals": "mpkit.tracebacks",
    "simulate": "mpkit.simulation",
    "soap": "mpkit.experiments.soap",
    "source": "mpkit.reference.reading",
    "sqrt_scaling": "mpkit.learning_rate",
    "stage_times": "mpkit.times",
    "tensor_parallel": "mpkit.parallel.tensor",
    "trace_fake": "mpkit.fake",
    "whole_batch_loss": "mpkit.loss.whole_batch",
}

__all__ = [
    "ArgumentError",
    "Batches",
    "Cluster",
    "CommMismatch",
    "Context",
    "Deadlock",
    "Device",
    "Hardware",
    "Link",
    "MpkitError",
    "Plan",
    "RankFailed",
    "Region",
    "Schedule",
    "TensorPlan",
    "Timeline",
    "Trace",
    "TraceError",
    "UnwisePlan",
    "by_name",
    "check",
    "compare",
    "data_digest",
    "elementwise",
    "explore",
    "find_cut",
    "find_tensor_plan",
    "hardware",
    "hf_experiment",
    "linear_scaling",
    "mean_loss",
    "memory_by_strategy",
    "placement",
    "progress",
    "sample_digests",
    "scaling",
    "search_schedule",
    "show_internals",
    "simulate",
    "soap",
    "source",
    "sqrt_scaling",
    "stage_times",
    "tensor_parallel",
    "trace_fake",
    "whole_batch_loss",
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
