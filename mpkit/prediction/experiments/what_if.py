"""What if: a run's step, predicted after changes, from the times that the run itself recorded.

    changes    what `Run.what_if` is asked, one setting after the other: the speed of the link, the number of ranks
               along the plan's axis, or any field of the plan. Changes that only work together count as one
    count      a changed plan is played on tensors without content, and so is the run's own (`mk.trace_fake`)
    factor     measured / counted of each action of the run's plan: of each of its last steps (`Factors`)
    predict    the changed plan's actions take the factors times what is counted; a plan that did not change keeps the
               run's records
    replay     each step on the changed link; the one of median length is shown

Assumed: an action's time changes with the size of its micro-batch as the roofline of one core does, beside what each
operator takes to start; both halves of a split backward take longer than the whole one (`START`, `SPLIT`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from itertools import pairwise
from math import inf, prod
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from mpkit.common.display import WidgetResult
from mpkit.devices.catalogue import hardware as find
from mpkit.devices.hardware import Hardware, Link
from mpkit.plan.kinds import keywords, real
from mpkit.plan.plan import Plan
from mpkit.plan.rules import change_plan
from mpkit.plan.schedule.catalogue import ANY, SCHEDULES
from mpkit.prediction.experiments.factors import START, Factors, last_step, play_training, with_starts
from mpkit.timeline.answer import Answer, Basis
from mpkit.timeline.comparison import ComparedStep, Comparison
from mpkit.timeline.timeline import Timeline
from mpkit.trace import TIMED_BY_EVENTS, Trace

if TYPE_CHECKING:
    from mpkit.launch.session.cluster import Cluster
    from mpkit.launch.session.run import Run
    from mpkit.strategies.job.job import TrainJob


STEPS = 9  # steps of the run at most, its last ones, each of which is replayed

BAND = 0.2
"""How far predictions were from real runs at most in `python -m benchmarks costs predicted`, on two busy cores; 8 of
its 12 changes were within 10 %."""
SHOWN = {"pp", "dp", "microbatches", "schedule", "virtual_stages", "cut", "bucket_mb", "zero", "recompute"}
"""The fields of a plan of which that benchmark changes one."""

# ---- the answer


@dataclass(frozen=True)
class WhatIf(WidgetResult, Answer):
    """What `Run.what_if` predicts: prints as a table, and shows both timelines on one axis in a notebook.

    `error` says how far off predictions were at most, as a share of the real run's step: 0 for a replay of the run's
    own records; None where no runs have shown it, as on GPUs. `played` has the bytes by rank and category of the run's
    own plan, played as the changed one is, or None if no plan was: compare `memory` with it, since a played rank's
    buffers include temporaries, which a run does not record.
    """

    rows: tuple[ComparedStep, ...]  # the run's typical step; the step after each change, named after it
    plan: Plan  # with all changes
    error: float | None
    played: list[dict[str, int]] | None

    @property
    def before(self) -> Timeline:
        """The run's typical step: the one of median length, on the virtual clock."""
        return self.rows[0].timeline

    @property
    def answer(self) -> Timeline:
        """The predicted step, each rank on a device of its own."""
        return self.rows[-1].timeline

    @property
    def band(self) -> tuple[float, float] | None:
        """The seconds between which real runs were; None where no runs have shown how far off such predictions are."""
        step = self.step_time
        return None if self.error is None else (step * (1 - self.error), step * (1 + self.error))

    @property
    def basis(self) -> Basis:
        """What was measured, and what is assumed."""
        if self.error == 0:
            return Basis("the run's own operations", "each rank on a device of its own, and the link's model")
        assumed = "how actions of another size, or a split backward, compare with the measured ones"
        return Basis("the time of each of the run's actions", assumed)

    @property
    def causes(self) -> list[tuple[str, float]]:
        """What each change adds to the step, in seconds, on top of those before it; they sum to the whole change."""
        steps = [(row.name, row.timeline.step_time) for row in self.rows]
        return [(change, after - before) for (_, before), (change, after) in pairwise(steps)]

    @property
    def comparison(self) -> Comparison:
        """The run beside the prediction, as `mk.compare` puts them: work and idle time by cause, and pictures."""
        return Comparison((self.rows[0], replace(self.rows[-1], name="what if")))

    def gap(self) -> Mapping[str, float]:
        """Return the parts of the difference in seconds, by op and by cause of idle time (`Comparison.gap`)."""
        return self.comparison.gap()


def what_if(run: Run, job: TrainJob, cluster: Cluster | None, changes: dict[str, Any]) -> WhatIf:
    """Predict a step of a finished run after some changes, in order; `Run.what_if` says more."""
    asked, steps = settings(run.plan, changes), _last_steps(run)
    on_gpus = run.trace.meta.get("device") in TIMED_BY_EVENTS

    def play(plan: Plan) -> Trace:
        """Play two steps of a plan, of which the first sets up; each plan once."""
        known, key = _PLAYED.setdefault(run, {}), plan.to_json()
        if key not in known:
            what, how = job.what, job.how
            first = getattr(what.batches, "first", None)  # of a stream, what was read before the start
            batch = first[0] if first else what.batches.part(0, slice(None))
            counted = play_training(
                what.model, batch, plan, loss=what.loss, optimizer=how.optimizer,
                max_grad_norm=how.max_grad_norm, steps=2, cluster=cluster,
            )  # fmt: skip
            known[key] = counted if on_gpus else with_starts(counted, START)
        return known[key]

    def typical(setting: ChangedPlan) -> Timeline:  # the step of median length
        if setting.plan == run.plan:
            whole = _replay(run.trace, setting)
            found = [whole.step(number) for number in steps]
        else:
            own, changed = play(run.plan), play(setting.plan)
            predicted = (Factors.from_traces(run.trace, each, own).apply_to(changed) for each in steps)
            found = [_replay(each, setting).step(last_step(changed)) for each in predicted]
        return sorted(found, key=lambda step: step.step_time)[(len(found) - 1) // 2]

    rows = tuple(ComparedStep.from_timeline(each.change or "the run", typical(each)) for each in asked)
    played = Timeline.of(play(run.plan)).memory if asked[-1].plan != run.plan else None
    names = [each.name for each in fields(Plan)]
    changed = {name for one in asked for name in names if getattr(one.plan, name) != getattr(run.plan, name)}
    shown = 0.0 if not changed else BAND if changed <= SHOWN and not on_gpus else None
    return WhatIf(rows, asked[-1].plan, shown, played)


_PLAYED: WeakKeyDictionary[Run, dict[str, Trace]] = WeakKeyDictionary()  # by run, and by the plan's JSON


def _last_steps(run: Run) -> list[int]:
    """Return the numbers of the steps to replay, or raise if the run goes on or has too few."""
    if not run.done:
        raise ValueError("this run goes on; run.wait() waits for its end, and then run.what_if(...) predicts")
    complete = Timeline.of(run.trace, clock="virtual").steps
    if len(complete) < 2:
        raise ValueError(
            f"this run has {len(complete)} complete step{'s' * (len(complete) != 1)}, and the first one sets up: "
            "train for two steps or more, cluster.train(..., steps=4)"
        )
    return complete[1:][-STEPS:]


# ---- changes

EXAMPLE = 'run.what_if(link=2, microbatches=16, schedule="zb_h1")'


@dataclass(frozen=True)
class ChangedPlan:
    """A setting in which a step is predicted."""

    change: str  # the last change that led to it, in words; "" for the run as it was
    plan: Plan
    link: float = 1.0  # how many times as fast messages and collectives are


def settings(plan: Plan, changes: Mapping[str, Any]) -> list[ChangedPlan]:
    """Return the setting of the run, and one after each change.

    >>> [each.change for each in settings(Plan.gpipe(2, 4), {"link": 2, "schedule": "zb_h1", "cut": "balanced"})]
    ['', 'link x2', 'schedule zb_h1', 'cut balanced']
    >>> settings(Plan.gpipe(2, 4), {"ranks": 4})[-1].plan
    Plan(pp=4, schedule='gpipe', microbatches=4)
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
        asked = ", ".join(f"{name}={value!r}" for name, value in waiting.items())
        raise ValueError(f"run.what_if({asked}) of {plan}: {failed}") from None
    return found


def _check_names(changes: Mapping[str, Any]) -> None:
    known = ["link", "ranks", *(field.name for field in fields(Plan))]
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


def _apply_changes(before: ChangedPlan, changes: Mapping[str, Any]) -> ChangedPlan:
    """Return the setting after some changes at once."""
    link, plan, words = before.link, before.plan, []
    of_plan: dict[str, Any] = {}
    for name, value in changes.items():
        words.append(f"{name} {getattr(value, 'name', value)}")
        if name == "link":
            if not 0 < (real(value) or 0) < inf:
                raise ValueError(
                    f"link={value!r}: give how many times as fast messages are: link=2, or link=0.5 for half the speed"
                )
            link, words[-1] = link * value, f"link x{value:g}"
        elif name == "ranks":
            of_plan |= _degree_of(plan, value)
        else:
            of_plan[name] = None if (name, value) == ("cut", "balanced") else value
    if "schedule" in of_plan:  # with the stages per rank that it can have, if no change says how many
        known = SCHEDULES.get(of_plan["schedule"]) if isinstance(of_plan["schedule"], str) else None
        several = known is not None and known.per_rank == ANY
        of_plan.setdefault("virtual_stages", max(2, plan.virtual_stages) if several else 1)
    return ChangedPlan(", ".join(words), change_plan(plan, **of_plan), link)


def _degree_of(plan: Plan, ranks: Any) -> dict[str, int]:
    """Return the degree that makes the plan take so many ranks: of the only axis with several, or else of dp."""
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


# ---- another machine, whose ranks compute the same


def _replay(trace: Trace, setting: ChangedPlan) -> Timeline:
    if setting.link == 1:
        return Timeline.of(trace, clock="virtual")
    name = str(trace.meta.get("hardware"))
    machine = find(name if name in find() else "cpu")
    return Timeline.of(trace, faster(machine, setting.link), clock="virtual")


def faster(machine: Hardware, factor: float) -> Hardware:
    """Return a machine on whose links every message and collective takes 1/factor of the time."""

    def speed_up(link: Link) -> Link:
        return replace(
            link, latency=link.latency / factor, bandwidth=link.bandwidth * factor, ramp=link.ramp / factor,
            bus={kind: rate * factor for kind, rate in link.bus.items()},
        )  # fmt: skip

    between = None if machine.between is None else speed_up(machine.between)
    name = f"{machine.name}, link x{factor:g}"
    return replace(machine, name=name, link=speed_up(machine.link), between=between)
