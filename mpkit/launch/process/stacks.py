"""Python stacks on request, which show where a rank is without disturbing it.

A signal would interrupt what the rank is blocked in (a system call of C code returns early), and so change what is
observed. So a thread of the rank waits for a request and writes the main thread's stack, or that of a backward for
which the main thread has made way. While C code holds Python's lock, that thread cannot run; it is then sent SIGUSR1,
which the other threads block, and the handler (faulthandler's) writes all stacks without the lock: no Python code runs
meanwhile.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import sysconfig
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from mpkit.common.launch_folder import part
from mpkit.common.private import create
from mpkit.common.tracebacks import fold_stack
from mpkit.launch.process.rank_processes import RankProcesses

__all__ = ["answer_requests", "ask_stacks", "end_answers", "place_of", "stack_of"]


BEGINNINGS = [(threading.__file__, name) for name in ("run", "_bootstrap_inner", "_bootstrap")]
"""Where a thread begins."""


# ---- on the rank ----------------------------------------------------------------------------------------------


def answer_requests(folder: Path, rank: int) -> int:
    """Start the thread that answers requests and return the file of stacks.

    The main thread calls this before any other thread is started.
    """
    stack = create(part(folder, rank, "stack"), os.O_WRONLY | os.O_APPEND)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    os.mkfifo(part(folder, rank, "ask"), 0o600)  # says that the handler is there
    asked = os.open(part(folder, rank, "ask"), os.O_RDWR)  # both ways, so that it never ends
    args = asked, stack, threading.get_ident()
    threading.Thread(target=_answer, args=args, name="mpkit-stacks", daemon=True).start()
    return stack


def _answer(asked: int, stack: int, main: int) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
    while os.read(asked, 1) == b"?":
        with contextlib.suppress(OSError):  # the disk may be full
            os.write(stack, f"{stack_of(main)}\n\n".encode("utf-8", "replace"))


def end_answers(folder: Path, rank: int, stack: int) -> None:
    """Answer no more requests: the rank is over, and its process goes on."""
    faulthandler.unregister(signal.SIGUSR1)
    with contextlib.suppress(OSError):  # the folder may be gone
        asked = os.open(part(folder, rank, "ask"), os.O_WRONLY | os.O_NONBLOCK)
        os.write(asked, b".")
        os.close(asked)
    os.close(stack)


def stack_of(thread: int) -> str:
    """Return the stack of one of this process's threads, most recent call first, as faulthandler writes it."""
    frame = sys._current_frames().get(thread)
    lines = ["Thread (most recent call first):"]
    while frame is not None and (frame.f_code.co_filename, frame.f_code.co_name) not in BEGINNINGS:
        code = frame.f_code
        lines.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}')
        frame = frame.f_back
    return "\n".join(lines)


# ---- in the launching process ---------------------------------------------------------------------------------


def _request_stack(folder: Path, rank: int) -> None:
    """Request a rank's stack."""
    with contextlib.suppress(OSError):  # the rank has not started yet, or has exited
        file = os.open(part(folder, rank, "ask"), os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(file, b"?")
        finally:
            os.close(file)


def _read_stack(folder: Path, rank: int, place: int = 0) -> str:
    """Return the main thread's stack that the rank wrote after byte `place` of its file; "" if there is none.

    If there are several stacks, the main thread's is the last.
    """
    try:
        data = part(folder, rank, "stack").read_bytes()[place:]
    except OSError:
        return ""
    blocks = data.decode("utf-8", "replace").strip().split("\n\n")
    return blocks[-1] if data.endswith(b"\n") else ""


STACKS_TAKE, STACKS_EVERY = 30, 0.02
"""Looks, and the seconds between two of them, that ranks are given to write their stacks, from their own thread and
then on a signal. A pause of the whole machine is one look."""


def ask_stacks(
    folder: Path, processes: RankProcesses, ranks: Sequence[int], handle_events: Callable[[float], bool]
) -> dict[int, str] | None:
    """Return the Python stacks of these ranks, "" for a rank that does not answer; None if the launch ends meanwhile.

    Args:
        folder: the launch's folder.
        processes: the ranks' processes.
        ranks: the ranks to ask.
        handle_events: handles events, such as exits of ranks, for some seconds; returns whether the launch goes on.
    """
    paths = {rank: part(folder, rank, "stack") for rank in ranks}
    ends = {rank: path.stat().st_size if path.exists() else 0 for rank, path in paths.items()}
    stacks = dict.fromkeys(ranks, "")
    stopped = processes.stopped_pids()
    for by_signal in (False, True):
        missing = [rank for rank in ranks if not stacks[rank] and rank not in stopped]
        for rank in missing:
            # Without the pipe a rank has no handler yet, and the signal would end it.
            if by_signal and processes.runs(rank) and part(folder, rank, "ask").exists():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(processes.pids[rank], signal.SIGUSR1)
            else:
                _request_stack(folder, rank)
        for _ in range(STACKS_TAKE):
            if not missing:
                break
            if not handle_events(STACKS_EVERY):
                return None
            stacks |= {rank: _read_stack(folder, rank, ends[rank]) for rank in missing}
            missing = [rank for rank in missing if not stacks[rank]]
    return stacks


def place_of(stack: str) -> str:
    r"""Return the innermost line of a stack in the user's own code, such as "train.py:94 in evaluate"; "" if none.

    >>> place_of('Thread 0x1 (most recent call first):\n  File "/home/ada/train.py", line 94 in evaluate')
    'train.py:94 in evaluate'
    """
    lines = [line for line in fold_stack(stack).splitlines() if line.startswith('  File "')]
    installed = [f'  File "{sysconfig.get_path(kind)}/' for kind in ("stdlib", "purelib", "platlib")]
    own = [line for line in lines if not line.startswith((*installed, '  File "<frozen'))]
    if not lines:
        return ""
    file, _, rest = (own or lines)[0].removeprefix('  File "').partition('", line ')
    number, _, function = rest.partition(" in ")
    return f"{os.path.basename(file)}:{number} in {function}"
