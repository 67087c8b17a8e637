"""This process as a rank: the communicator of the process group that it has joined.

Under `Cluster.run` a rank's communicator exists before the user's function is called, and is `note_group` here. Under
torchrun the user's program calls `torch.distributed.init_process_group`, and the communicator is made from that group:
communication works, and nothing is recorded.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from mpkit.strategies.comm.communicator import Communicator
from mpkit.strategies.comm.release import is_rank
from mpkit.strategies.comm.wire import Wire
from mpkit.trace.record.silent_recorder import SilentRecorder

_JOINED: WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, Communicator]] = WeakKeyDictionary()
"""By torch's default process group, which is the state of this process that these belong to."""


def note_group(comm: Communicator) -> None:
    """Note that this process has joined the default process group, whose communicator this is."""
    is_rank()
    _JOINED[_world()] = {comm.wire.device: comm}


def forget_group() -> None:
    """Forget what `note_group` noted: the process group stays, and the rank's recorder is closed."""
    _JOINED.pop(_world(), None)


def current_communicator(device: torch.device) -> Communicator:
    """Return the communicator of all ranks: that of `Cluster.run`, or one for the group that the program has made.

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
    by_device = _JOINED.setdefault(_world(), {})
    known = by_device.get(device) or next((c for c in by_device.values() if _is_recorded(c)), None)
    if known is None:
        known = by_device[device] = _communicator(device)
    return known


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


def _is_recorded(comm: Communicator) -> bool:
    return not isinstance(comm.wire.record, SilentRecorder)


def _communicator(device: torch.device) -> Communicator:
    """Return a communicator for torch's default process group, without a record."""
    is_rank()
    backend = _world()._get_backend(device).name()  # "undefined" if it was not asked for by name
    return Communicator(Wire(dist.get_rank(), dist.get_world_size(), SilentRecorder(), device, backend))
