"""Search for an order of F, I and W that is shorter than the named schedules, within a cap on memory.

The best named schedule that fits is the one to beat. Many policies then build orders while a simulated clock runs
(`mpkit.plan.schedule.greedy`). Nothing is run; with the times of a run (`timeline.stage_times()`), the result is for
that run's model and machine.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice, pairwise, product
from math import inf
from operator import itemgetter
from random import Random
from typing import NamedTuple

from mpkit.common.tracebacks import public
from mpkit.plan.kinds import every
from mpkit.plan.plan import Plan
from mpkit.plan.schedule import Schedule
from mpkit.plan.schedule.catalogue import SCHEDULES
from mpkit.plan.schedule.greedy import ActionCosts, Policy, greedy, span
from mpkit.plan.schedule.schedules import naive
from mpkit.plan.schedule.validate import each
from mpkit.timeline.simulation import Times, by_stage, simulate, time_of, whole_backward
from mpkit.timeline.timeline import Timeline


@dataclass(frozen=True, repr=False)
class FoundSchedule:
    """What a search found, and what it improves on."""

    plan: Plan  # with the schedule found, or with the best named schedule if nothing is shorter
    timeline: Timeline  # simulated
    seconds: float  # the length of its step, from the first action of any rank to the end of the last
    named: dict[str, float]  # the step's length under each named schedule that fits, the shortest first
    too_large: dict[str, float]  # the most that a rank would hold under each named schedule that does not fit
    max_live: list[float]  # the cap of each rank
    at_least: float  # a lower bound in seconds on any order: a rank's work after the first forward that it waits for

    @property
    def best_named(self) -> str:
        """The shortest of the named schedules that fit."""
        return next(iter(self.named), "")

    @property
    def improvement(self) -> float:
        """The share of the best named schedule's time that is saved; 0 if nothing shorter was found."""
        return 1 - self.seconds / min(self.named.values()) if self.named else 0.0

    def __str__(self) -> str:
        if self.named:
            best = f"{self.best_named}, the best that has a name, {self.named[self.best_named]:.4g} s"
            lines = [f"{self.seconds:.4g} s per step; {best}: {self.improvement:.1%} shorter."]
        else:
            lines = [f"{self.seconds:.4g} s per step; no schedule that has a name fits."]
        peaks = ", ".join(f"{peak:g}" for peak in self.plan.build().peak_live)
        cap = "" if inf in self.max_live else f" (max_live {max(self.max_live):g})"
        lines.append(f"Activations by rank: {peaks}{cap}. No order can take less than {self.at_least:.4g} s.")
        lines.append("Named: " + ", ".join(f"{name} {seconds:.4g}" for name, seconds in self.named.items()))
        if self.too_large:
            peaks = ", ".join(f"{name} {peak:g}" for name, peak in self.too_large.items())
            lines.append(f"Too large: {peaks}")
        return "\n".join(lines)

    __repr__ = __str__


@public
def search_schedule(
    plan: Plan, forward: Times = 1.0, input_grad: Times = 1.0, weight_grad: Times = 1.0, hop: float = 0.0, *,
    backward: Times | None = None, max_live: float | Sequence[float] | None = None, seed: int = 0,
    effort: int = 400_000,
) -> FoundSchedule:  # fmt: skip
    """Search for the shortest order of F, I and W; the result is never longer than a named schedule that fits.

    Args:
        plan: the plan with the ranks, micro-batches and stages per rank; its schedule is one more to beat.
        forward, input_grad, weight_grad, hop, backward: seconds, as in `simulate`; for a run's times, pass
            `**run.timeline().stage_times()`.
        max_live: the most activations that a rank may hold at once, one number or one per rank; None: no limit.
        seed: the seed of the random policies; the same seed finds the same schedule.
        effort: the number of actions simulated in all, which bounds the time taken (400,000: about 2 s).

    Returns:
        The plan found, its timeline, and the named schedules' times; printed, it says what it improves.

    Raises:
        ValueError: the plan is not a pipeline, or a rank may not even hold one micro-batch of its stages.

    Source: Athlur et al., "Varuna", EuroSys 2022: schedules simulated with measured times, within the memory there is.

    >>> search_schedule(Plan.pipeline("1f1b", 3, 5), max_live=2, effort=50_000)
    21 s per step; naive, the best that has a name, 45 s: 53.3% shorter.
    Activations by rank: 2, 2, 2 (max_live 2). No order can take less than 17 s.
    Named: naive 45
    Too large: gpipe 5, 1f1b 3, zb_h1 3, zb_h2 5
    """
    costs = _costs(plan, forward, input_grad, weight_grad, hop, max_live)
    f, caps = costs.f, list(costs.max_live)
    slots = {"F": f, "I": costs.i, "W": costs.w, "B": whole_backward(backward, costs.i, costs.w)}
    k = every(plan.recompute)
    again = [time / k for time in f] if k else []  # by stage, the seconds of a forward before its backward

    def score(name: str, schedule: Schedule) -> _ScoredSchedule:
        seconds = span(schedule, slots, costs.hop, again)
        return _ScoredSchedule(seconds, max(schedule.peak_live), name == SEARCHED, name, schedule)

    # ---- known
    known, too_large = _known_schedules(plan, caps)
    placements = _placements(plan, known, caps)
    at_least = min(_at_least(placement, plan, costs, again) for placement in placements)
    candidates = sorted((score(name, schedule) for name, schedule in known.items()), key=_order)
    named_times = {one.name: one.seconds for one in candidates}
    tries = max(1, effort // (3 * plan.stages * plan.microbatches))
    # ---- greedy
    for placement, policy in islice(_policies(placements, caps, Random(seed)), tries):
        if candidates and min(candidates, key=_order).seconds <= at_least:
            break
        made = Schedule(greedy(placement, plan.microbatches, costs, policy), SEARCHED, placement)
        candidates.append(score(SEARCHED, made))
    shortest = min(candidates, key=_order)
    best = _plan_of(shortest, plan)
    timeline = simulate(best, forward, input_grad, weight_grad, hop, backward=backward)
    return FoundSchedule(best, timeline, shortest.seconds, named_times, too_large, caps, at_least)


def _costs(
    plan: Plan, forward: Times, input_grad: Times, weight_grad: Times, hop: float,
    max_live: float | Sequence[float] | None,
) -> ActionCosts:  # fmt: skip
    given: object = plan
    if not isinstance(given, Plan) or given.dp > 1:
        raise ValueError(
            f"search_schedule({plan!r}): the order of a pipeline's actions is searched: give a Plan with stages and "
            'micro-batches, such as Plan.pipeline("1f1b", 4, 8)'
        )
    f, i, w = (
        by_stage(name, value, plan.stages)
        for name, value in (("forward", forward), ("input_grad", input_grad), ("weight_grad", weight_grad))
    )
    caps = [inf] * plan.pp if max_live is None else each("max_live", max_live, plan.pp, "rank")
    return ActionCosts(f, i, w, time_of("hop", hop), caps)


SEARCHED = "searched"  # the name of a schedule that was found
_order = itemgetter(slice(3))  # the sort key: shortest first, then by memory, then named ones


class _ScoredSchedule(NamedTuple):
    """A schedule and its scores, in the order by which schedules are compared; equal ones keep theirs."""

    seconds: float
    peak: float  # the most that any rank holds
    searched: bool  # whether it has no name
    name: str
    schedule: Schedule


def _plan_of(best: _ScoredSchedule, plan: Plan) -> Plan:
    if best.name in SCHEDULES:
        return replace(plan, schedule=best.name, virtual_stages=plan.stages // plan.pp)
    own, names = Plan.from_schedule(best.schedule), ("schedule", "microbatches", "virtual_stages")
    return replace(plan, **{name: getattr(own, name) for name in names})


def _known_schedules(plan: Plan, caps: Sequence[float]) -> tuple[dict[str, Schedule], dict[str, float]]:
    """Return the fitting schedules (the plan's and the named ones), and the peaks of those that do not fit."""
    p, m, v = plan.pp, plan.microbatches, plan.stages // plan.pp
    candidates = {} if isinstance(plan.schedule, str) else {plan.schedule.name: plan.schedule}
    if plan.stages == p * v:
        one_stage = naive(1, m)  # what `build` returns for one stage, whatever schedule is named
        candidates |= {
            name: one_stage if plan.stages == 1 and not entry.pairs else entry.build(p, m, v)
            for name, entry in SCHEDULES.items()
            if entry.can_have(v)
        }
    fits = {
        name: all(peak <= cap for peak, cap in zip(schedule.peak_live, caps, strict=True))
        for name, schedule in candidates.items()
    }
    too_large = {name: float(max(candidates[name].peak_live)) for name, fit in fits.items() if not fit}
    return {name: candidates[name] for name, fit in fits.items() if fit}, too_large


def _placements(plan: Plan, known: Mapping[str, Schedule], caps: Sequence[float]) -> list[tuple[int, ...]]:
    """Return the possible assignments of stages to ranks: those of the plan and of the fitting schedules."""
    placements = list(dict.fromkeys(each.stage_to_rank for each in (plan.build(), *known.values())))
    ranks = range(plan.pp)
    possible = [each for each in placements if all(each.count(rank) <= caps[rank] for rank in ranks)]
    if not possible:
        counts = [placements[0].count(rank) for rank in ranks]
        rank = next(rank for rank in ranks if counts[rank] > caps[rank])
        raise ValueError(
            f"max_live={max(caps):g}: rank {rank} has {counts[rank]} of the stages, and holds as many activations of "
            f"one micro-batch. It takes max_live={max(counts)} at least"
        )
    return possible


def _at_least(holders: tuple[int, ...], plan: Plan, costs: ActionCosts, again: Sequence[float]) -> float:
    """Return a lower bound on any order's length.

    A rank does all of its work after the first forward that it waits for, and a micro-batch passes all stages down and
    up again.
    """
    hops = [costs.hop * (a != b) for a, b in pairwise(holders)]
    heads = list(accumulate((f + hop for f, hop in zip(costs.f, [*hops, 0.0], strict=True)), initial=0.0))
    redone = again or [0.0] * len(holders)
    work = [plan.microbatches * sum(each) for each in zip(costs.f, costs.i, costs.w, redone, strict=True)]
    ranks = range(max(holders) + 1)
    busy = max(
        min(head for head, holder in zip(heads, holders, strict=False) if holder == rank)
        + sum(each for each, holder in zip(work, holders, strict=True) if holder == rank)
        for rank in ranks
    )
    return max(busy, heads[-1] + sum(costs.i) + sum(hops) + costs.w[0])


def _policies(
    placements: Sequence[tuple[int, ...]], caps: Sequence[float], random: Random
) -> Iterator[tuple[tuple[int, ...], Policy]]:
    """Yield all combinations of simple policies first, then endless random ones."""
    ranks = range(len(caps))
    leads = [[0.0 for _ in ranks], [float(rank) for rank in ranks], [inf for _ in ranks]]
    forwards, first, patience = ("deep", "turns", "shallow"), ("I", "turns", "F"), (0.0, 1.0, 0.5)
    for placement, patient, lead, one, order in product(placements, patience, leads, first, forwards):
        if order == "deep" or len(placement) > len(ranks):  # with one stage per rank all orders are the same
            yield placement, Policy(order, one, lead, patient, caps)
    while True:
        placement = random.choice(placements)
        lead = random.choice([*leads, [float(random.randint(0, 2 * len(ranks))) for _ in ranks]])
        least, most = len(placement) // len(ranks), 2 * len(placement)  # no schedule needs more
        limit = [min(cap, random.randint(least, most)) for cap in caps]
        policy = Policy(random.choice(forwards), random.choice(first), lead, random.choice(patience), limit)
        yield placement, policy
