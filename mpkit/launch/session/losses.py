"""Losses: the losses of a run so far, a list that says when it is not complete yet."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, SupportsIndex, overload

__all__ = ["Losses"]


class Losses(list[float]):
    """The loss of each finished step.

    It is a list like any other, except that while its run goes on, its `repr` and the IndexError of a step that is not
    done yet say so.

    >>> so_far = Losses([0.5], "1 of 20 steps are done and the run goes on; run.wait() waits for its end")
    >>> so_far == [0.5]
    True
    >>> so_far
    [0.5]  # 1 of 20 steps are done and the run goes on; run.wait() waits for its end
    >>> so_far[7]
    Traceback (most recent call last):
    IndexError: there is no loss number 7: 1 of 20 steps are done and the run goes on; run.wait() waits for its end

    Args:
        values: the losses.
        why: why there are no more losses yet; "" if there will be none.
    """

    def __init__(self, values: Iterable[float] = (), why: str = "") -> None:
        super().__init__(values)
        self.why = why

    @overload
    def __getitem__(self, which: SupportsIndex, /) -> float: ...
    @overload
    def __getitem__(self, which: slice, /) -> list[float]: ...
    def __getitem__(self, which: Any, /) -> Any:
        """Return one loss, or a list of some."""
        try:
            return super().__getitem__(which)
        except IndexError:
            if not self.why:
                raise
            raise IndexError(f"there is no loss number {which}: {self.why}") from None

    def __repr__(self) -> str:
        return super().__repr__() + (f"  # {self.why}" if self.why else "")
