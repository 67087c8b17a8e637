"""The pipeline of a trace: who is which stage, and which schedule orders forwards and backwards so.

stages     as annotations of torch.distributed.pipelining say; else along the chain of messages, from the rank that
           sends before it receives
order      each rank's forwards and backwards of the last step
schedule   the one of mpkit's that has this order
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpkit.plan.plan import Plan
from mpkit.plan.schedule.catalogue import GPIPE, SCHEDULES
from mpkit.trace import Kind, RankTrace

__all__ = ["InferredPipeline", "pipeline_of"]

_LETTERS = {Kind.FORWARD: "F", Kind.BACKWARD: "B", Kind.INPUT_GRAD: "I", Kind.WEIGHT_GRAD: "W"}


@dataclass(frozen=True)
class InferredPipeline:
    """What was found of a pipeline.

    Attributes:
        ranks: how many ranks have a stage.
        microbatches: per step.
        virtual_stages: stages per rank.
        schedule: the name of the schedule; "" if no schedule of mpkit's has this order.
        stages: by rank of the trace, its first stage.
        evidence: sentences.
    """

    ranks: int
    microbatches: int
    virtual_stages: int
    schedule: str
    stages: dict[int, int]
    evidence: list[str]


def pipeline_of(ranks: Sequence[RankTrace]) -> InferredPipeline | None:
    """Return the pipeline of these ranks' last steps; None if no rank sends to another.

    Args:
        ranks: each rank's records of its last step.
    """
    announced = any((rank.ops["stage"][rank.ops["kind"] < Kind.WAIT] >= 0).any() for rank in ranks)
    chain = _stages_said(ranks) if announced else _chain(ranks)
    if len(chain) < 2:
        return None
    order = {stage: _order(ranks[rank], announced) for rank, stage in chain.items()}
    microbatches = max(
        (int(text.split("F")[-1]) + 1 for row in order.values() for text in row if "F" in text), default=1
    )
    stages = 1 + max(
        (int(row["stage"]) for rank in ranks for row in rank.ops if row["kind"] < Kind.WAIT), default=0
    )  # fmt: skip
    virtual = max(1, stages // len(chain)) if announced else 1
    evidence = [
        f"Annotations of torch.distributed.pipelining name {stages} stages on {len(chain)} ranks."
        if announced
        else f"Messages run along a chain of {len(chain)} ranks, {' > '.join(map(str, chain))}: a pipeline."
    ]
    schedule = _schedule(order, len(chain), microbatches, virtual)
    first = " ".join(order[min(order)][: 2 * len(chain) + 2])
    evidence.append(
        f"The first stage's order in a step is {first} ..., {microbatches} micro-batches: "
        + (f"schedule {schedule!r}." if schedule else "no schedule of mpkit's has this order on all ranks.")
    )
    return InferredPipeline(len(chain), microbatches, virtual, schedule, chain, evidence)


def _stages_said(ranks: Sequence[RankTrace]) -> dict[int, int]:
    """Return each rank's first stage, as its actions have it, in order of the stages."""
    found = {}
    for number, rank in enumerate(ranks):
        stages = rank.ops["stage"][(rank.ops["kind"] < Kind.WAIT) & (rank.ops["stage"] >= 0)]
        if len(stages):
            found[number] = int(stages.min())
    return dict(sorted(found.items(), key=lambda item: item[1]))


def _chain(ranks: Sequence[RankTrace]) -> dict[int, int]:
    """Return each rank's place in the longest chain of messages that starts where a rank sends first."""
    after: dict[int, int] = {}
    receives: set[int] = set()
    for number, rank in enumerate(ranks):
        forwards = rank.ops[(rank.ops["kind"] == Kind.FORWARD) & (rank.ops["depth"] == 0)]
        sends = rank.ops[(rank.ops["kind"] == Kind.SEND) & (rank.ops["peer"] >= 0)]
        if not len(forwards) or not len(sends):
            continue
        later = sends[sends["start"] >= forwards["start"][0]]
        backwards = rank.ops[(rank.ops["kind"] == Kind.BACKWARD) & (rank.ops["depth"] == 0)]
        until = backwards["start"][0] if len(backwards) else 2**62
        if len(later) and later["start"][0] < until:
            after[number] = int(later["peer"][0])
            receives.add(int(later["peer"][0]))
    chains = []
    for first in sorted(after.keys() - receives):
        chain = [first]
        while chain[-1] in after and after[chain[-1]] not in chain:
            chain.append(after[chain[-1]])
        chains.append(chain)
    longest = max(chains, key=len, default=[])
    return {rank: stage for stage, rank in enumerate(longest)}


def _order(rank: RankTrace, announced: bool) -> list[str]:
    """Return a rank's actions of a step in the notation of torch: "F0", or "2F0" with its stage."""
    actions = rank.ops[
        (rank.ops["depth"] == 0) & np.isin(rank.ops["kind"], list(_LETTERS)) & (rank.ops["microbatch"] >= 0)
    ]
    found: list[str] = []
    for row in actions:
        stage = str(int(row["stage"])) if announced else ""
        word = f"{stage}{_LETTERS[Kind(int(row['kind']))]}{int(row['microbatch'])}"
        if not found or found[-1] != word:
            found.append(word)
    return found


def _schedule(order: dict[int, list[str]], ranks: int, microbatches: int, virtual: int) -> str:
    """Return the name of the schedule that has this order on all of its ranks; "" if none has."""
    # Of one micro-batch all have the same order: then it is what a Plan has by default.
    for name in (GPIPE, *SCHEDULES):
        if not SCHEDULES[name].can_have(virtual):
            continue
        try:
            plan = Plan.pipeline(
                name, ranks, microbatches, **({"virtual_stages": virtual} if virtual > 1 else {})
            )
            rows: Any = plan.build().rows
        except ValueError:  # no such schedule of this many micro-batches
            continue
        wanted = [_bare([str(action) for action in row], virtual > 1) for row in rows]
        seen = [_bare(order[stage], virtual > 1) for stage in sorted(order)]
        if wanted == seen:
            return name
    return ""


def _bare(row: Sequence[str], staged: bool) -> list[str]:
    """Return the actions without their stages, where a rank has only one."""
    found: dict[str, None] = defaultdict()
    for text in row:
        found[text if staged else text.lstrip("0123456789")] = None
    return list(found)
