"""Ask ranks for their Python stacks: first their own thread, then by a signal."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from mpkit.common.launch_folder import part
from mpkit.launch.process.rank_processes import RankProcesses
from mpkit.launch.process.stacks import read_stack, request_stack

__all__ = ["ask_stacks"]

STACKS_TAKE = 30
"""Looks, `LOOK_EVERY` seconds apart, that ranks are given to write their stacks, from their own thread and then on a
signal. A pause of the whole machine is one look."""

LOOK_EVERY = 0.02


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
                request_stack(folder, rank)
        for _ in range(STACKS_TAKE):
            if not missing:
                break
            if not handle_events(LOOK_EVERY):
                return None
            stacks |= {rank: read_stack(folder, rank, ends[rank]) for rank in missing}
            missing = [rank for rank in missing if not stacks[rank]]
    return stacks
