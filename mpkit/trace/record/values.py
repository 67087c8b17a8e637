"""Values that a function on a rank logs: numbers of its own, by name and step."""

import struct
import time
from collections import Counter
from pathlib import Path
from typing import Any

from mpkit.trace import VALUE
from mpkit.trace.attention_work import ATTENDED
from mpkit.trace.expert_load import ROWS
from mpkit.trace.record.files import NameFile, RecordFile

_PACK = struct.Struct("<qiIdB7x").pack
_METRIC, _STOP = 0, 1


class Values:
    """The values that one rank logs; the first one makes their file."""

    def __init__(self, folder: Path, rank: int, names: NameFile) -> None:
        self._path, self._names = folder / f"rank{rank}.log", names
        self._file: RecordFile | None = None
        self._counts: Counter[str] = Counter()  # of values logged outside of any step, by name
        self._closed = False

    def log(self, name: Any, value: Any, step: int | None) -> None:
        """Log a number, or a tensor of one element, for a step; None: the one after the latest of this name, from 0."""
        number = _number(name, value)
        if step is None or step < 0:
            step = self._counts[name]
        self._counts[name] = step + 1
        self._write(name, number, step, _METRIC)

    def stop(self, reason: str, step: int) -> None:
        """Note that this rank asked to end the training after a step."""
        self._write(reason, float("nan"), step, _STOP)

    def count_rows(self, expert: str, rows: int, step: int) -> None:
        """Note the rows of this rank's tokens that an expert got in a step; see `mpkit.trace.expert_load`."""
        self._write(expert, rows, step, ROWS)

    def count_attended(self, pairs: int, step: int) -> None:
        """Note the pairs of a query and a key that this rank computed in a step; see `mpkit.trace.attention_work`."""
        self._write("attention", pairs, step, ATTENDED)

    def _write(self, name: str, value: float, step: int, kind: int) -> None:
        if self._closed:
            return
        if self._file is None:
            self._file = RecordFile(self._path, "log", VALUE.itemsize, capacity=256)
        self._file.append(_PACK(time.monotonic_ns(), step, self._names[name], value, kind))

    def close(self, state: int) -> None:
        """Log nothing more."""
        self._closed = True
        if self._file is not None:
            self._file.close(state)


def _number(name: Any, value: Any) -> float:
    if not isinstance(name, str) or not name.strip():
        raise ValueError(
            f'log(name, value): the name is {name!r:.80}; a word is wanted: ctx.log("accuracy", 0.5)'
        )
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        shape = getattr(value, "shape", None)
        what = f"of shape {list(shape)}" if shape is not None else repr(value)[:80]
        raise ValueError(
            f"log({name!r}, value): the value is a {type(value).__name__} {what}; one number is wanted: a float, or a "
            f"tensor of one element, such as ctx.log({name!r}, value.mean())"
        ) from None
