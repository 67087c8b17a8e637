"""Play: what an action is, what it needs, and when each can run, on paper; and the drawing of it.

action   one step of one rank, and how it is spelled; the activations held between a rank's actions
order    the actions, each after all that it needs: once for a schedule
times    the end of each, from the ends of the action before it and of what it needs: once for each plan
draw     a schedule in text: over time, or as it is written, with an arrow at one action
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from mpkit.plan.schedule.core import Schedule


COMPUTE = ("F", "B", "I", "W")
"""What an author writes. `F`: forward. `B`: backward, or split in two, `I`: gradients of the inputs, which
the previous stage waits for, and `W`: gradients of the weights, which no stage waits for."""

COMMUNICATION = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
"""What `lower` adds. `SEND_F` sends a stage's output, `RECV_F` receives the stage's input; `SEND_B` sends
the gradient of the stage's input back, `RECV_B` receives the gradient of its output."""

KINDS = (*COMPUTE, *COMMUNICATION)
DIGITS = 5  # of a stage or micro-batch: a schedule has an action for each, and a drawing as many columns
_SPELLING = re.compile(rf"(\d*)({'|'.join(KINDS)})(\d+)")


class Action(NamedTuple):
    """A kind, a stage and a micro-batch; numbers count from 0.

    >>> Action("F", stage=2, microbatch=0)
    2F0
    >>> Action.parse("1SEND_B7").kind
    'SEND_B'
    """

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    def __repr__(self) -> str:
        return str(self)

    @classmethod
    def parse(cls, text: str, stage: int | None = None) -> Action:
        """Read what `str(action)` spells, or F0 if the caller knows the `stage`."""
        match = _SPELLING.fullmatch(text.strip())
        if match is None or (stage is None and not match[1]):
            raise ValueError(
                f"{text!r:.80} is no action. An action is spelled stage, kind, micro-batch, such as 2F0 for stage 2's "
                f"forward of micro-batch 0; the kinds are {', '.join(COMPUTE)} (and {', '.join(COMMUNICATION)}, "
                "which mpkit adds by itself). The stage may be left out where a rank holds one stage only: F0."
            )
        if max(len(match[1]), len(match[3])) > DIGITS:
            raise ValueError(f"{text!r:.80}: stages and micro-batches have numbers below {10**DIGITS:,}")
        named = int(match[1]) if match[1] else stage
        assert named is not None
        return cls(match[2], named, int(match[3]))


def live(row: Iterable[Action]) -> list[int]:
    """Return how many activations a rank holds while each action of its row runs: 1 per micro-batch and stage.

    A stage holds a micro-batch's activations from its F to the end of its B, or of its W if the backward is split: I
    frees nothing, since W needs what the forward kept.

    >>> live(map(Action.parse, "0F0 0F1 0I0 0F2 0W0 0B1 0B2".split()))
    [1, 2, 2, 3, 3, 2, 1]
    """
    held, now = [], 0
    for kind, _, _ in row:
        now += kind == "F"
        held.append(now)
        now -= kind in ("B", "W")
    return held


SLOTS: Mapping[str, float] = {"F": 1, "B": 2, "I": 1, "W": 1}  # a backward takes twice as long as a forward
BESIDE = "F&"
"""The kind in `lengths_of` of a forward that runs as one with a backward: the time that it adds to the backward's."""


class PlacedAction(NamedTuple):
    """An action with its times."""

    start: float
    end: float
    rank: int
    action: Action
    left: float  # when its result left the rank: its end, or the end of the action that it runs together with


def play(
    schedule: Schedule, slots: Mapping[str, float | Sequence[float]] = SLOTS, hop: float = 0,
    again: Sequence[float] = (),
) -> list[PlacedAction]:  # fmt: skip
    """Run a schedule on paper, without its messages: each action runs as soon as what it needs is there.

    Returns the actions that could run, by start; `schedule.order.stuck` says where ranks are stuck.

    Args:
        slots: how long an action takes, by kind: a number, or one per stage.
        hop: how long a result takes to get from one rank to another.
        again: by stage, how long recomputing its forward takes before a backward; it does not wait for the gradient.

    >>> from mpkit.plan.schedule import Schedule
    >>> [(each.start, each.end, each.rank, each.action) for each in play(Schedule(["0F0 0B0", "1F0 1B0"]))]
    [(0, 1, 0, 0F0), (1, 2, 1, 1F0), (2, 4, 1, 1B0), (4, 6, 0, 0B0)]
    """
    order, stages = schedule.order, schedule.stages
    lead = lengths_of({"B": again, "I": again} if again else {}, stages)
    ends = end_times(order, lengths_of(slots, stages), hop, lead)
    placed = []
    columns = order.rank, order.action, order.slot, order.before, order.need
    for number, (rank, action, slot, before, need) in enumerate(zip(*columns, strict=True), FIRST):
        start = max(ends[before] + lead[slot], ends[need] + hop)
        left = ends[order.leaves.get(number, number)]
        placed.append(PlacedAction(start, ends[number], rank, action, left))
    return sorted(placed)


# ---- the order once, and the times for each plan that has it


class Order(NamedTuple):
    """The n actions of a schedule, numbered from FIRST, each after all that it needs; lists have an entry for each.

    An action waits for its `need`, the action of another rank at whose end what it needs leaves there. What it needs of
    its own rank comes before it in its row.
    """

    rank: list[int]
    action: list[Action]
    slot: list[int]  # where in `lengths_of` its length is
    before: list[int]  # the number of the action before it in its row; START if there is none
    need: list[int]  # the number of the action that it waits for; NEVER if there is none
    leaves: dict[int, int]  # from an action that runs together with the next in its row to that one
    # By rank: the action that it is at, and the one that it waits for.
    stuck: dict[int, tuple[Action, Action]]


START, NEVER, FIRST = range(3)
"""The numbers of the time at which all begin, of a time before everything, and of the first action."""


def needs_of(action: Action, stages: int, actions: Container[Action]) -> list[Action]:
    """List the actions of a schedule that must be done before this computation, besides those earlier in its row."""
    kind, s, m = action
    if kind == "F":
        return [Action("F", s - 1, m)] if s else []
    if kind == "W":
        return [Action("I", s, m)]
    assert kind in ("B", "I"), f"{action} is a message: only compute is asked for"
    # The next stage makes the gradient: its I where its backward is split, else its B.
    forward, split = Action("F", s, m), Action("I", s + 1, m)
    gradient = split if split in actions else Action("B", s + 1, m)
    return [forward] if s == stages - 1 else [forward, gradient]


def order_of(schedule: Schedule, actions: Container[Action]) -> Order:
    """Return the actions of a schedule in an order in which each comes after all that it needs."""
    rank_of, together, stages = schedule.stage_to_rank, schedule.together, schedule.stages
    rows = [[action for action in row if action.kind in COMPUTE] for row in schedule.rows]
    slots = {kind: number * stages for number, kind in enumerate((*COMPUTE, BESIDE))}
    order = Order([], [], [], [], [], {}, {})
    left: dict[Action, int] = {}  # by action whose result has left its rank, the number at whose end it did
    last, done = [START] * len(rows), [0] * len(rows)
    waiting: defaultdict[Action, list[int]] = defaultdict(list)

    def run(rank: int) -> Iterator[Action]:
        """Run what can be run of a rank's row, and yield the actions whose results have left it."""
        row = rows[rank]
        for at in range(done[rank], len(row)):
            action, held = row[at], row[at - 1] if at and row[at - 1] in together else None
            need = NEVER
            for each in needs_of(action, stages, actions):
                if each != held and each not in left:
                    order.stuck[rank] = action, each
                    waiting[each].append(rank)
                    return
                if rank_of[each.stage] != rank:
                    need = left[each]
            number = len(order.rank) + FIRST
            order.rank.append(rank)
            order.action.append(action)
            runs_beside = action in together and at + 1 < len(row) and row[at + 1][1:] != action[1:]
            order.slot.append(slots[BESIDE if runs_beside else action.kind] + action.stage)
            order.before.append(last[rank])
            order.need.append(need)
            if held is not None:
                order.leaves[last[rank]] = left[held] = number
                yield held
            last[rank], done[rank] = number, at + 1
            if action not in together or at + 1 == len(row):
                left[action] = number
                yield action

    ready = deque(range(len(rows)))
    while ready:
        rank = ready.popleft()
        order.stuck.pop(rank, None)
        for action in run(rank):
            if action in waiting:
                ready.extend(waiting.pop(action))
    return order


def lengths_of(slots: Mapping[str, float | Sequence[float]], stages: int) -> list[float]:
    """Return the length of an action, by kind (F, B, I, W, F&) and then by stage.

    `slots` has a number by kind, or one per stage. A kind that is left out has 0, and F& has F's.
    """
    each = (*(slots.get(kind, 0) for kind in COMPUTE), slots.get(BESIDE, slots.get("F", 0)))
    return [time for slot in each for time in ([slot] * stages if isinstance(slot, int | float) else slot)]


def end_times(order: Order, lengths: Sequence[float], hop: float, lead: Sequence[float]) -> list[float]:
    """Return when each action ends, by its number, after START and NEVER.

    `hop` is how long a result takes to get to another rank. `lead` is how long an action takes before it waits for
    another rank; it is a list like `lengths`, as `lengths_of` returns it.
    """
    ends = [0, -inf]
    for slot, before, need in zip(order.slot, order.before, order.need, strict=True):
        own, there = ends[before] + lead[slot], ends[need] + hop
        ends.append((there if there > own else own) + lengths[slot])
    return ends


# ---- drawn in text


def draw(schedule: Schedule, slots: Mapping[str, float] = SLOTS) -> str:
    """Draw the schedule over time, each action as wide as `slots` says for its kind, in whole columns.

    Dots are idle slots; dashes continue the action before them. If ranks hold several stages, actions have their stage
    too: `2F0`. A schedule that cannot finish is drawn up to the point where it is stuck.
    """
    placed = [each for each in play(schedule, slots) if each.end > each.start]
    plain = schedule.stage_to_rank == tuple(range(schedule.ranks))
    labels = [f"{a.kind}{a.microbatch}" if plain else str(a) for _, _, _, a, _ in placed]
    width = max(map(len, labels), default=1)
    columns = round(max((each.end for each in placed), default=0))
    cells = [[".".rjust(width)] * columns for _ in range(schedule.ranks)]
    for (start, end, rank, _, _), label in zip(placed, labels, strict=True):
        first, last = round(start), round(end)
        cells[rank][first:last] = [label.rjust(width), *["-" * width] * (last - first - 1)]
    return "\n".join(f"{_rank(schedule, rank)} | {' '.join(row)}" for rank, row in enumerate(cells))


def draw_rows(schedule: Schedule, *arrows: tuple[int, int]) -> str:
    """Draw the rows as they are written, one column per position, with an arrow under each given (rank, position)."""
    width = max((len(str(action)) for row in schedule.rows for action in row), default=1)
    first, last = _window(max(map(len, schedule.rows), default=0), [position for _, position in arrows])
    lines = []
    for rank, row in enumerate(schedule.rows):
        head = f"{_rank(schedule, rank)} | {'... ' if first else ''}"
        more = " ..." if len(row) > last else ""
        lines.append(
            f"{head}{' '.join(str(action).rjust(width) for action in row[first:last])}".rstrip() + more
        )
        under = [("^" if (rank, at) in arrows else " ") * width for at in range(len(row))]
        if "^" in "".join(under):
            lines.append((" " * len(head) + " ".join(under[first:last])).rstrip())
    return "\n".join(lines)


WIDE = 40  # columns of the longest rows that are shown whole; longer ones are shown around the arrows


def _window(columns: int, positions: list[int]) -> tuple[int, int]:
    if columns <= WIDE or not positions:
        return 0, columns
    return max(0, min(positions) - WIDE // 4), min(columns, max(positions) + WIDE // 4)


def _rank(schedule: Schedule, rank: int) -> str:
    return f"rank {str(rank).rjust(len(str(schedule.ranks - 1)))}"
