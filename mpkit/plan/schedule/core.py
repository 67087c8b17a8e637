"""Schedule: a row of actions for each rank, and what an action needs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpkit.common.disk import write_whole
from mpkit.common.tracebacks import public
from mpkit.plan.schedule.action import Action, live
from mpkit.plan.schedule.play import Order, needs_of, order_of
from mpkit.plan.schedule.read import Row, as_list, call_source, holders, read_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpkit.plan.schedule.read import Source

__all__ = ["Schedule"]


@public
@dataclass(frozen=True, init=False, repr=False)
class Schedule:
    """The actions of each rank, in program order.

    Attributes:
        rows: one row of actions per rank.
        name: the name of the schedule.
        stage_to_rank: the rank that holds each stage; if left out, the rank whose row names the stage.
        together: forwards that run as one with the backward that follows them in their row (DualPipe's F & B):
            the results of both are sent when both are done. Ranks of mpkit run them one after the other; elsewhere
            each computes while the other's tokens travel.

    A Schedule is made from one of these (see `mpkit.plan.schedule.read`):

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
        self,
        rows: Source,
        name: str = "",
        stage_to_rank: Sequence[int] = (),
        together: Iterable[Action] = (),
        *,
        p: int | None = None,
        m: int | None = None,
    ) -> None:
        given, called_as = call_source(rows, p, m)
        if isinstance(given, Schedule):
            parsed, pairs, called_as = given.rows, {*given.together}, given.name
            stage_to_rank = stage_to_rank or given.stage_to_rank
        else:
            parsed, pairs = read_rows(given, as_list(stage_to_rank) or [])
        found = holders(parsed)
        held = as_list(stage_to_rank or found)
        if held is None or len(held) < len(found) or not all(rank in range(len(parsed)) for rank in held):
            raise ValueError(
                f"stage_to_rank={stage_to_rank}: a rank for each stage, and the rows have {len(found)} stages on "
                f"{len(parsed)} ranks. Left out, it follows from the rows: {found}"
            )
        object.__setattr__(self, "rows", parsed)
        object.__setattr__(self, "name", name or called_as)
        object.__setattr__(self, "stage_to_rank", tuple(held))
        object.__setattr__(self, "together", frozenset({*pairs, *together}))

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

    def validate(
        self,
        *,
        max_live: float | Sequence[float] | None = None,
        activation: float | Sequence[float] = 1,
    ) -> Schedule:
        """Return the schedule itself, if it can run, and within a cap on memory; see `mpkit.plan.schedule.validate`.

        Args:
            max_live: the most activations that a rank may hold at once: one number, or one per rank.
            activation: how much a stage holds per micro-batch, in the same unit: one number, or one per stage.

        Raises:
            ValueError: it cannot run; the message says why and draws the schedule, with an arrow at the action.
        """
        from mpkit.plan.schedule.validate import validate

        validate(self, max_live=max_live, activation=activation)
        return self

    def spelled(self) -> list[str]:
        """Return the rows as text, from which the same schedule can be made again.

        >>> Schedule(["F0&B1", "F0"]).spelled()
        ['0F0&0B1', '1F0']
        """
        return [
            "".join(f"{action}{'&' if action in self.together else ' '}" for action in row).rstrip()
            for row in self.rows
        ]

    def to_csv(self, path: str | Path | None = None) -> str:
        """Return the schedule as torch's CSV of computation alone; write it to `path` as well if that is given.

        torch.distributed.pipelining loads it (`_load_csv`), and torchtitan (`pipeline_parallel_schedule_csv`).

        >>> print(Schedule(["F0 F1&B0 B1"]).to_csv(), end="")
        0F0,(0F1;0B0)OVERLAP_F_B,0B1
        """
        rows = [
            re.sub(r"(\w+)&(\w+)", r"(\1;\2)OVERLAP_F_B", row).replace(" ", ",") for row in self.spelled()
        ]
        text = "".join(f"{row}\n" for row in rows)
        if path is not None:
            write_whole(Path(path), text.encode())
        return text

    def __contains__(self, action: object) -> bool:
        return action in self._actions

    def __str__(self) -> str:
        from mpkit.plan.schedule.play import draw

        return draw(self)

    def __repr__(self) -> str:
        named = "" if self.name == "own" else f", name={self.name!r}"
        held = "" if self.stage_to_rank == holders(self.rows) else f", stage_to_rank={self.stage_to_rank}"
        return f"Schedule({self.spelled()}{named}{held})"

    def __reduce__(self) -> Any:
        return Schedule, (self.rows, self.name, self.stage_to_rank, self.together)
