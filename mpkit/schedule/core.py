"""Schedule: a row of actions for each rank. What an action needs, and when each can run."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from mpkit.schedule.action import COMPUTE, Action

__all__ = ["SLOTS", "Placed", "Played", "Schedule", "play"]


@dataclass(frozen=True, init=False, repr=False)
class Schedule:
    """For each rank, its actions in program order.

    Attributes:
        rows: one a rank; each a sequence of actions, or their spelling in one string.
        name: what it is called.
        stage_to_rank: the rank that holds each stage; left out, the rank whose row names the stage.

    >>> Schedule(["0F0 0F1 0B1 0B0", "1F0 1F1 1B1 1B0"], name="gpipe").stage_to_rank
    (0, 1)

    Raises:
        ValueError: a row spells something that is no action. (Whether it would finish, `validate` says.)
    """

    rows: tuple[tuple[Action, ...], ...]
    name: str = "own"
    stage_to_rank: tuple[int, ...] = ()

    def __init__(
        self,
        rows: str | Sequence[str | Sequence[Action]],
        name: str = "own",
        stage_to_rank: Sequence[int] = (),
    ) -> None:
        if isinstance(rows, str):  # one row a line
            rows = [line for line in rows.splitlines() if line.strip()]
        parsed = tuple(
            tuple(map(Action.parse, row.split())) if isinstance(row, str) else tuple(row) for row in rows
        )
        object.__setattr__(self, "rows", parsed)
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "stage_to_rank", tuple(stage_to_rank) or _holders(parsed))

    @property
    def ranks(self) -> int:
        """How many ranks there are: p, where each holds one stage."""
        return len(self.rows)

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.stage_to_rank)

    @cached_property
    def microbatches(self) -> int:
        """How many micro-batches there are: m."""
        return 1 + max((action.microbatch for row in self.rows for action in row), default=-1)

    @cached_property
    def _actions(self) -> frozenset[Action]:
        return frozenset(action for row in self.rows for action in row)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, in order."""
        return tuple(stage for stage, holder in enumerate(self.stage_to_rank) if holder == rank)

    def needs(self, action: Action) -> list[Action]:
        """The actions that must be done before this one can run, besides those earlier in its row.

        >>> s = Schedule(["0F0 0B0", "1F0 1B0"])
        >>> s.needs(Action.parse("0B0"))
        [0F0, 1B0]
        """
        kind, s, m = action.kind, action.stage, action.microbatch
        last = s == self.stages - 1
        match kind:
            case "F":
                return [Action("F", s - 1, m)] if s else []
            case "B" | "I":
                return [Action("F", s, m)] + ([] if last else [self.input_grad(s + 1, m)])
            case _:
                assert kind == "W", f"{action} is a message: play asks for compute only"
                return [Action("I", s, m)]

    def input_grad(self, stage: int, microbatch: int) -> Action:
        """The action that makes the gradient of a stage's input: I where its backward is split, else B."""
        split = Action("I", stage, microbatch)
        return split if split in self._actions else Action("B", stage, microbatch)

    def __contains__(self, action: object) -> bool:
        return action in self._actions

    def __str__(self) -> str:
        from mpkit.schedule.grid import draw

        return draw(self)

    def __repr__(self) -> str:
        rows = [" ".join(map(str, row)) for row in self.rows]
        named = "" if self.name == "own" else f", name={self.name!r}"
        held = "" if self.stage_to_rank == _holders(self.rows) else f", stage_to_rank={self.stage_to_rank}"
        return f"Schedule({rows}{named}{held})"


def _holders(rows: tuple[tuple[Action, ...], ...]) -> tuple[int, ...]:
    """By stage, the first rank whose row names it; a stage that no row names is taken to be rank 0's."""
    found: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for action in row:
            found.setdefault(action.stage, rank)
    return tuple(found.get(stage, 0) for stage in range(max(found, default=-1) + 1))


SLOTS: Mapping[str, float] = {"F": 1, "B": 2, "I": 1, "W": 1}
"""How long an action takes where nothing better is known: a backward is twice a forward."""


class Placed(NamedTuple):
    """An action with its time."""

    start: float
    end: float
    rank: int
    action: Action


class Played(NamedTuple):
    """What `play` found: the actions that could run, and by rank where it was stuck and on what."""

    placed: list[Placed]
    stuck: dict[int, tuple[Action, Action]]


def play(schedule: Schedule, slots: Mapping[str, float] = SLOTS, hop: float = 0) -> Played:
    """Run a schedule on paper: each rank does its row in order, each action as soon as what it needs is there.

    Of a schedule that cannot finish, `stuck` says for each rank that did not the action it is at and the one it
    waits for.

    Args:
        schedule: its messages, if it has any, are passed over.
        slots: how long an action takes, by kind.
        hop: how long it takes until what one rank made is on another.

    >>> play(Schedule(["0F0 0B0", "1F0 1B0"])).placed
    [Placed(start=0, end=1, rank=0, action=0F0), Placed(start=1, end=2, rank=1, action=1F0),
     Placed(start=2, end=4, rank=1, action=1B0), Placed(start=4, end=6, rank=0, action=0B0)]
    """
    done: dict[Action, float] = {}
    placed: list[Placed] = []
    position = [0] * schedule.ranks
    free: list[float] = [0] * schedule.ranks
    waiting: defaultdict[Action, list[int]] = defaultdict(list)
    stuck: dict[int, tuple[Action, Action]] = {}
    ready = deque(range(schedule.ranks))
    rows = [[action for action in row if action.kind in COMPUTE] for row in schedule.rows]
    while ready:
        rank = ready.popleft()
        row = rows[rank]
        stuck.pop(rank, None)
        while position[rank] < len(row):
            action = row[position[rank]]
            needs = schedule.needs(action)
            missing = next((need for need in needs if need not in done), None)
            if missing is not None:
                stuck[rank] = (action, missing)
                waiting[missing].append(rank)
                break
            arrivals = [done[n] + hop * (schedule.stage_to_rank[n.stage] != rank) for n in needs]
            start = max([free[rank], *arrivals])
            done[action] = free[rank] = end = start + slots.get(action.kind, 0)
            placed.append(Placed(start, end, rank, action))
            position[rank] += 1
            ready.extend(waiting.pop(action, ()))
    return Played(sorted(placed), stuck)
