"""A program beside serial training, step by step, to find where losses and weights begin to differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mpkit.common.display import data_frame
from mpkit.common.tracebacks import public
from mpkit.course.framework.exercise import Case
from mpkit.course.framework.kinds import OnRanks
from mpkit.course.framework.serial import Outcome
from mpkit.errors import Deadlock, RankFailed

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, repr=False)
class BesideSerial:
    """A comparison with serial training, printed and shown as a table without cutting anything off.

    Attributes:
        frame: the table, with one row per step.
    """

    frame: pd.DataFrame

    def __str__(self) -> str:
        return str(self.frame.to_string())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        import pandas as pd

        with pd.option_context("display.max_colwidth", None):
            return str(self.frame.to_html())


@public
def beside_serial(name: str, answer: Any = None) -> BesideSerial:
    """Compare an answer's training with serial training, on real ranks, one row per step.

    A row has serial training's loss, the answer's loss on each rank, and the weights that are no longer equal. Of
    these it also says how far they have moved since the beginning, as a multiple of how far they should have. The
    inputs are not those of the check.

    Args:
        name: the name of the exercise; its results are `Outcome`s, and its cases have the size "steps".
        answer: the student's function.

    >>> import mpkit as mk
    >>> mk.beside_serial("the-loader")
    Traceback (most recent call last):
    ValueError: beside_serial('the-loader', None): give your function too: mk.beside_serial('the-loader', train)

    Raises:
        ValueError: There is no such exercise, it trains nothing, or there is no answer.
        RankFailed: The answer raised an error.
        Deadlock: The answer hangs.
    """
    from mpkit.course.catalogue import find
    from mpkit.course.framework.room import PackedAnswer, shared_room

    exercise = find(name).exercise
    if not isinstance(exercise, OnRanks) or "steps" not in exercise.cases[0].sizes:
        raise ValueError(
            f"beside_serial({name!r}, ...): that exercise trains nothing; mk.check({name!r}, answer) says what is "
            "wrong. Exercises of the silent-bug lab can be compared, such as mk.beside_serial('the-loader', train)"
        )
    if not callable(answer):
        raise ValueError(
            f"beside_serial({name!r}, {answer!r}): give your function too: mk.beside_serial({name!r}, train)"
        )
    case = replace(exercise.cases[0], seed=0)
    packed, begin = PackedAnswer.pack(answer), exercise.expected(_limit_steps(case, 0))
    rows = []
    for step in range(case["steps"]):
        # Each row trains from the beginning: the weights after a step are those that the answer leaves behind.
        seen = shared_room().play(exercise.play, packed, _limit_steps(case, step + 1))
        if seen.hang:
            raise Deadlock(seen.hang)
        if seen.got is None:
            raise RankFailed(seen.error + (f" ({seen.where})" if seen.where else ""))
        expected = exercise.expected(seen.case)
        errors = _largest_errors(begin, expected, seen.got)
        rows.append({
            "step": step,
            "loss, serial": _last_loss(expected[0]),
            **{f"loss, rank {rank}": _last_loss(one) for rank, one in enumerate(seen.got)},
            "weights that differ after it, by": ", ".join(f"{name} {off:.0e}" for name, (off, _) in errors.items())
            or "none",
            "they moved, × serial's": ", ".join(f"{moved:.2f}" for _, moved in errors.values()),
        })  # fmt: skip
    return BesideSerial(data_frame(rows).set_index("step"))


def _limit_steps(case: Case, steps: int) -> Case:
    return replace(case, sizes={**case.sizes, "steps": steps})


def _last_loss(outcome: Outcome) -> str:
    return f"{float(outcome['losses'][-1]):.5f}"


def _largest_errors(
    begin: Sequence[Outcome], expected: Sequence[Outcome], got: Sequence[Outcome]
) -> dict[str, tuple[float, float]]:
    """Return, by name, the largest error of each wrong weight, and how far it moved relative to serial training."""
    errors: dict[str, tuple[float, float]] = {}
    for first, right, mine in zip(begin, expected, got, strict=True):
        for name, tensor in right["weights"].items():
            start, now = first["weights"][name], mine["weights"][name]
            off = float((tensor - now).abs().max())
            if not off < 1e-6 and off > errors.get(name, (0.0, 0.0))[0]:
                errors[name] = off, float((now - start).norm() / (tensor - start).norm())
    return errors
