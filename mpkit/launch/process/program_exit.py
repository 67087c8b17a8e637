"""How a program ends on a rank: what Python would still do for it.

own_process    ends a child that the program has forked and that comes back into mpkit's code
finish         waits for what the program has left running, and calls what it registered with atexit
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

__all__ = ["finish", "own_process"]


@contextmanager
def own_process(end: Callable[[int], object] = os._exit) -> Iterator[None]:
    """Let only this process leave the context: a child that was forked within ends there, as a program does.

    Args:
        end: ends the child with a status.
    """
    parent, status = os.getpid(), 0
    try:
        yield
    except BaseException as error:
        if os.getpid() == parent:
            raise
        status = _status(error)
    if os.getpid() != parent:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        end(status)


def _status(error: BaseException) -> int:
    if not isinstance(error, SystemExit):
        traceback.print_exception(error)
        return 1
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1


def finish() -> None:
    """Do what Python does at the end of a program; nothing may start threads afterwards."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for all that are no daemons
    for child in multiprocessing.active_children():
        if not child.daemon:
            child.join()
    atexit._run_exitfuncs()
