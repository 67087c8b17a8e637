"""Stages: of unlike size; and a bubble that is the schedule's own, which more micro-batches would shrink.

imbalance   the step played again with each stage's actions as long as the mean of all stages; where FLOPs are known,
            with equal FLOPs at each rank's own pace, so that a slow rank is no large stage
bubble      the schedule played with equal stages, with as many micro-batches and with more
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mpkit.common.units import percent
from mpkit.plan.plan import Plan
from mpkit.plan.schedule.catalogue import NAIVE, ONE_F_ONE_B, bubble_in_theory
from mpkit.timeline.diagnosis.evidence import Evidence
from mpkit.timeline.figures import stage_times
from mpkit.timeline.findings import Finding
from mpkit.timeline.simulation import simulate
from mpkit.trace import Kind

UNEVEN = 1.1
"""How many times the mean the largest stage must be; embeddings and heads alone make a few percent."""

STAGED = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD, Kind.RECOMPUTE)

FILLED = 4
"""Micro-batches per stage that are tried: with 4 p of them, 1F1B's bubble (p-1)/(m+p-1) is below 20 %."""


def imbalance(evidence: Evidence, before: Sequence[Finding]) -> list[Finding]:
    """Return a finding if some rank's stages take longer than the others'."""
    work = evidence.work
    staged = np.isin(work.kind, STAGED) & (work.stage >= 0)
    if len(np.unique(work.stage[staged])) < 2:
        return []
    by_flops = bool((work.flops[staged] > 0).all())
    size = work.flops if by_flops else work.took
    factor = np.ones(len(work.row))
    for kind in np.unique(work.kind[staged]).tolist():
        of_kind = staged & (work.kind == kind)
        stages = np.unique(work.stage[of_kind]).tolist()
        means = {stage: float(size[of_kind & (work.stage == stage)].mean()) for stage in stages}
        for stage, mean in means.items():
            factor[of_kind & (work.stage == stage)] = np.mean(list(means.values())) / mean if mean else 1.0
    total = np.bincount(work.rank[staged], size[staged], minlength=evidence.graph.world_size)
    there = np.unique(work.rank[staged])
    largest = int(there[np.argmax(total[there])])
    over = float(total[largest] / total[there].mean())
    rows = work.row[staged]
    if over < UNEVEN:
        return []
    stages = sorted(set(work.stage[staged & (work.rank == largest)].tolist()))
    named = f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"
    unit = "FLOPs" if by_flops else "time"
    seconds_of = np.bincount(work.rank[staged], work.took[staged], minlength=evidence.graph.world_size)
    works = float(seconds_of[largest])
    others = float(np.delete(seconds_of[there], np.argmax(total[there])).mean())
    return evidence.findings(
        "unbalanced stages", gain=evidence.gain_scaled(rows, factor[staged]), rows=rows, ranks=(largest,),
        stages=named, over=f"{over:.2f}", unit=unit,
        works=evidence.share(works), others=evidence.share(others),
    )  # fmt: skip


def bubble(evidence: Evidence, before: Sequence[Finding]) -> list[Finding]:
    """Return a finding if the schedule itself leaves ranks idle, and more micro-batches would not."""
    plan = evidence.plan
    if plan is None or plan.pp < 2 or not isinstance(plan.schedule, str):
        return []
    p, m, v = plan.pp, plan.microbatches, plan.virtual_stages
    try:
        theory = bubble_in_theory(plan.schedule, p, m, v, recompute=plan.recompute == "full")
        times = stage_times(evidence.one)
    except KeyError:  # a schedule of somebody's own: no paper says what it would have with more micro-batches
        return []
    except ValueError:  # not every stage was seen
        return []
    batch = int(evidence.whole.meta.get("batch_size") or 0)
    # A multiple of the present micro-batches, as many as the batch has samples for at most.
    samples = batch // (plan.dp * m) if batch else FILLED * p
    more = m * max(1, min(-(-FILLED * p // m), samples))
    if more <= m:
        return []
    mean: dict[str, Any] = {name: float(np.mean(value)) for name, value in times.items()}
    hop = mean.pop("hop")
    shape = Plan(pp=p, schedule=plan.schedule, microbatches=m, virtual_stages=v, recompute=plan.recompute)
    even = simulate(shape, **mean, hop=hop)
    now = even.step_time
    parts: dict[str, Any] = {name: value * m / more for name, value in mean.items()}
    # One after the other, more would be no better.
    schedule = ONE_F_ONE_B if plan.schedule == NAIVE else plan.schedule
    then = simulate(replace(shape, schedule=schedule, microbatches=more), **parts, hop=hop).step_time
    expects = (
        f"{percent(float(theory))} by the theory of {plan.schedule}" if theory is not None else plan.schedule
    )
    return evidence.findings(
        "schedule's bubble", gain=now - then, by="simulation", ranks=range(evidence.graph.world_size),
        idle_share=percent(even.bubble), expects=expects, p=p, m=m, es="es" * (m > 1), more=more,
        of=f" of {schedule}" * (schedule != plan.schedule), smaller=f"{more / m:g}",
    )  # fmt: skip
