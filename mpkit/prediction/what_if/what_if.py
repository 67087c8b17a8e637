"""What if: a run's step, predicted after changes, from the times that the run itself recorded.

    check      the changes, one setting after the other (`mpkit.prediction.what_if.plan_changes`)
    count      a changed plan is played on tensors without content, and so is the run's own (`mk.trace_fake`)
    factor     measured / counted of each action of the run's plan: of each of its last steps (`Factors`)
    predict    the changed plan's actions take the factors times what is counted; a plan that did not change keeps the
               run's records
    replay     each step on the changed link, with or without overlap; the one of median length is shown

The played plan says how many operators, bytes and messages there are and in which order, the run how fast they are.
Assumed: an action's time changes with the size of its micro-batch as the roofline of one core does, beside what each
operator takes to start (`START`); both halves of a split backward take `mpkit.prediction.experiments.factors.SPLIT`
times as long as the whole one. Both are fitted on CPU ranks, and used for those only.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from mpkit.devices.catalogue import hardware as find
from mpkit.launch.session.what_if_result import PredictedStep, WhatIf
from mpkit.plan.plan import Plan
from mpkit.prediction.experiments.factors import Factors, last_step, with_starts
from mpkit.prediction.experiments.played_training import PlayedTraining
from mpkit.prediction.what_if.changed_trace import faster, without_overlap
from mpkit.prediction.what_if.plan_changes import ChangedPlan, settings
from mpkit.timeline.timeline import Timeline
from mpkit.trace import TIMED_BY_EVENTS, Trace

if TYPE_CHECKING:
    from mpkit.launch.session.cluster import Cluster
    from mpkit.launch.session.run import Run
    from mpkit.strategies.job.job import TrainJob

__all__ = ["what_if"]

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
