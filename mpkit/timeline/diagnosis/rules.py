"""All rules in order, and the diagnosis that they make.

Special rules come before general ones, which leave out what has been explained: a late bucket is exposed communication
as well, and a slow rank alone in its stage makes that the longest.
"""

from __future__ import annotations

from dataclasses import replace

from mpkit.devices.catalogue import hardware as catalogue
from mpkit.devices.hardware import Hardware
from mpkit.timeline.diagnosis.buckets import late_buckets
from mpkit.timeline.diagnosis.evidence import Evidence, Rule
from mpkit.timeline.diagnosis.exposed_communication import exposed_communication
from mpkit.timeline.diagnosis.host import copies, host_bound, slow_loading, synchronizing_calls
from mpkit.timeline.diagnosis.links import slow_links, small_messages
from mpkit.timeline.diagnosis.memory import memory_near_limit, useless_recomputation
from mpkit.timeline.diagnosis.stages import bubble, imbalance
from mpkit.timeline.diagnosis.stragglers import stragglers
from mpkit.timeline.findings import Diagnosis, Finding
from mpkit.timeline.timeline import Timeline

__all__ = ["RULES", "diagnose"]

RULES: dict[str, tuple[Rule, str]] = {
    "memory near the limit": (memory_near_limit, ""),
    "straggler": (stragglers, "imbalance"),
    "data loading": (slow_loading, "data"),
    "synchronizing call": (synchronizing_calls, "other"),
    "host-bound": (host_bound, "other"),
    "copies": (copies, "other"),
    "slow link": (slow_links, "communication"),
    "late bucket": (late_buckets, "communication"),
    "small messages": (small_messages, "communication"),
    "useless recomputation": (useless_recomputation, ""),
    "unbalanced stages": (imbalance, "imbalance"),
    "schedule's bubble": (bubble, "message"),
    "exposed communication": (exposed_communication, "communication"),
}
"""By the kind of finding, in order: the rule, and the cause of idle time that such a finding adds to; "" for work that
takes too long. A schedule's bubble is warm-up and cool-down as well as waiting for messages."""

STEPS = 9
"""The last steps of a run, at most, of which the one of median length is diagnosed."""


def diagnose(timeline: Timeline, step: int | None, hardware: Hardware | str | None) -> Diagnosis:
    """Return why a step takes as long as it does; `Timeline.diagnose` says more."""
    number, why = (step, "as asked") if step is not None else _median(timeline)
    given = catalogue(hardware) if hardware is not None else None
    evidence = Evidence(timeline, timeline.critical_path(number), given)
    found: list[Finding] = []
    if timeline.meta.get("imported", {}).get("processes"):
        why += "; its spans are of another tool, and what they do is not known"
    else:
        for rule, idle in RULES.values():
            found += [replace(each, idle=idle) for each in rule(evidence, tuple(found))]
    found.sort(key=lambda each: (not each.urgent, -each.gain))
    return Diagnosis(evidence.path, tuple(found), why)


def _median(timeline: Timeline) -> tuple[int | None, str]:
    """Return the step of median length among the last ones; the first is left out, since it sets up."""
    steps = timeline.steps
    later = steps[1:][-STEPS:] if len(steps) > 1 else steps
    if not later:
        return None, "the whole timeline: it has no complete step"
    if len(later) == 1:
        return later[0], "the last complete step"
    ordered = sorted(later, key=lambda number: timeline.step(number).step_time)
    return ordered[(len(ordered) - 1) // 2], f"of median length among the last {len(later)}"
