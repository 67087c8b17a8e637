"""The end of a rank's process: its process groups are freed while the interpreter is whole.

A thread of gloo drops a communication shortly after the program has seen it complete, and needs Python's lock for that,
because Python knows the tensors. Freeing a group waits for its threads. If a group still exists when the interpreter
shuts down, a thread may ask for the lock too late, and the process aborts ("terminate called without an active
exception") after a correct training. These hold a group that the program has destroyed:

    mpkit    communicators, and the meshes that they come from
    torch    functions that were defined while the group existed and have it as a default argument; an optimizer's first
             step imports `torch.distributed.nn.functional`
    DDP      frees it under Python's lock, and so waits for a thread that waits for the lock: such groups are kept
             (`keep`) until the DDP is gone
"""

from __future__ import annotations

import gc
import os
import sys
from types import FunctionType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.distributed import ProcessGroup


_kept: list[ProcessGroup] = []
_rank_process = 0  # the id of the process that is a rank; processes forked from it are none


def is_rank() -> None:
    """Note that this process is a rank, whose groups `free_groups` frees."""
    global _rank_process
    _rank_process = os.getpid()


def keep(groups: Iterable[ProcessGroup]) -> None:
    """Keep groups that the program destroys until `free_kept`."""
    _kept.extend(groups)


def free_kept() -> None:
    """Free the kept groups, after any DistributedDataParallel that the program has dropped."""
    if _kept:
        gc.collect()
        _kept.clear()


def free_groups() -> None:
    """Free all process groups of a rank; mpkit registers this with `atexit` when it is imported."""
    if _rank_process != os.getpid() or getattr(sys, "last_value", None) is not None:
        return  # after an error, communications may never complete
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from mpkit.strategies.comm.communicator import Communicator

    gc.collect()
    _kept.clear()
    if dist.is_initialized():
        dist.destroy_process_group()
    for each in gc.get_objects():
        kind: Any = type(each)
        if kind is Communicator:
            each.handle = None
        elif kind is DeviceMesh:
            each._pg_registry.clear()
        elif kind is FunctionType and each.__defaults__:
            each.__defaults__ = tuple(
                None if isinstance(value, dist.ProcessGroup) else value for value in each.__defaults__
            )
