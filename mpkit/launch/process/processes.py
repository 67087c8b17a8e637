"""The ranks' processes as the launching process knows them: ids, exits, signals, CPU time, and where each one is.

The launching process asks a rank for its Python stack with SIGUSR1: faulthandler writes it into the launch's folder
without Python's lock, also while C code holds it. Python (PEP 475) or the system (SA_RESTART) repeats whatever the
signal interrupts. Only the main thread's stack is written: other threads go on meanwhile, and to read a stack that
changes can crash the process.
"""

import faulthandler
import os
import signal
import sys
import sysconfig
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from mpkit.common.disk import create
from mpkit.common.launch_folder import part
from mpkit.common.tracebacks import fold_stack

STACKS_TAKE, STACKS_EVERY = 30, 0.02
"""Looks that ranks get to write their stacks, and seconds between two. A pause of the whole machine is one look."""


@dataclass
class RankProcesses:
    """The processes of one launch, which the fork server starts and reaps."""

    pids: list[int] = field(default_factory=list)  # by rank; empty until the ranks are started
    statuses: dict[int, int] = field(default_factory=dict)  # by rank, as they ended; -9: by signal 9
    _cpu: dict[tuple[int, bool], float] = field(default_factory=dict)

    def stopped_pids(self) -> dict[int, int]:
        """Return the process ids, by rank, of the ranks stopped by SIGSTOP."""
        return {rank: pid for rank, pid in enumerate(self.pids) if is_stopped(pid)}

    def running_ranks(self, waiting: Collection[int] = ()) -> set[int]:
        """Return the ranks that the system reports as runnable, or that used CPU time since the last call.

        `waiting` ranks wait for others in a recorded call, or have finished. Of these only the main thread counts:
        gloo's own thread can spin for ever on a connection whose other end is gone.
        """
        running = set()
        for rank, pid in enumerate(self.pids):
            key = rank, rank in waiting
            if self.runs(rank) and (vitals := vitals_of(pid, main_thread=key[1])) is not None:
                state, cpu = vitals
                if state == "R" or cpu > self._cpu.get(key, cpu):
                    running.add(rank)
                self._cpu[key] = cpu
        return running

    def runs(self, rank: int) -> bool:
        """Return whether a rank has been started and has not exited."""
        return rank < len(self.pids) and rank not in self.statuses

    def kill(self) -> None:
        """Kill those that have not exited, and what they have started, without the fork server's help."""
        living = [pid for rank, pid in enumerate(self.pids) if self.runs(rank)]
        with suppress(ProcessLookupError, PermissionError):
            if living:
                os.killpg(self.pids[0], signal.SIGKILL)
        for pid in living:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def vitals_of(pid: int, main_thread: bool = False) -> tuple[str, float] | None:
    """Return the letter of a process's state and the CPU seconds that it, or on Linux its main thread, has used.

    The letter is that of /proc/PID/stat: "R" on a core or in the queue for one, "T" or "t" stopped by SIGSTOP or a
    debugger. None: it has exited, or the system does not report it.
    """
    if sys.platform != "linux":
        return _ask_psutil(pid)
    try:
        with open(f"/proc/{pid}/task/{pid}/stat" if main_thread else f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def is_stopped(pid: int) -> bool:
    """Return whether the process is stopped by SIGSTOP or a debugger; False where the system does not report it."""
    vitals = vitals_of(pid)
    return vitals is not None and vitals[0] in ("T", "t")


def cpu_seconds(pid: int) -> float | None:
    """Return the CPU seconds used by all threads of the process; None where the system does not report it."""
    vitals = vitals_of(pid)
    return None if vitals is None else vitals[1]


def _ask_psutil(pid: int) -> tuple[str, float] | None:
    """Return the same on other systems, if psutil is there. Never "R": macOS says so of processes that sleep."""
    with suppress(ImportError):
        import psutil

        with suppress(psutil.Error):
            process = psutil.Process(pid)
            times = process.cpu_times()
            return "T" if process.status() == psutil.STATUS_STOPPED else "", times.user + times.system
    return None


def answer_requests(folder: Path, rank: int) -> int:
    """Let this process, which is a rank, write its main thread's stack on request; return its file's descriptor."""
    stack = create(part(folder, rank, "stack"), os.O_WRONLY | os.O_APPEND)
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
    return stack


def end_answers(folder: Path, rank: int, stack: int) -> None:
    """Answer no more requests: the rank is over, and its process goes on."""
    part(folder, rank, "stack").unlink(missing_ok=True)  # nobody asks who has no such file
    faulthandler.unregister(signal.SIGUSR1)
    os.close(stack)


def ask_stacks(
    folder: Path, processes: RankProcesses, ranks: Sequence[int], poll: Callable[[float], bool]
) -> dict[int, str] | None:
    """Return the Python stacks of these ranks, "" for a rank that does not answer; None if the launch ends meanwhile.

    `poll` handles events, such as exits of ranks, for some seconds, and returns whether the launch is over.
    """
    stacks, stopped = dict.fromkeys(ranks, ""), processes.stopped_pids()
    ends = {}
    for rank in ranks:
        path = part(folder, rank, "stack")  # made with the handler: without it, the signal kills
        if processes.runs(rank) and rank not in stopped and path.exists():
            ends[rank] = path.stat().st_size
            with suppress(ProcessLookupError):
                os.kill(processes.pids[rank], signal.SIGUSR1)
    for _ in range(STACKS_TAKE):
        if not (missing := [rank for rank in ends if not stacks[rank]]):
            break
        if poll(STACKS_EVERY):
            return None
        stacks |= {rank: _read_stack(part(folder, rank, "stack"), ends[rank]) for rank in missing}
    return stacks


def _read_stack(path: Path, begin: int) -> str:
    """Return the latest stack after byte `begin`; "" if it is not complete yet."""
    try:
        text = path.read_bytes()[begin:].decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
    _, head, frames = text.rpartition("Stack (most recent call first):\n")
    return head + frames.rstrip() if text.endswith("\n") else ""


def place_of(stack: str) -> str:
    r"""Return the innermost line of a stack in the user's own code, such as "train.py:94 in evaluate"; "" if none.

    >>> place_of('Stack (most recent call first):\n  File "/home/ada/train.py", line 94 in evaluate')
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
