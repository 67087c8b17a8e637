"""State of the whole process that mpkit changes for a moment: one thread at a time, and output of one thread only.

Random states, warnings' filters, torch's threads and sys.stdout belong to the process. Two threads that change and
restore them at once would restore each other's changes, for good. So code that does that holds `LOCK`. `Replacements`
replace attributes of other modules and classes for a while. And: the cores that this process may use, and closing its
memory to other processes of the same user.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


class Replacements:
    """Replaced attributes, to be restored in the reverse order.

    >>> import math
    >>> replaced = Replacements()
    >>> replaced.put(math, "pi", 3)
    >>> math.pi
    3
    >>> replaced.restore()
    >>> math.pi > 3
    True
    """

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Replace the attribute `name` of `owner`, a module or a class, by `value`."""
        self._before.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def restore(self) -> None:
        """Put everything back."""
        while self._before:
            setattr(*self._before.pop())


LOCK = threading.RLock()

_LAST: deque[_StreamBeforeThread] = deque(maxlen=16)
"""The last streams that were `sys.stdout`, kept alive and used again: `print` holds no reference to the one that it
writes to, and crashes the process where another thread frees it meanwhile (python/cpython#130163)."""


@contextmanager
def silent() -> Iterator[None]:
    """Drop the output and warnings of this thread and of threads that it starts, inside the block."""
    before = sys.stdout
    while isinstance(before, _StreamBeforeThread) and before.has_ended:  # somebody has put it back since
        before = before.stream
    ended = (each for each in _LAST if each.stream is before and each.has_ended)
    if (filtered := next(ended, None)) is None:
        _LAST.append(filtered := _StreamBeforeThread(before))
    filtered.begin()
    sys.stdout = filtered
    show = warnings.showwarning

    def show_others(*args: Any, **kwargs: Any) -> None:
        if filtered.is_loud:
            show(*args, **kwargs)

    warnings.showwarning = show_others
    try:
        yield
    finally:
        filtered.end()
        if warnings.showwarning is show_others:
            warnings.showwarning = show
        if sys.stdout is filtered:
            sys.stdout = before


class _StreamBeforeThread:
    """A stream that passes on the output of threads that ran when it began, but for the one that began it."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self._loud: set[int | None] | None = None

    def begin(self) -> None:
        """Let only threads through that run now, and not this one."""
        self._loud = {each.ident for each in threading.enumerate()} - {threading.get_ident()}

    @property
    def has_ended(self) -> bool:
        """Whether everything is let through."""
        return self._loud is None

    def end(self) -> None:
        """Let everything through: somebody may have kept this stream."""
        self._loud = None

    @property
    def is_loud(self) -> bool:
        """Whether this thread is heard."""
        return self._loud is None or threading.get_ident() in self._loud

    def write(self, text: str) -> int:
        if self.is_loud:
            self.stream.write(text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def cores() -> int:
    """Return the number of cores that this process may run on, which containers and `taskset` limit."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def make_undumpable() -> None:
    """Close this process's memory and open files to other processes of this user, and to children (Linux only).

    Otherwise any process of the same user may open `/proc/PID/mem` and `/proc/PID/fd`; root still may. Children inherit
    this until they call exec. The process writes no core dump.
    """
    if sys.platform == "linux":
        pr_set_dumpable = 4
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_dumpable, 0, 0, 0, 0)
