"""What if: a run's step, predicted after changes, from the times that the run itself recorded.

    check      the changes, one setting after the other (`mpkit.prediction.what_if`)
    count      a changed plan is played on tensors without content, and so is the run's own (`mk.trace_fake`)
    factor     measured / counted of each action of the run's plan: of each of its last steps (`Factors`)
    predict    the changed plan's actions take the factors times what is counted; a plan that did not change keeps the
               run's records
    replay     each step on the changed link, with or without overlap; the one of median length is shown

The played plan says how many operators, bytes and messages there are and in which order, the run how fast they are.
Assumed: an action's time changes with the size of its micro-batch as the roofline of one core does, beside what each
operator takes to start (`START`); both halves of a split backward take `mpkit.prediction.experiments.factors.SPLIT`
times as long as the whole one. Both are fitted on CPU ranks, and used for those only.

Changes of a run: what `Run.what_if` is asked, as one setting after the other.

    link, overlap           the machine: the plan and its compute stay as they are
    ranks                   the plan's axis that has several ranks
    any other field         the plan

Each change applies on top of those before it, so that its effect is known. Changes that only work together, such as a
schedule and its virtual_stages, count as one.

A trace as it would be on another machine, whose ranks compute the same.

    faster            links on which messages and collectives take less time
    without_overlap   each rank waits for a collective, and for a message that it sends, as soon as it has issued it

A receive is waited for where it was: a rank that waited for a message before it sends its own could wait forever.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from math import isfinite, prod
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from mpkit.devices.catalogue import hardware as find
from mpkit.devices.hardware import Hardware, Link
from mpkit.plan.plan import Plan
from mpkit.plan.rules import change_plan
from mpkit.plan.schedule.catalogue import ANY, SCHEDULES
from mpkit.plan.synonyms import keywords
from mpkit.prediction.experiments.factors import Factors, PlayedTraining, last_step, with_starts
from mpkit.prediction.what_if_result import PredictedStep, WhatIf
from mpkit.timeline.timeline import Timeline
from mpkit.trace import TIMED_BY_EVENTS, Kind, RankTrace, Trace

if TYPE_CHECKING:
    from mpkit.launch.session.cluster import Cluster
    from mpkit.launch.session.run import Run
    from mpkit.strategies.job.job import TrainJob

__all__ = ["ChangedPlan", "faster", "settings", "what_if", "without_overlap"]

OF_MACHINE = "link", "overlap"
EXAMPLE = 'run.what_if(link=2, microbatches=16, schedule="zb_h1")'


@dataclass(frozen=True)
class ChangedPlan:
    """What a step is predicted for.

    Attributes:
        change: the last change that led to it, in words; "" for the run as it was.
        plan: the plan.
        link: how many times as fast messages and collectives are.
        overlap: whether communication goes on while its rank computes.
    """

    change: str
    plan: Plan
    link: float = 1.0
    overlap: bool = True


def settings(plan: Plan, changes: Mapping[str, Any]) -> list[ChangedPlan]:
    """Return the setting of the run, and one after each change.

    >>> [each.change for each in settings(Plan.gpipe(2, 4), {"link": 2, "schedule": "zb_h1", "cut": "balanced"})]
    ['', 'link x2', 'schedule zb_h1', 'cut balanced']
    >>> settings(Plan.gpipe(2, 4), {"ranks": 4})[-1].plan
    Plan(pp=4, schedule='gpipe', microbatches=4)

    Raises:
        ValueError: there are no changes, no such one, or the plan would not work.
    """
    _check_names(changes)
    found, waiting, failed = [ChangedPlan("", plan)], {}, None
    for name, value in changes.items():
        waiting[name] = value
        try:
            found.append(_apply_changes(found[-1], waiting))
        except ValueError as error:  # it may need the change after it
            failed = error
        else:
            waiting, failed = {}, None
    if failed is not None:
        raise ValueError(f"run.what_if({_call(waiting)}) of {plan}: {failed}") from None
    return found


def _apply_changes(before: ChangedPlan, changes: Mapping[str, Any]) -> ChangedPlan:
    """Return the setting after some changes at once."""
    link, overlap = before.link, before.overlap
    if "link" in changes:
        link *= _factor(changes["link"])
    if "overlap" in changes:
        overlap = _flag(changes["overlap"])
    fields_changed = {name: value for name, value in changes.items() if name not in (*OF_MACHINE, "ranks")}
    if fields_changed.get("cut") == "balanced":
        fields_changed["cut"] = None
    if "ranks" in changes:
        fields_changed |= _ranks(before.plan, changes["ranks"])
    words = ", ".join(_words(name, value) for name, value in changes.items())
    plan = change_plan(before.plan, **_without_old_stages(before.plan, fields_changed))
    return ChangedPlan(words, plan, link, overlap)


def _without_old_stages(plan: Plan, changed: dict[str, Any]) -> dict[str, Any]:
    """Give a schedule the stages per rank that it can have, where the change says nothing about them."""
    if "schedule" not in changed or "virtual_stages" in changed:
        return changed
    known = SCHEDULES.get(changed["schedule"]) if isinstance(changed["schedule"], str) else None
    if known is not None and known.per_rank == ANY:
        return {"virtual_stages": max(2, plan.virtual_stages)} | changed
    return {"virtual_stages": 1} | changed


def _ranks(plan: Plan, ranks: Any) -> dict[str, int]:
    """Return the degree that makes the plan take so many ranks: of the axis that has several, dp if more have."""
    degrees = {axis: getattr(plan, axis) for axis in ("pp", "dp", "tp", "cp")}
    several = [axis for axis, degree in degrees.items() if degree > 1]
    axis = several[0] if len(several) == 1 else "dp"
    others = prod(degree for name, degree in degrees.items() if name != axis)
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1 or ranks % others:
        raise ValueError(
            f"ranks={ranks!r}: {axis} is what changes, and the other axes take {others} rank{'s' * (others > 1)}: "
            f"ranks={2 * plan.ranks}, or name the axes: {', '.join(f'{name}={degrees[name]}' for name in degrees)}"
        )
    return {axis: ranks // others}


def _check_names(changes: Mapping[str, Any]) -> None:
    known = [*OF_MACHINE, "ranks", *(field.name for field in fields(Plan))]
    if not changes:
        raise ValueError(f"run.what_if() changes nothing; give what is to be different, as in {EXAMPLE}")
    for name in changes:
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}={changes[name]!r}?" if near else keywords().get(name, "")
            raise ValueError(
                f"run.what_if({name}=...): there is no such change{'; ' + hint if hint else '.'} There are "
                f"{', '.join(known)}, as in {EXAMPLE}"
            )


def _factor(value: Any) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not isfinite(value) or value <= 0:
        raise ValueError(
            f"link={value!r}: give how many times as fast messages are: link=2, or link=0.5 for half the speed"
        )
    return float(value)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(
            f"overlap={value!r}: overlap=False lets each rank wait for every communication at once"
        )
    return value


def _words(name: str, value: Any) -> str:
    if name == "link":
        return f"link x{value:g}"
    if name == "overlap":
        return "overlap" if value else "no overlap"
    return f"{name} {getattr(value, 'name', value)}"


def _call(changes: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in changes.items())


def faster(machine: Hardware, factor: float) -> Hardware:
    """Return a machine on whose links every message and collective takes 1/factor of the time.

    >>> from mpkit.devices.catalogue import hardware
    >>> before, after = hardware("cpu"), faster(hardware("cpu"), 2)
    >>> before.time(Kind.ALL_REDUCE, 1e6, [0, 1]) / after.time(Kind.ALL_REDUCE, 1e6, [0, 1])
    2.0
    """
    if factor == 1:
        return machine

    def speed_up(link: Link) -> Link:
        return replace(
            link, latency=link.latency / factor, bandwidth=link.bandwidth * factor, ramp=link.ramp / factor,
            bus={kind: rate * factor for kind, rate in link.bus.items()},
        )  # fmt: skip

    between = None if machine.between is None else speed_up(machine.between)
    return replace(
        machine, name=f"{machine.name}, link x{factor:g}", link=speed_up(machine.link), between=between
    )


def without_overlap(trace: Trace) -> Trace:
    """Return the trace with a wait after each collective and each send."""
    return replace(trace, ranks=[_add_waits(rank) for rank in trace.ranks])


def _add_waits(rank: RankTrace) -> RankTrace:
    ops, kinds = rank.ops, rank.ops["kind"]
    issued = np.flatnonzero((kinds >= Kind.SEND) & (kinds < Kind.COPY_TO_DEVICE) & (kinds != Kind.RECV))
    waits = ops[issued].copy()
    for name in ("flops", "bytes", "cpu", "group", "name", "lane"):
        waits[name] = 0
    waits["kind"], waits["number"], waits["peer"] = Kind.WAIT, -1, -1
    waits["end"] = waits["start"]
    waits["depth"] = _lies_in_action(ops)[issued]
    # Where each op and each wait is afterwards: behind all waits that were added before it.
    moved = np.arange(len(ops)) + np.searchsorted(issued, np.arange(len(ops)))
    waits["ref"] = moved[issued]
    longer = np.insert(ops, issued + 1, waits)
    refers = ops["ref"] >= 0
    longer["ref"][moved[refers]] = moved[ops["ref"][refers]]
    memory = rank.memory.copy()
    memory["op"] += np.searchsorted(issued, memory["op"]).astype(memory["op"].dtype)
    parts = rank.sent_parts.copy()
    parts["op"] = moved[parts["op"]]
    return replace(rank, ops=longer, memory=memory, sent_parts=parts)


def _lies_in_action(ops: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return 1 for each communication that was issued within an action, else 0."""
    outer = (ops["kind"] < Kind.SEND) & (ops["depth"] == 0)
    last = np.maximum.accumulate(np.where(outer, np.arange(len(ops)), -1))
    within = (last >= 0) & (ops["kind"][last] < Kind.WAIT) & (ops["start"] < ops["end"][last])
    return within.astype(ops["depth"].dtype)


STEPS = 9
"""Steps of the run at most, its last ones, each of which is replayed."""

START = 30e-6
"""Seconds of a core that an operator takes beside its roofline: fitted to forwards and backwards of GPT blocks of width
192 with 1 to 16 sequences of 64 tokens, on the kit's test machine."""

BAND = 0.2
"""How far predictions were from real runs at most in `python -m benchmarks costs predicted`, on two busy cores; 8 of
its 12 changes were within 10 %."""

SHOWN = ("pp", "dp", "microbatches", "schedule", "virtual_stages", "cut", "bucket_mb", "zero", "recompute")
"""The fields of a plan of which that benchmark changes one."""


def what_if(run: Run, job: TrainJob, cluster: Cluster | None, changes: dict[str, Any]) -> WhatIf:
    """Predict a step of a run after some changes; `Run.what_if` says more.

    Args:
        run: a run that is over.
        job: its training.
        cluster: whose helper process to use; None: start one.
        changes: what is different, in order.
    """
    # ---- check
    asked = settings(run.plan, changes)
    recorded = _RunRecord(run, job, cluster)
    # ---- count, factor, predict, replay
    rows = tuple(PredictedStep(each.change, each.plan, recorded.typical(each)) for each in asked)
    # ---- memory
    is_played = asked[-1].plan != run.plan
    played = Timeline.of(recorded.play_plan(run.plan)).memory if is_played else None
    return WhatIf(rows, recorded.error(asked), played)


class _RunRecord:
    """What a run recorded, and the plans that were played for it."""

    def __init__(self, run: Run, job: TrainJob, cluster: Cluster | None) -> None:
        if not run.done:
            raise ValueError(
                "this run goes on; run.wait() waits for its end, and then run.what_if(...) predicts"
            )
        self.trace, self.plan, self._cluster = run.trace, run.plan, cluster
        complete = Timeline.of(self.trace, clock="virtual").steps
        self.steps = complete[1:][-STEPS:]
        if not self.steps:
            raise ValueError(
                f"this run has {len(complete)} complete step{'s' * (len(complete) != 1)}, and the first one sets up: "
                "train for two steps or more, cluster.train(..., steps=4)"
            )
        self._on_gpus = self.trace.meta.get("device") in TIMED_BY_EVENTS
        self._known = _PLAYED.setdefault(run, {})
        self._training: PlayedTraining | None = None
        self._job = job

    def typical(self, setting: ChangedPlan) -> Timeline:
        """Return the step of median length in a setting."""
        if setting.plan == self.plan:
            whole = self._replay_trace(self.trace, setting)
            found = [whole.step(number) for number in self.steps]
        else:
            own, changed = self.play_plan(self.plan), self.play_plan(setting.plan)
            last = last_step(changed)
            found = [
                self._replay_trace(
                    Factors.from_traces(self.trace, number, own).apply_to(changed), setting
                ).step(last)
                for number in self.steps
            ]
        return sorted(found, key=lambda step: step.step_time)[(len(found) - 1) // 2]

    def error(self, asked: list[ChangedPlan]) -> float | None:
        """Return how far off such predictions were; 0 for a replay, None if no runs have shown it."""
        if all(each.plan == self.plan for each in asked):
            return 0.0
        changed = {
            each.name
            for each in fields(Plan)
            for setting in asked
            if getattr(setting.plan, each.name) != getattr(self.plan, each.name)
        }
        return None if self._on_gpus or not changed <= set(SHOWN) else BAND

    def play_plan(self, plan: Plan) -> Trace:
        """Play two steps of a plan, of which the first sets up; each plan once."""
        key = plan.to_json()
        if key not in self._known:
            if self._training is None:
                what, how = self._job.what, self._job.how
                self._training = PlayedTraining(
                    what.model, _first_batch(what.batches), loss=what.loss, optimizer=how.optimizer,
                    max_grad_norm=how.max_grad_norm,
                )  # fmt: skip
            counted = self._training.trace(plan, steps=2, cluster=self._cluster)
            self._known[key] = counted if self._on_gpus else with_starts(counted, START)
        return self._known[key]

    def _replay_trace(self, trace: Trace, setting: ChangedPlan) -> Timeline:
        if not setting.overlap:
            trace = without_overlap(trace)
        if setting.link == 1:
            return Timeline.of(trace, clock="virtual")
        name = str(trace.meta.get("hardware"))
        machine = find(name if name in find() else "cpu")
        return Timeline.of(trace, faster(machine, setting.link), clock="virtual")


_PLAYED: WeakKeyDictionary[Run, dict[str, Trace]] = WeakKeyDictionary()
"""The plans that were played for a run, by their JSON."""


def _first_batch(batches: Any) -> tuple[Any, Any]:
    """Return the first batch of a training's data."""
    if first := getattr(batches, "first", None):  # of a stream, what was read before the start
        batch: tuple[Any, Any] = first[0]
    else:
        batch = batches.part(0, slice(None))
    return batch
