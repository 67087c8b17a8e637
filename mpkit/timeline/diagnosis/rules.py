"""All rules in order, and the diagnosis that they make.

Special rules come before general ones, which leave out what has been explained: what goes over a slow link is exposed
communication as well, and a slow rank alone in its stage makes that the longest.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mpkit.common.units import memory_text, percent, seconds
from mpkit.devices.catalogue import hardware as catalogue
from mpkit.devices.hardware import Hardware
from mpkit.timeline.diagnosis.evidence import Evidence, Rule
from mpkit.timeline.diagnosis.uneven import bubble, imbalance, stragglers
from mpkit.timeline.diagnosis.without import (
    copies,
    exposed_communication,
    host_bound,
    slow_links,
    slow_loading,
    synchronizing_calls,
)
from mpkit.timeline.findings import Diagnosis, Finding
from mpkit.timeline.timeline import Timeline
from mpkit.trace import CATEGORIES

FULL = 0.9
"""The share of a device's memory from which on an allocator has to search, and a longer batch ends the run: what CUDA's
context, the libraries' workspaces and fragments take is not counted here, and comes to some percent."""

MEDIAN_OF = 9
"""The last steps at most, of whose times the median is named where the diagnosed step's is another."""

UNUSUAL = 1.1
"""How many times as long as the median step the diagnosed one must take, or the other way round, to say so."""


def diagnose(timeline: Timeline, step: int | None, hardware: Hardware | str | None) -> Diagnosis:
    """Return why a step takes as long as it does; `Timeline.diagnose` says more."""
    number, why = (step, "as asked") if step is not None else _last(timeline)
    given = catalogue(hardware) if hardware is not None else None
    evidence = Evidence(timeline, timeline.critical_path(number), given)
    found: list[Finding] = []
    for rule, idle in RULES.values():
        found += [replace(each, idle=idle) for each in rule(evidence, tuple(found))]
    found.sort(key=lambda each: (not each.urgent, -each.gain))
    return Diagnosis(evidence.path, tuple(found), why)


def _last(timeline: Timeline) -> tuple[int | None, str]:
    """Return the last complete step, as in the timeline's own figures, and what to know about this choice."""
    if not timeline.steps:
        return None, "the whole timeline: it has no complete step"
    last = timeline.steps[-1]
    times = [timeline.step(number).step_time for number in timeline.steps[1:][-MEDIAN_OF:] or [last]]
    median = sorted(times)[(len(times) - 1) // 2]
    if not median or 1 / UNUSUAL < times[-1] / median < UNUSUAL:
        return last, "the last complete step"
    return last, f"the last complete step; the median of {len(times)} takes {seconds(median)}"


def memory_near_limit(evidence: Evidence, before: Sequence[Finding]) -> list[Finding]:
    """Return a finding for the rank with the least memory left, if that is little."""
    machine, peaks = evidence.machine, evidence.whole.peak_memory_of_run
    if machine is None:
        return []
    memory = machine.device.memory
    shares = [peak["total"] / memory if memory else 0.0 for peak in peaks]
    rank = int(np.argmax(shares))
    if shares[rank] < FULL:
        return []
    largest = max(CATEGORIES, key=lambda name: peaks[rank][name])
    return evidence.findings(
        "memory near the limit", largest, gain=0.0, by="", ranks=(rank,), urgent=True, category=largest,
        held=memory_text(peaks[rank]["total"]), memory=memory_text(memory),
        full=percent(shares[rank]), most=memory_text(peaks[rank][largest]),
    )  # fmt: skip


RULES: dict[str, tuple[Rule, str]] = {
    "memory near the limit": (memory_near_limit, ""),
    "straggler": (stragglers, "imbalance"),
    "data loading": (slow_loading, "data"),
    "synchronizing call": (synchronizing_calls, "other"),
    "host-bound": (host_bound, "other"),
    "copies": (copies, "other"),
    "slow link": (slow_links, "communication"),
    "unbalanced stages": (imbalance, "imbalance"),
    "schedule's bubble": (bubble, "dependency"),
    "exposed communication": (exposed_communication, "communication"),
}
"""By the kind of finding, in order: the rule, and the cause of idle time that such a finding adds to; "" for work that
takes too long. A schedule's bubble is warm-up and cool-down as well as waiting for results."""
