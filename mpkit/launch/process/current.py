"""This process as a rank: the context of the process group that it has joined.

Under `Cluster.run` a rank's context exists before the user's function is called, and is `joined` here. Under torchrun
the user's program calls `torch.distributed.init_process_group`, and the context is made from that group: communication
works, and nothing is recorded.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from mpkit.comm.communicator import Communicator
from mpkit.comm.wire import Wire
from mpkit.launch.process.context import Context
from mpkit.record.silent import SilentRecorder

__all__ = ["current_context", "joined"]

_CONTEXTS: WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, Context]] = WeakKeyDictionary()
"""By torch's default process group, which is the state of this process that these contexts belong to."""


def joined(context: Context) -> None:
    """Note that this process has joined the default process group as the rank that the context describes."""
    _CONTEXTS[_world()] = {context.device: context}


def current_context(device: torch.device) -> Context:
    """Return this rank's context: that of `Cluster.run`, or one for the process group that the program has made.

    Args:
        device: where this rank's tensors are, where the program has made the process group.

    Raises:
        ValueError: there is no process group.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "There is no process group, so this process is no rank, and has nobody to work with. In a notebook: "
            "mk.Cluster(ranks=2).run(fn) calls fn(ctx) on each rank, and this call belongs into fn. In a script that "
            "torchrun starts: torch.distributed.init_process_group() comes first."
        )
    contexts = _CONTEXTS.setdefault(_world(), {})
    known = contexts.get(device) or next((c for c in contexts.values() if _is_recorded(c)), None)
    if known is None:
        known = contexts[device] = _context(device)
    return known


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


def _is_recorded(context: Context) -> bool:
    return not isinstance(context.record, SilentRecorder)


def _context(device: torch.device) -> Context:
    """Return a context for torch's default process group, without a record."""
    record, rank, ranks = SilentRecorder(), dist.get_rank(), dist.get_world_size()
    backend = _world()._get_backend(device).name()  # "undefined" if it was not asked for by name
    comm = Communicator(Wire(rank, ranks, record, device, backend))
    return Context(rank, ranks, device, comm, record)
