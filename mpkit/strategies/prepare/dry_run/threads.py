"""Running a user's model on fewer threads than torch would use.

A thread of torch that waits for the others spins: it keeps its core busy. If another process needs that core, as the
fork server does while it imports torch, or a rank, the threads wait for each other for several times as long as one
thread would compute.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from mpkit.common.process_wide import LOCK

__all__ = ["on_threads"]


@contextlib.contextmanager
def on_threads(number: int) -> Iterator[None]:
    """Let torch compute on this many threads inside the context, but on no more than it would anyway, and at least one.

    >>> with on_threads(1):
    ...     torch.get_num_threads()
    1
    """
    with LOCK:
        before = torch.get_num_threads()
        number = max(1, min(number, before))
        if number == before:
            yield
            return
        torch.set_num_threads(number)
        try:
            yield
        finally:
            torch.set_num_threads(before)
