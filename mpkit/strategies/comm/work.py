"""Work: a communication in progress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mpkit.strategies.comm.call_checks import CheckedCall
from mpkit.trace import Kind
from mpkit.trace.record.recorder import Recorder

__all__ = ["Work"]


@dataclass
class Work:
    """A communication in progress. `wait` blocks until it is complete and returns its result.

    Until then it keeps the buffers alive that are being read or filled.
    """

    _record: Recorder
    _op: int
    _handle: Any
    _result: Callable[[], Tensor]
    _where: str
    _waiting: int = -1
    _call: CheckedCall | None = None
    _value: Tensor | None = None

    def wait(self) -> Tensor:
        """Block until the communication is complete; return its result (a receive's buffer, an all-reduce's tensor).

        Raises:
            CommMismatch: the data received belongs to a call that does not match this one.
        """
        if self._value is None:
            record, waiting = self._record, self._waiting
            if waiting < 0:
                waiting = record.begin(Kind.WAIT, ref=self._op, where=self._where)
            if self._handle is not None:
                self._handle.wait()
            if self._call is not None:
                self._call.compare()
            record.end(waiting)
            record.end(self._op)
            self._value = self._result()
        return self._value
