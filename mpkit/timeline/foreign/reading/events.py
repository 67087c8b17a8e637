"""The events of one rank as columns, by what they are; and how one finds another.

    kernel -(correlation)-> call of the runtime -(External id)-> operator -> the annotations around it

Times are nanoseconds since the file's first event; `Events.origin` puts them on the clock of the machine.

Source: Kineto's output_json.cpp; torch/csrc/profiler/kineto_client_interface.cpp for the names of categories.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt

from mpkit.timeline.foreign.reading.table import EventTable

__all__ = ["ANNOTATIONS", "CATEGORIES", "DEVICE", "IGNORED", "STEP", "EventTable", "Events"]

Array = npt.NDArray[Any]

CATEGORIES = {
    "cpu_op": "op", "operator": "op",
    "user_annotation": "annotation", "python_function": "module",
    "cuda_runtime": "call", "cuda_driver": "call", "runtime": "call", "hip_runtime": "call", "xpu_runtime": "call",
    "xpu_driver": "call", "mtia_runtime": "call", "privateuse1_runtime": "call", "privateuse1_driver": "call",
    "kernel": "kernel", "mtia_ccp_events": "kernel", "hpu_op": "kernel", "gpu_memcpy": "copy", "memcpy": "copy",
    "gpu_memset": "set", "memset": "set",
}  # fmt: skip
"""What each of Kineto's categories is, in lower case: today's, and those of torch 1.8."""

IGNORED = (
    "overhead", "cuda_sync", "cuda_event", "external_correlation", "cuda_profiler_range", "mtia_insight",
    "glow_runtime", "collective_comm", "trace", "gpu_user_annotation", "cpu_instant_event",
)  # fmt: skip
"""Kineto's categories that say nothing which the others do not, in lower case."""

ANNOTATIONS = (
    "ProfilerStep#", "Optimizer.", "enumerate(DataLoader)", "DistributedDataParallel.", "FSDP::", "PP:", "## "
)  # fmt: skip
"""How annotations begin; torch 1.8 writes them as operators."""

DEVICE = ("kernel", "copy", "set")
STEP = re.compile(r"ProfilerStep#([0-9]{1,9})$")
"""The annotation of a profiled step."""


class Events:
    """All events of one rank's file.

    Attributes:
        names: the strings that tables refer to.
        threads: each thread's (process, thread), or (device, stream).
        tables: by what it is: "op", "annotation", "module", "call", "kernel", "copy", "set", "other".
        memory: (m, 5) of int64: ns, bytes (negative: freed), device type, total allocated, total reserved.
        header: what the file says beside its events.
        origin: ns of the machine's clock at which the times begin; Kineto's clock where there is no other.
        repairs: what was fixed in the file's JSON, with how often.
        assumed: what was left out or assumed of its events, with how often.
        phases: how many events there are of each phase ("ph") that is not drawn.
        processes: the names of processes, where the file has them.
        categories: of each row of "other".
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.threads: list[tuple[str, str]] = []
        self.tables = {word: EventTable() for word in (*dict.fromkeys(CATEGORIES.values()), "other")}
        self.memory: Array = np.zeros((0, 5), np.int64)
        self.header: dict[str, Any] = {}
        self.origin = 0
        self.repairs: dict[str, int] = {}
        self.assumed: dict[str, int] = {}
        self.phases: dict[str, int] = {}
        self.processes: dict[str, str] = {}
        self.categories: list[str] = []

    def __getitem__(self, word: str) -> EventTable:
        return self.tables[word]

    @property
    def is_kineto(self) -> bool:
        """Whether torch.profiler wrote it, as far as its categories tell."""
        return any(len(self[word]) for word in self.tables if word != "other")

    @property
    def on_device(self) -> bool:
        """Whether anything ran on a GPU."""
        return any(len(self[word]) for word in DEVICE)

    def notes(self, source: str) -> list[str]:
        """Return sentences on what was fixed, left out or assumed in the file of this name."""
        kinds = {
            " was not valid JSON and was fixed": self.repairs,
            ": left out or assumed": self.assumed,
        }
        return [
            f"{source}{what}: " + ", ".join(f"{each} ({count:,})" for each, count in counted.items()) + "."
            for what, counted in kinds.items()
            if counted
        ]

    def launches(self, word: str) -> Array:
        """Return, for each event of a device's table, the row of the runtime's call that launched it; -1: unknown."""
        return _rows(self["call"].correlation, self[word].correlation)

    def operators(self, word: str) -> Array:
        """Return, for each event of a device's table, the row of the operator that launched it; -1: unknown."""
        launch, external = self.launches(word), self[word].external
        by_call = np.append(self["call"].external, -1)[launch]
        return _rows(self["op"].external, np.where(by_call >= 0, by_call, external), external)


def _rows(ids: Array, *wanted: Array) -> Array:
    """Return the rows at which the ids are found, those of the first array of wanted ids for which they are."""
    found = np.full(len(wanted[0]), -1)
    if not len(ids):
        return found
    order = np.argsort(ids, kind="stable")
    for each in wanted:
        at = np.minimum(np.searchsorted(ids[order], each), len(ids) - 1)
        rows = np.where((ids[order][at] == each) & (each >= 0), order[at], -1)
        found = np.where(found < 0, rows, found)
    return found
