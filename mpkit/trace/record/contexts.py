"""Contexts of a rank: a step, a span, a place in the schedule."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from mpkit.trace import Kind

if TYPE_CHECKING:
    from mpkit.trace.record.recorder import Recorder


class Current(NamedTuple):
    """Where a rank is; a field is None if it does not apply."""

    step: int | None
    stage: int | None
    microbatch: int | None


class Step:
    """The context of one training step; see `Recorder.step`."""

    def __init__(self, recorder: Recorder, number: int) -> None:
        self._recorder, self._number = recorder, number

    def __enter__(self) -> None:
        self._recorder.begin_step(self._number)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self._recorder.end_step()


class RecordedSpan:
    """The context of a piece of a function; see `Recorder.span`."""

    def __init__(self, recorder: Recorder, name: str, flops: float, nbytes: int) -> None:
        self._recorder, self._name, self._flops, self._nbytes = recorder, name, flops, nbytes

    def __enter__(self) -> None:
        stage, microbatch, _ = self._recorder.place()
        self._index = self._recorder.begin(
            Kind.COMPUTE, self._name, stage=stage, microbatch=microbatch, flops=self._flops, nbytes=self._nbytes
        )  # fmt: skip

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self._recorder.end(self._index)
        else:
            self._recorder.drop(self._index)
