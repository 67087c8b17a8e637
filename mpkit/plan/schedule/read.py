"""Reading and writing: torch's CSV, and the forms in which a learner may write a schedule, turned into rows of actions.

Torch's CSV has a line per rank, an action per field:

    0F0,0F1,,0B0             actions are spelled as here; an empty field is an idle slot
    (0F7;7B3)OVERLAP_F_B     a forward and a backward at the same time: 0F7&7B3 here
    0UNSHARD, 0SEND_F1       communication, which is left out when it is read: mpkit adds its own, as torch does to a
                             file of computation alone

torch.distributed.pipelining writes such files with `_dump_csv` and reads them with `_load_csv` ("compute_only");
torchtitan takes the path of one as `pipeline_parallel_schedule_csv`.
"""

from __future__ import annotations

import csv
import inspect
import io
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from mpkit.common.size_limits import read_text
from mpkit.plan.schedule.action import COMMUNICATION, COMPUTE, Action

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpkit.plan.schedule.core import Schedule

    Rows: TypeAlias = str | Iterable[str | Iterable[Action | str]] | Iterable[Action]
    Source: TypeAlias = Schedule | Rows | Callable[[int, int], Schedule | Rows]
    """Text, rows of text or of actions, actions in execution order, or a function of (p, m) that returns or
    yields these."""

__all__ = ["Read", "call_source", "fields_of", "holders", "lines_of", "read", "text_of"]

# ---- torch's CSV

_TOGETHER = re.compile(r"\(([^;()]+);([^;()]+)\)OVERLAP_F_B")
_SHARDS = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD)\d*")
_SENT = re.compile(rf"\d+({'|'.join(COMMUNICATION)})\d+")


def fields_of(line: str) -> list[str]:
    """Return the actions in a line of torch's CSV, as mpkit spells them; communication is left out.

    >>> fields_of("0UNSHARD,0F0,,(0F7;7B3)OVERLAP_F_B,0SEND_F1")
    ['0F0', '0F7&7B3']
    """
    try:
        (row,) = list(csv.reader([line], skipinitialspace=True)) or [[]]
    except csv.Error as error:
        raise ValueError(f"{line[:60]!r} is no line of a CSV: {error}") from None
    words = [_TOGETHER.sub(r"\1&\2", field.strip()) for field in row]
    return [word for word in words if word and not _SHARDS.fullmatch(word) and not _SENT.fullmatch(word)]


def lines_of(source: str | Path) -> tuple[list[str], str]:
    r"""Return the rows of a file of torch's, or of its text, as mpkit spells them, and a name for the schedule.

    Args:
        source: the path of a file, or several lines of text.

    Raises:
        OSError: there is no such file, or it cannot be read.
        ValueError: it is no text, or longer than any schedule.

    >>> lines_of("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    (['0F0 0F1 0B0 0B1', '1F0 1B0 1F1 1B1'], 'own')
    """
    is_text = isinstance(source, str) and "\n" in source
    text = str(source) if is_text else read_text(Path(source))
    lines = text.splitlines()
    while lines and not lines[-1].strip():
        lines.pop()
    return [" ".join(fields_of(line)) for line in lines], "own" if is_text else Path(source).stem


def text_of(rows: Iterable[Sequence[Action]], together: Collection[Action]) -> str:
    """Return rows of actions as torch's CSV of computation alone.

    >>> pair = [Action("F", 0, 0), Action("B", 0, 1)]
    >>> print(text_of([[*pair, Action("F", 0, 1)]], {pair[0]}), end="")
    (0F0;0B1)OVERLAP_F_B,0F1

    Args:
        rows: a row per rank.
        together: forwards that run together with the backward after them.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in rows:
        actions = iter(row)
        writer.writerow(
            f"({action};{next(actions)})OVERLAP_F_B" if action in together else str(action)
            for action in actions
        )
    return text.getvalue()


# ---- text, lists and functions

_HEAD = re.compile(r"\s*rank\s*\d+\s*[|:]\s*")  # as in a drawing
_IDLE = re.compile(r"[.-]+")
_STAGE = re.compile(r"(\d+)[A-Z]")


class Read(NamedTuple):
    """What was read; see `Schedule`."""

    rows: tuple[tuple[Action, ...], ...]
    stage_to_rank: tuple[int, ...]
    together: frozenset[Action]
    name: str


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


def read(source: Any, stage_to_rank: tuple[int, ...], name: str) -> Read:
    """Return the rows of actions that are given as text or as lists.

    Args:
        source: see `Schedule`. A drawing can be read back: its heads, dots and dashes are ignored. So can torch's CSV
            (`mpkit.plan.schedule.read`).
        stage_to_rank: the rank of each stage, if that is known.
        name: the name of the schedule.

    Raises:
        ValueError: the source is neither.
    """
    given = _lines(source)
    if given and all(isinstance(action, Action) for action in given):
        given = _split_by_rank(given, stage_to_rank)
    together: set[Action] = set()
    rows = tuple(
        tuple(
            _read_spelled(row, rank, stage_to_rank, together)
            if isinstance(row, str)
            else _read_listed(row, rank)
        )
        for rank, row in enumerate(given)
    )
    return Read(rows, _check_placement(stage_to_rank, rows) or holders(rows), frozenset(together), name)


def holders(rows: tuple[tuple[Action, ...], ...]) -> tuple[int, ...]:
    """Return, for each stage, the rank whose row names it most often: the first of several, and rank 0 if there is
    none.
    """
    times: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for rank, row in enumerate(rows):
        for stage, count in Counter([action.stage for action in row]).items():
            times[stage][rank] = count
    return tuple(
        max(times[s], key=times[s].__getitem__, default=0) for s in range(max(times, default=-1) + 1)
    )


def _check_placement(stage_to_rank: tuple[int, ...], rows: tuple[tuple[Action, ...], ...]) -> tuple[int, ...]:
    """Check that a placement covers all stages and names only existing ranks, and return it."""
    stages = 1 + max((action.stage for row in rows for action in row), default=-1)
    if stage_to_rank and (len(stage_to_rank) < stages or not {*stage_to_rank} <= {*range(len(rows))}):
        raise ValueError(
            f"stage_to_rank={stage_to_rank}: a rank for each stage, and the rows have {stages} stages on {len(rows)} "
            f"ranks. Left out, it follows from the rows: {holders(rows)}"
        )
    return stage_to_rank


def _lines(source: Any) -> list[Any]:
    if isinstance(source, str):
        return [line for line in source.splitlines() if line.strip()]
    if _iterates(source):
        return list(source)
    raise ValueError(
        f"{source!r} is no schedule. Give its rows, one per rank, such as ['F0 F1 B0 B1', 'F0 B0 F1 B1'], a list of "
        "Actions a rank, or a function of (p, m) that returns or yields such rows."
    )


def _split_by_rank(actions: Sequence[Action], stage_to_rank: tuple[int, ...]) -> list[Any]:
    """Split a list of actions in execution order by rank."""
    stages = 1 + max(action.stage for action in actions)
    rank_of = stage_to_rank if len(stage_to_rank) >= stages else range(stages)
    rows: list[list[Action]] = [[] for _ in range(1 + max(rank_of))]
    for action in actions:
        rows[rank_of[action.stage]].append(action)
    return rows


def _read_spelled(
    row: str, rank: int, stage_to_rank: tuple[int, ...], together: set[Action]
) -> Iterable[Action]:
    """Read a row of text. A stage that is not named is the only one that the rank holds, by default rank's number.

    If the row names several stages, each action has to name its stage.
    """
    row = _HEAD.sub("", row)
    if "," in row:
        row = " ".join(fields_of(row))
    stages = {stage for stage, holder in enumerate(stage_to_rank) if holder == rank}
    stages = stages or {int(stage[:9]) for stage in _STAGE.findall(row)}
    only = None if len(stages) > 1 else min(stages) if stage_to_rank and stages else rank
    for word in row.split():
        if _IDLE.fullmatch(word):
            continue
        *first, last = (_parse_action(part, rank, only, stages) for part in word.split("&"))
        if first:
            if len(first) > 1 or first[0].kind != "F" or last.kind not in ("B", "I"):
                raise ValueError(
                    f"{word!r:.60}: a forward runs together with one backward after it, as in 0F3&3B1"
                )
            together.add(first[0])
            yield first[0]
        yield last


def _parse_action(word: str, rank: int, only: int | None, stages: set[int]) -> Action:
    if only is None and not word[:1].isdigit() and word[:1].isalpha():
        some = " and ".join(map(str, sorted(stages)))
        raise ValueError(
            f"{word!r:.60}: of which stage? Rank {rank} holds stages {some}: {min(stages)}{word:.60}, say"
        )
    return Action.parse(word, only)


def _iterates(row: Any) -> bool:
    """Return whether it can be iterated over: a tensor without dimensions has `__iter__` too."""
    try:
        iter(row)
    except TypeError:
        return False
    return True


def _read_listed(row: Any, rank: int) -> Iterable[Action]:
    """Read a row that is a list: of Actions, of their spellings, or of (kind, stage, micro-batch)."""
    if not isinstance(row, list | tuple) and not _iterates(row):
        raise ValueError(
            f"Rank {rank}'s row is {row!r}; it is text, such as 'F0 B0', or a list of Actions, such as "
            f"[Action('F', {rank}, 0), Action('B', {rank}, 0)]"
        )
    actions: list[Any] = [*row]
    if {type(action) for action in actions} <= {Action}:  # all at once, for there may be thousands
        kinds, stages, microbatches = (
            (set(column) for column in zip(*actions, strict=True)) if actions else ((), (), ())
        )
        if {*kinds} <= {*COMPUTE, *COMMUNICATION} and min(0, *stages, *microbatches) == 0:
            return actions
    return _one_by_one(actions, rank)


def _one_by_one(row: list[Any], rank: int) -> Iterable[Action]:
    for action in row:
        if isinstance(action, str):
            yield Action.parse(action, rank)
            continue
        match action:
            case (str(kind), int(stage), int(m)) if kind in (*COMPUTE, *COMMUNICATION) and min(stage, m) >= 0:
                yield Action(kind, stage, m)
            case _:
                raise ValueError(
                    f"{action!r} in rank {rank}'s row is no action: an Action has one of the kinds "
                    f"{', '.join(COMPUTE)}, a stage and a micro-batch, both counted from 0: Action('F', {rank}, 0)"
                )
