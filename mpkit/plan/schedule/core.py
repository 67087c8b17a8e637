"""Schedule: a row of actions for each rank, made of text, lists or a function; and lowered, with its messages."""

from __future__ import annotations

import inspect
import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias, Union

from mpkit.common.disk import write_whole
from mpkit.common.tracebacks import public
from mpkit.plan.schedule.play import COMPUTE, KINDS, Action, Order, draw, live, needs_of, order_of, play
from mpkit.plan.schedule.validate import validate

Row = tuple[Action, ...]
Rows: TypeAlias = str | Iterable[str | Iterable[Action | str]]
Source: TypeAlias = Union["Schedule", Rows, Callable[[int, int], Union["Schedule", Rows]]]
"""Text, rows of text or of actions, or a function of (p, m) that returns or yields these."""


@public
@dataclass(frozen=True, init=False, repr=False)
class Schedule:
    """The actions of each rank, in program order.

    Attributes:
        rows: one row of actions per rank.
        name: the name of the schedule.
        stage_to_rank: the rank that holds each stage; if left out, the rank whose row names the stage.
        together: forwards that run as one with the backward that follows them in their row (DualPipe's F & B). A rank
            sends the results of both when both are done. mpkit runs them one after the other; elsewhere each
            computes while the other's tokens travel.

    A Schedule is made from one of these:

    - text with one line per rank, or a list of lines: `2F0` is stage 2's forward of micro-batch 0, `0F3&3B1` run
      together; the stage may be left out where a rank holds only one
    - one list of actions per rank
    - a function of (p, m) that returns or yields any of these

    >>> Schedule(["F0 F1 B1 B0", "F0 F1 B1 B0"], name="gpipe").stage_to_rank
    (0, 1)
    >>> def depth_first(p, m):
    ...     for rank in range(p):
    ...         yield [Action(kind, rank, i) for i in range(m) for kind in "FB"]
    >>> Schedule(depth_first, p=2, m=3)
    Schedule(['0F0 0B0 0F1 0B1 0F2 0B2', '1F0 1B0 1F1 1B1 1F2 1B2'], name='depth_first')

    Raises:
        ValueError: something is not an action. (`validate` says whether the schedule would finish.)
    """

    rows: tuple[Row, ...]
    name: str = "own"
    stage_to_rank: tuple[int, ...] = ()
    together: frozenset[Action] = field(default=frozenset())

    def __init__(
        self, rows: Source, name: str = "", stage_to_rank: Sequence[int] = (), together: Iterable[Action] = (), *,
        p: int | None = None, m: int | None = None,
    ) -> None:  # fmt: skip
        given, called_as = _call_source(rows, p, m)
        if isinstance(given, Schedule):
            parsed, pairs, called_as = given.rows, {*given.together}, given.name
            stage_to_rank = stage_to_rank or given.stage_to_rank
        else:
            parsed, pairs = _read_rows(given, as_list(stage_to_rank) or [])
        named = _holders(parsed)
        held = as_list(stage_to_rank or named)
        if held is None or len(held) < len(named) or not all(rank in range(len(parsed)) for rank in held):
            raise ValueError(
                f"stage_to_rank={stage_to_rank}: a rank for each stage, and the rows have {len(named)} stages on "
                f"{len(parsed)} ranks. Left out, it follows from the rows: {named}"
            )
        vars(self).update(rows=parsed, name=name or called_as, stage_to_rank=tuple(held))
        vars(self).update(together=frozenset({*pairs, *together}))

    @property
    def ranks(self) -> int:
        """The number of ranks, p."""
        return len(self.rows)

    @property
    def stages(self) -> int:
        """The number of stages: p, or v p if each rank holds v of them."""
        return len(self.stage_to_rank)

    @cached_property
    def microbatches(self) -> int:
        """The number of micro-batches, m."""
        return 1 + max((action.microbatch for row in self.rows for action in row), default=-1)

    @cached_property
    def order(self) -> Order:
        """The actions, each after all that it needs."""
        return order_of(self, self._actions)

    @cached_property
    def _actions(self) -> frozenset[Action]:
        return frozenset(action for row in self.rows for action in row)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that a rank holds, in order."""
        return tuple(stage for stage, holder in enumerate(self.stage_to_rank) if holder == rank)

    def needs(self, action: Action) -> list[Action]:
        """List the actions that must be done before this one can run, besides those earlier in its row.

        >>> s = Schedule(["0F0 0B0", "1F0 1B0"])
        >>> s.needs(Action.parse("0B0"))
        [0F0, 1B0]
        """
        return needs_of(action, self.stages, self._actions)

    @property
    def splits_backward(self) -> bool:
        """Whether some backward is split into I and W."""
        return any(action.kind == "W" for action in self._actions)

    @property
    def peak_live(self) -> list[float]:
        """The most activations that each rank holds at once: 1 per micro-batch and stage, from F to B or W.

        >>> Schedule(["F0 F1 B0 B1", "F0 B0 F1 B1"]).peak_live
        [2, 1]
        """
        return [max(live(row), default=0) for row in self.rows]

    def validate(self, *, max_live: float | Sequence[float] | None = None) -> Schedule:
        """Return the schedule itself if it can run, and within a cap on memory; see `mpkit.plan.schedule.validate`.

        Raises:
            ValueError: it cannot run; the message says why, and draws the schedule with an arrow at the action.
        """
        validate(self, max_live=max_live)
        return self

    def spelled(self) -> list[str]:
        """Return the rows as text, from which `Schedule` makes the same schedule again.

        >>> Schedule(["F0&B1", "F0"]).spelled()
        ['0F0&0B1', '1F0']
        """
        end = {True: "&", False: " "}
        return ["".join(f"{each}{end[each in self.together]}" for each in row).rstrip() for row in self.rows]

    def to_csv(self, path: str | Path | None = None) -> str:
        """Return the schedule as torch's CSV of computation alone; write it to `path` as well if that is given.

        torch.distributed.pipelining loads it (`_load_csv`), and torchtitan (`pipeline_parallel_schedule_csv`).

        >>> print(Schedule(["F0 F1&B0 B1"]).to_csv(), end="")
        0F0,(0F1;0B0)OVERLAP_F_B,0B1
        """
        rows = "".join(f"{row}\n" for row in self.spelled())
        text = re.sub(r"(\w+)&(\w+)", r"(\1;\2)OVERLAP_F_B", rows).replace(" ", ",")
        if path is not None:
            write_whole(Path(path), text.encode())
        return text

    def __contains__(self, action: object) -> bool:
        return action in self._actions

    def __str__(self) -> str:
        return draw(self)

    def __repr__(self) -> str:
        named = "" if self.name == "own" else f", name={self.name!r}"
        held = "" if self.stage_to_rank == _holders(self.rows) else f", stage_to_rank={self.stage_to_rank}"
        return f"Schedule({self.spelled()}{named}{held})"

    def __reduce__(self) -> Any:
        return Schedule, (self.rows, self.name, self.stage_to_rank, self.together)


_HEAD = re.compile(r"\s*rank\s*\d+\s*[|:]\s*")  # as in a drawing
_IDLE = re.compile(r"[.-]+")
_STAGE = re.compile(r"(\d{1,9})[A-Z]")


def _call_source(source: Any, p: int | None, m: int | None) -> tuple[Any, str]:
    """Return the rows that a function makes for p ranks and m micro-batches, and its name; or any other source."""
    if not callable(source):
        return source, "own"
    name = getattr(source, "__name__", "own")
    if p is None or m is None:
        raise ValueError(
            f"The schedule {name} is a function, of p ranks and m micro-batches. How many are there? "
            f"Schedule({name}, p=4, m=8), or Plan(pp=4, microbatches=8, schedule={name})"
        )
    try:
        inspect.signature(source).bind(p, m)
    except (TypeError, ValueError) as error:  # ValueError: a type of Python's own has no signature
        raise ValueError(
            f"schedule={source!r} is no schedule, and no function of (p, m) that makes one ({error}). A function takes "
            "the number of ranks and of micro-batches; or name one: Plan(pp=4, microbatches=8, schedule='gpipe')"
        ) from None
    return source(p, m), name


def _read_rows(source: Any, stage_to_rank: Sequence[int]) -> tuple[tuple[Row, ...], set[Action]]:
    """Return the rows of actions in a text or in lists, and the forwards that run with a backward.

    A drawing is a text too: its heads, dots and dashes are ignored.
    """
    if isinstance(source, str):
        source = [line for line in source.splitlines() if line.strip()]
    given = as_list(source)
    if given is None:
        raise ValueError(
            f"{source!r} is no schedule. Give its rows, one per rank, such as ['F0 F1 B0 B1', 'F0 B0 F1 B1'], a list "
            "of Actions a rank, or a function of (p, m) that returns or yields such rows."
        )
    together: set[Action] = set()
    rows = []
    for rank, row in enumerate(given):
        if isinstance(row, str):
            rows.append(tuple(_read_spelled(row, rank, stage_to_rank, together)))
            continue
        actions = None if isinstance(row, Action) else as_list(row)
        if actions is None:
            raise ValueError(
                f"Rank {rank}'s row is {row!r}; it is text, such as 'F0 B0', or a list of Actions, such as "
                f"[Action('F', {rank}, 0), Action('B', {rank}, 0)]"
            )
        rows.append(tuple(_read_list(actions, rank)))
    return tuple(rows), together


def _holders(rows: tuple[Row, ...]) -> tuple[int, ...]:
    """Return, for each stage, the rank whose row names it most often: the first of several, or 0 without one."""
    times: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for rank, row in enumerate(rows):
        for action in row:
            times[action.stage][rank] += 1
    stages = range(max(times, default=-1) + 1)
    return tuple(max(times[stage], key=times[stage].__getitem__, default=0) for stage in stages)


def as_list(given: Any) -> list[Any] | None:
    """Return a list of what can be iterated over: a tensor without dimensions has `__iter__`, and cannot."""
    try:
        return list(given)
    except TypeError:
        return None


def _read_spelled(
    row: str, rank: int, stage_to_rank: Sequence[int], together: set[Action]
) -> Iterator[Action]:
    """Read a row of text. Actions name their stage, unless the rank holds only one: by default that of its number."""
    row = _HEAD.sub("", row)
    held = {stage for stage, holder in enumerate(stage_to_rank) if holder == rank}
    stages = held or {int(stage) for stage in _STAGE.findall(row)}
    only = None if len(stages) > 1 else min(held, default=rank)
    for word in row.split():
        if _IDLE.fullmatch(word):
            continue
        if only is None and word[:1].isalpha():
            some = " and ".join(map(str, sorted(stages)))
            raise ValueError(
                f"{word!r:.60}: of which stage? Rank {rank} holds stages {some}: {min(stages)}{word:.60}, say"
            )
        *first, last = (Action.parse(part, only) for part in word.split("&"))
        if first:
            if len(first) > 1 or first[0].kind != "F" or last.kind not in ("B", "I"):
                raise ValueError(
                    f"{word!r:.60}: a forward runs together with one backward after it, as in 0F3&3B1"
                )
            together.add(first[0])
            yield first[0]
        yield last


def _read_list(row: list[Any], rank: int) -> Iterator[Action]:
    """Read a row that is a list of Actions or of their spellings."""
    for action in row:
        if type(action) is Action and action[0] in KINDS and min(action[1:]) >= 0:
            yield action
        elif isinstance(action, str):
            yield Action.parse(action, rank)
        else:
            raise ValueError(
                f"{action!r} in rank {rank}'s row is no action: an Action has one of the kinds "
                f"{', '.join(COMPUTE)}, a stage and a micro-batch, both counted from 0: Action('F', {rank}, 0)"
            )


# ---- lowered: with sends and receives


# The time that a message takes on paper, so that a stage starts slightly after the previous one.
HOP = 1 / 1024


def lower(schedule: Schedule) -> Schedule:
    """Add the sends and receives that a valid schedule of compute needs; stages on the same rank need none.

    1. Play the schedule on paper. Each message belongs to the instant t at which its content is computed. Actions
       that run together send together, when both are done.
    2. The SEND goes right after the action that made the message.
    3. The RECV goes before the action that its rank runs at t, so that the message travels during that action; not
       earlier, since its buffer takes memory.

    So the messages between two ranks, in both directions, are in the same order in both rows, that of t. That makes
    the result safe on NCCL, which matches messages by order and not by name; Gloo matches by name, in any order.

    >>> for row in lower(Schedule(["0F0 0F1 0B1 0B0", "1F0 1F1 1B1 1B0"])).rows:
    ...     print(*row)
    0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B1 0RECV_B0 0B1 0B0
    1RECV_F0 1RECV_F1 1F0 1F1 1B1 1SEND_B1 1B0 1SEND_B0
    """
    placed = play(schedule, hop=HOP)
    busy: list[list[tuple[float, float]]] = [[] for _ in schedule.rows]
    for each in placed:
        busy[each.rank].append((each.start, each.end))
    rows: list[list[tuple[tuple[float, int, float], Action]]] = [[] for _ in schedule.rows]
    for start, _, rank, action, made in placed:
        rows[rank].append(((start, 1, start), action))
        if message := _message(schedule, action):
            send, receive = message
            receiver = schedule.stage_to_rank[receive.stage]
            rows[rank].append(((made, 0, made), send))
            rows[receiver].append(((_began_at(busy[receiver], made), 0, made), receive))
    in_order = [[action for _, action in sorted(row, key=lambda entry: entry[0])] for row in rows]
    return Schedule(in_order, schedule.name, schedule.stage_to_rank, schedule.together)


def _began_at(busy: list[tuple[float, float]], t: float) -> float:
    """Return when a rank began what it does at time t; t itself if it is idle or about to begin."""
    before = bisect_left(busy, (t, t)) - 1
    start, end = busy[before] if before >= 0 else (t, t)
    return start if end > t else t


def _message(schedule: Schedule, action: Action) -> tuple[Action, Action] | None:
    """Return the send and the receive that follow an action, or None if its result stays on its rank."""
    kind, stage, m = action
    way, to = ("F", stage + 1) if kind == "F" else ("B", stage - 1)
    holders = schedule.stage_to_rank
    if kind == "W" or not 0 <= to < schedule.stages or holders[to] == holders[stage]:
        return None
    return Action(f"SEND_{way}", stage, m), Action(f"RECV_{way}", to, m)
