"""Which fields of a Plan do not go together (rules.toml); `mpkit.plan.kinds` has what each takes by itself.

A rejection is a sentence in parts: text, and changes of the plan as dicts. In place of each change the message shows
the plan that it makes. If another rule rejects that plan, the message makes that rule's first change too, and so on:
each plan that it shows works.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from functools import lru_cache
from itertools import pairwise
from types import CodeType
from typing import Any, TypeVar

from mpkit.plan import kinds
from mpkit.plan.kinds import KINDS, MOST, Change, Parts, every, parts_of, whole
from mpkit.plan.mesh import AXES
from mpkit.plan.schedule import Schedule, validate
from mpkit.plan.schedule.catalogue import ANY, GPIPE, SCHEDULES
from mpkit.plan.schedule.core import as_list

P = TypeVar("P")

CHAIN = 64  # the most changes in a row that a message tries until a plan works


def check_plan(plan: Any) -> None:
    """Check a Plan's fields, make their numbers Python's own (from numpy's, say), and fill in what follows."""
    if parts := _rejection(plan):
        raise ValueError(
            "".join(part if isinstance(part, str) else _working_call(plan, part) for part in parts)
        )


def _rejection(plan: Any) -> Parts | None:
    """Return why a plan cannot work and what to change, by the first kind or rule that it breaks; None if it can."""
    values = vars(plan)
    for name, kind in KINDS.items():
        read = kind.read(values[name])
        if read is None and not (values[name] is None and kind.optional):
            return kinds.rejection_of(name, values[name])
        values[name] = read
    dp, shard = plan.dp, plan.dp_shard
    if shard and dp % shard == 0 and (dp == shard or (shard == 1 and not plan.zero)):
        values["dp_shard"] = None  # one group, or nothing to shard: no hybrid sharding
    if parts := _complete_schedule(plan):
        return parts
    if plan.ep == 1 or plan.tp == 1:  # nothing to fold, and tp divides what it knows
        values["etp"] = None if whole(plan.etp) in (1, plan.tp) else plan.etp
    _complete_cut(plan)
    own = plan.schedule if isinstance(plan.schedule, Schedule) else None
    per_rank = own is None and SCHEDULES[plan.schedule].per_rank
    replicas = (plan.dp_shard or plan.dp) * plan.cp * (plan.tp if plan.etp == 1 else 1)
    known: dict[str, Any] = {"p": plan, "own": own, "per_rank": per_rank, "replicas": replicas}
    known |= {"MOST": MOST, "whole": whole, "rises": _rises, "Sequence": Sequence}
    for when, says in _rules():
        if eval(when, known):
            return parts_of(says, known | _names(plan))
    return None


@lru_cache(1)
def _rules() -> list[tuple[CodeType, str]]:
    return [(compile(when, "<rules.toml>", "eval"), says) for when, says in kinds.tables()["rules"]]


def _names(plan: Any) -> dict[str, Any]:
    """Return what sentences of rules.toml name, and the rules themselves do not."""
    by_stages = {
        n: [repr(name) for name, entry in SCHEDULES.items() if entry.per_rank == n] for n in (ANY, 2)
    }
    several, two = map(", ".join, by_stages.values())
    among = ("dp_shard x cp" if plan.dp_shard else "dp x cp") + " x tp" * (plan.etp == 1)
    v = f", virtual_stages={plan.virtual_stages}" if plan.virtual_stages > 1 else ""
    cut = list(plan.cut) if isinstance(plan.cut, Sequence) else plan.cut
    return {"call": call_of(plan), "several": several, "two": two, "among": among, "v": v, "cut": cut}


def _working_call(plan: Any, change: Change) -> str:
    """Return the call that makes a plan after a change, and after those that it makes necessary."""
    values = vars(plan)
    for _ in range(CHAIN):
        tried = object.__new__(type(plan))
        vars(tried).update(values | change)
        values = vars(tried)
        try:
            parts = _rejection(tried)
        except ValueError:  # a schedule of one's own that cannot run
            parts = ()
        if parts is None:
            return call_of(tried)
        change = next((part for part in parts if isinstance(part, dict)), {"schedule": GPIPE})
    raise AssertionError(f"no rule's change leads from {plan} to a plan that works")


# ------------------------------------------------------------ fields that follow from others


def _complete_schedule(plan: Any) -> Parts | None:
    """Make a Schedule of rows or a function; set the stages per rank if a named schedule has only one choice."""
    given: Any = plan.schedule
    if isinstance(given, str) and given in SCHEDULES:
        if SCHEDULES[given].per_rank == 2 and plan.virtual_stages == 1:  # the field's default
            vars(plan)["virtual_stages"] = 2
        return None
    if not isinstance(given, str | Schedule) and not callable(given):
        given = as_list(given)
    if given is None or (isinstance(given, str) and len(given.split()) < 2):
        names = list(SCHEDULES)
        word = str(plan.schedule).lower().replace("-", "_").replace(" ", "_")
        near = kinds.schedules().get(word) or (get_close_matches(word, names, 1, 0.4) or [GPIPE])[0]
        several = 1 if SCHEDULES[near].can_have(1) else max(plan.virtual_stages, 2)
        return (
            f"Plan(schedule={plan.schedule!r}): there is no such schedule. There are {', '.join(map(repr, names))}, "
            "and one of your own works too: its rows, or a function of (p, m). The nearest is ",
            {"schedule": near, "virtual_stages": several},
        )  # fmt: skip
    own = own_schedule(given, plan.pp, plan.microbatches)
    if (plan.pp, plan.microbatches) == (own.ranks, own.microbatches):  # else a rule says what is wrong
        validate(own)
    vars(plan)["schedule"] = own
    return None


def own_schedule(given: Any, p: int | None, m: int | None) -> Schedule:
    """Make a Schedule of a learner's own, in any form that `Schedule` takes; an empty one is a ValueError."""
    own = given if isinstance(given, Schedule) else Schedule(given, p=p, m=m)
    if not any(own.rows):
        raise ValueError(
            "Plan(schedule=[]): the schedule is empty. It has a row for each rank, such as "
            "Plan(pp=2, schedule=['0F0 0B0', '1F0 1B0'])"
        )
    return own


def _complete_cut(plan: Any) -> None:
    """Make `cut` a tuple, its numbers Python's own."""
    cut: Any = plan.cut
    cut = (cut,) if isinstance(cut, str | int) else cut
    if isinstance(cut, Sequence):
        cut = tuple(point if whole(point) is None else whole(point) for point in cut)
    vars(plan)["cut"] = cut


def _rises(cut: Sequence[Any]) -> bool:
    """Return whether the points of a cut are names and numbers from 1 in rising order."""
    numbers = [0, *(point for point in cut if type(point) is int)]
    return all(type(point) in (int, str) for point in cut) and all(a < b for a, b in pairwise(numbers))


def call_of(plan: Any, changes: Mapping[str, Any] | None = None, *, bare: bool = False) -> str:
    """Return the call that makes a plan with some changes or, if `bare`, one with the changes alone.

    It leaves out fields with their default value, except for the schedule of a pipeline.
    """
    defaults = {field.name: field.default for field in fields(plan)}
    values = dict(defaults) if bare else {name: getattr(plan, name) for name in defaults}
    values.update(changes or {})
    pipeline = values["pp"] != 1
    shown = [
        f"{name}={list(value) if name == 'cut' and isinstance(value, tuple) else value!r}"
        for name, value in values.items()
        if value != defaults[name] or (name == "schedule" and pipeline)
    ]
    return f"Plan({', '.join(shown)})"


def change_plan(plan: P, **changes: Any) -> P:
    """Return the plan with some fields changed; it keeps its dp_shard if that still works.

    >>> from mpkit.plan.plan import Plan
    >>> plan = Plan(dp=8, zero=3, dp_shard=4)
    >>> change_plan(plan, dp=16), change_plan(plan, zero=0), change_plan(plan, dp_shard=2)
    (Plan(dp=16, zero=3, dp_shard=4), Plan(dp=8), Plan(dp=8, zero=3, dp_shard=2))
    """
    old: Any = plan
    dp, zero = whole(changes.get("dp", old.dp)) or 0, changes.get("zero", old.zero)
    if old.dp_shard and not (zero and dp % old.dp_shard == 0):
        changes = {"dp_shard": None} | changes
    return replace(old, **changes)  # type: ignore[no-any-return]


def describe(plan: Any) -> str:
    """Describe a plan in words, for `Plan.describe`.

    >>> from mpkit.plan.plan import Plan
    >>> print(describe(Plan(pp=2, dp=2, tp=2, zero=1, schedule="1f1b", microbatches=4)))
    8 ranks, 2 x 2 x 2 (pp x dp x tp). 1f1b on 2 ranks: the model in 2 stages, each batch in 4 micro-batches. Bubble in
    theory 1/5 = 0.200. ZeRO-1 on 2 ranks: each half of every batch. Each layer is shared by 2 ranks.
    >>> print(describe(Plan(dp=32, zero=3, dp_shard=8, ep=2, microbatches=2)))
    ZeRO-3 on 32 ranks, sharded within 4 groups of 8: each 1/32 of every batch, in 2 micro-batches, whose gradients
    accumulate. The experts of each layer are divided among 2 ranks, to which tokens go by all-to-alls.
    """
    mesh = plan.mesh
    long = [axis for axis in AXES if mesh.degree(axis) > 1]
    is_replicated, accumulates = plan.dp > 1 or plan.zero, plan.microbatches > 1 and plan.pp == 1
    parts = []
    if len(long) > 1:
        degrees = " x ".join(str(mesh.degree(axis)) for axis in long)
        parts.append(f"{plan.ranks} ranks, {degrees} ({' x '.join(long)}).")
    if plan.pp > 1 or (plan.ranks == 1 and not plan.zero):
        parts.append(_pipeline(plan))
    if is_replicated:
        parts.append(_replicas(plan, accumulates))
    if plan.tp > 1:
        between = ", and between layers each has its part of the sequence" if plan.sequence_parallel else ""
        parts.append(f"Each layer is shared by {plan.tp} ranks{between}.")
    if plan.ep > 1:
        parts.append(
            f"The experts of each layer are divided among {plan.ep} ranks, to which tokens go by all-to-alls."
        )
    if plan.cp > 1:
        parts.append(f"Each sequence is shared by {plan.cp} ranks ({plan.cp_method}, {plan.cp_order}).")
    if accumulates and not is_replicated and plan.ranks > 1:
        parts.append(f"Each batch in {plan.microbatches} micro-batches, whose gradients accumulate.")
    if plan.precision != "full":
        parts.append(f"Computes in {plan.precision}.")
    if plan.offload != "none":
        on_host = "The optimizer is" if plan.offload == "optimizer" else "Optimizer and parameters are"
        parts.append(f"{on_host} on the host.")
    return " ".join(parts)


def _pipeline(plan: Any) -> str:
    if plan.pp == 1:
        title, stages = "Serial on 1 rank", "the whole model"
    else:
        name = plan.schedule.name if isinstance(plan.schedule, Schedule) else plan.schedule
        title, stages = f"{name} on {plan.pp} ranks", f"the model in {plan.stages} stages"
    parts = "whole" if plan.microbatches == 1 else f"in {plan.microbatches} micro-batches"
    blocks = f"activations of one in {every(plan.recompute)} blocks"
    what = {"none": "", "selective": "attentions", "full": "activations"}.get(plan.recompute, blocks)
    again = f", {what} computed again in the backward" if what else ""
    bubble = plan.bubble_in_theory if plan.pp > 1 else None
    theory = "" if bubble is None else f" Bubble in theory {bubble} = {float(bubble):.3f}."
    return f"{title}: {stages}, each batch {parts}{again}.{theory}"


def _replicas(plan: Any, accumulates: bool) -> str:
    name = "DP" if plan.data_parallel == "dp" else f"ZeRO-{plan.zero}" if plan.zero else "DDP"
    share = {1: "the whole", 2: "half", 3: "a third", 4: "a quarter"}.get(plan.dp, f"1/{plan.dp}")
    pieces = f", in {plan.microbatches} micro-batches, whose gradients accumulate" if accumulates else ""
    where = f"on {plan.dp} rank{'s' * (plan.dp > 1)}"
    if plan.dp_shard:
        where += f", sharded within {plan.mesh.dp_replicate} groups of {plan.dp_shard}"
    return f"{name} {where}: each {share} of every batch{pieces}."
