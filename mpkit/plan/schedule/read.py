"""The forms in which a learner may write a schedule, turned into rows of actions: text, lists, functions."""

from __future__ import annotations

import inspect
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from mpkit.plan.schedule.action import COMMUNICATION, COMPUTE, Action

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpkit.plan.schedule.core import Schedule

    Rows: TypeAlias = str | Iterable[str | Iterable[Action | str]]
    Source: TypeAlias = Schedule | Rows | Callable[[int, int], Schedule | Rows]
    """Text, rows of text or of actions, or a function of (p, m) that returns or yields these."""

__all__ = ["Row", "as_list", "call_source", "holders", "read_rows"]

Row = tuple[Action, ...]
KINDS = frozenset((*COMPUTE, *COMMUNICATION))

_HEAD = re.compile(r"\s*rank\s*\d+\s*[|:]\s*")  # as in a drawing
_IDLE = re.compile(r"[.-]+")
_STAGE = re.compile(r"(\d{1,9})[A-Z]")


def call_source(source: Any, p: int | None, m: int | None) -> tuple[Any, str]:
    """Return the rows that a function makes for p ranks and m micro-batches, and its name.

    Anything that is not a function is returned as it is, with the name "own".

    Raises:
        ValueError: it is a function, and p or m is missing.
    """
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


def read_rows(source: Any, stage_to_rank: Sequence[int]) -> tuple[tuple[Row, ...], set[Action]]:
    """Return the rows of actions that are given as text or as lists, and the forwards that run with a backward.

    Args:
        source: see `Schedule`. A drawing can be read back: its heads, dots and dashes are ignored.
        stage_to_rank: the rank of each stage, if that is known.

    Raises:
        ValueError: the source is neither.
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
        actions = None if isinstance(row, str | Action) else as_list(row)
        if actions is not None:
            rows.append(tuple(_readas_list(actions, rank)))
        elif isinstance(row, str):
            rows.append(tuple(_read_spelled(row, rank, stage_to_rank, together)))
        else:
            raise ValueError(
                f"Rank {rank}'s row is {row!r}; it is text, such as 'F0 B0', or a list of Actions, such as "
                f"[Action('F', {rank}, 0), Action('B', {rank}, 0)]"
            )
    return tuple(rows), together


def holders(rows: tuple[Row, ...]) -> tuple[int, ...]:
    """Return, for each stage, the rank whose row names it most often: the first of several; 0 if there is none."""
    times: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for rank, row in enumerate(rows):
        for stage, count in Counter([action.stage for action in row]).items():
            times[stage][rank] = count
    return tuple(
        max(times[s], key=times[s].__getitem__, default=0) for s in range(max(times, default=-1) + 1)
    )


def as_list(given: Any) -> list[Any] | None:
    """Return a list of what can be iterated over: a tensor without dimensions has `__iter__`, and cannot."""
    try:
        return list(given)
    except TypeError:
        return None


def _read_spelled(
    row: str, rank: int, stage_to_rank: Sequence[int], together: set[Action]
) -> Iterator[Action]:
    """Read a row of text. A stage that is not named is the only one that the rank holds, by default rank's number.

    If the row names several stages, each action has to name its stage.
    """
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


def _readas_list(row: list[Any], rank: int) -> Iterator[Action]:
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
