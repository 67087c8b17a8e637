"""Greedy: an order of F, I and W that a policy makes as the clock runs, within a cap on memory.

Whenever a rank is free, a policy chooses among the actions whose inputs are there. On each stage, every kind of action
takes the micro-batches in order.

The cap on memory never leads to a deadlock. A forward is allowed only if afterwards the micro-batches that a rank has
begun can still be finished one after the other, the oldest first, each with what those before it have freed (Dijkstra's
banker's algorithm). Then the oldest of all can always continue, and so all can.

Source: Athlur et al., "Varuna: Scalable, Low-cost Training of Massive Deep Learning Models", EuroSys 2022, whose
schedules are made this way, with measured times of F, B and recomputation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from mpkit.plan.schedule.core import Schedule
from mpkit.plan.schedule.play import Action, play


@dataclass(frozen=True)
class ActionCosts:
    """How long a stage's actions take, and how many activations a rank may hold."""

    f: Sequence[float]  # seconds by stage, as i and w
    i: Sequence[float]
    w: Sequence[float]
    hop: float  # seconds from one rank to another
    # By rank, the micro-batches of a stage that it may hold, each from its F to its W.
    max_live: Sequence[float]


@dataclass(frozen=True)
class Policy:
    """How a free rank chooses among the actions that it could run.

    Among its stages' forwards, "deep" takes the last stage's, "shallow" the first's, and "turns" runs p micro-batches
    through a stage before the next stage's turn. A W does not begin if another action becomes ready within `patience`,
    a fraction of the W's time.
    """

    forwards: str
    first: str  # the kind that goes first, "I" or "F", or "turns": the one that did not run last
    lead: Sequence[float]  # by rank, how far the I's may be ahead of the W's while another action could run
    patience: float
    limit: Sequence[float]  # by rank, the most to hold, at most `ActionCosts.max_live`


def greedy(stage_to_rank: Sequence[int], m: int, costs: ActionCosts, policy: Policy) -> list[list[Action]]:
    """Return each rank's actions in the order in which it runs them.

    >>> costs = ActionCosts([1, 1], [1, 1], [1, 1], hop=0, max_live=[2, 2])
    >>> greedy([0, 1], 3, costs, Policy("deep", "I", lead=[0, 0], patience=0, limit=[2, 2]))[0]
    [0F0, 0F1, 0I0, 0W0, 0F2, 0I1, 0W1, 0I2, 0W2]
    >>> policy = Policy("deep", "F", lead=[0], patience=0, limit=[2])
    >>> greedy([0], 2, ActionCosts([1], [1], [1], hop=0, max_live=[2]), policy)[0]  # no W while an I is ready
    [0F0, 0F1, 0I0, 0I1, 0W0, 0W1]
    """
    ranks = [_Rank(rank, stage_to_rank, m, costs, policy) for rank in range(max(stage_to_rank) + 1)]
    events = [(0.0, rank) for rank in range(len(ranks))]  # when a rank may have something to do
    while events:
        now, rank = heappop(events)
        this = ranks[rank]
        if this.free > now:
            continue
        action = this.choose(now)
        if action is None:
            continue
        end = this.do(action, now)
        heappush(events, (end, rank))
        kind, stage, i = action
        to = stage + 1 if kind == "F" else stage - 1 if kind == "I" else -1
        if 0 <= to < len(stage_to_rank):
            other = stage_to_rank[to]
            at = end + costs.hop * (other != rank)
            ranks[other].comes[kind, to, i] = at
            heappush(events, (at, other))
    return [this.row for this in ranks]


class _Rank:
    """What a rank has run, and what it could run."""

    def __init__(
        self, rank: int, stage_to_rank: Sequence[int], m: int, costs: ActionCosts, policy: Policy
    ) -> None:
        self.stages = [stage for stage, holder in enumerate(stage_to_rank) if holder == rank]
        self._last, self._p = len(stage_to_rank) - 1, max(stage_to_rank) + 1
        self._costs, self._policy = costs, policy
        self._time = {"F": costs.f, "I": costs.i, "W": costs.w}
        self._limit = max(policy.limit[rank], len(self.stages))
        self._lead = policy.lead[rank]
        # When the input of an F, or the gradient for an I, arrives: known once the action that makes it has begun.
        self.comes: dict[tuple[str, int, int], float] = {("F", 0, i): 0.0 for i in range(m)}
        self.free = 0.0  # from when on
        self.row: list[Action] = []
        self._next = {kind: dict.fromkeys(self.stages, 0) for kind in "FIW"}
        self._held = self._ahead = 0  # micro-batches of a stage; I's without their W
        self._before = "F"

    def choose(self, now: float) -> Action | None:
        """Choose what to do now; None to wait."""
        forward, f_at = self._ready("F", now)
        backward, i_at = self._ready("I", now)
        weight = self._weight_grad()
        if weight is not None and self._ahead > self._lead and i_at > now:
            return weight
        ready = {a.kind: a for a, at in ((forward, f_at), (backward, i_at)) if a is not None and at <= now}
        if ready:
            first = self._policy.first
            wanted = ("I" if self._before == "F" else "F") if first == "turns" else first
            return ready.get(wanted) or next(iter(ready.values()))
        if weight is None:
            return None
        soon = now + self._policy.patience * self._costs.w[weight.stage]
        return None if min(f_at, i_at) < soon else weight

    def do(self, action: Action, now: float) -> float:
        """Run the action, and return when it is done."""
        kind, stage, i = action
        self._next[kind][stage] += 1
        self.row.append(action)
        self.free = now + self._time[kind][stage]
        self._held += (kind == "F") - (kind == "W")
        self._ahead += (kind == "I") - (kind == "W")
        if kind == "F" and stage == self._last:
            self.comes["I", stage, i] = self.free
        if kind != "W":
            self._before = kind
        return self.free

    def _ready(self, kind: str, now: float) -> tuple[Action | None, float]:
        """Return the best F or I that could run, and when its input is there; None and `inf` if there is none."""
        found, how = [], self._policy.forwards
        for stage in self.stages:
            i = self._next[kind][stage]
            at = self.comes.get((kind, stage, i))
            if at is None or (kind == "F" and not self._is_allowed(stage, i)):
                continue
            turn = i if kind == "I" else i // self._p if how == "turns" else 0
            is_deep = kind == "I" or how == "deep"
            found.append((max(at, now), turn, -stage if is_deep else stage, at, Action(kind, stage, i)))
        if not found:
            return None, inf
        *_, at, action = min(found)
        return action, at

    def _weight_grad(self) -> Action | None:
        due = [(self._next["W"][s], -s) for s in self.stages if self._next["W"][s] < self._next["I"][s]]
        if not due:
            return None
        i, stage = min(due)
        return Action("W", -stage, i)

    def _is_allowed(self, stage: int, i: int) -> bool:
        """Return whether everything that was begun can still be finished after this forward."""
        spare = self._limit - self._held - 1
        if spare < 0 or len(self.stages) == 1:
            return spare >= 0
        forward, weight = self._next["F"], self._next["W"]
        for each in range(min(weight.values()), max(forward.values())):
            done = [s for s in self.stages if each < forward[s] or (s, each) == (stage, i)]
            if len(self.stages) - len(done) > spare:
                return False
            spare += sum(each >= weight[s] for s in done)
        return True


def span(
    schedule: Schedule, slots: Mapping[str, Sequence[float]], hop: float, again: Sequence[float] = ()
) -> float:
    """Return the seconds from the first action to the end of the last, as `play` has them; `inf` if it is stuck."""
    placed = play(schedule, slots, hop, again)
    return inf if schedule.order.stuck else max(each.end for each in placed) - placed[0].start
