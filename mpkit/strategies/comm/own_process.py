"""This process as a rank: the communicator of the process group that it has joined.

`Cluster.run` creates a rank's communicator before it calls the user's function, and notes it here. Under torchrun the
user's program calls `torch.distributed.init_process_group`; a communicator for that group records nothing.
"""

from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from mpkit.strategies.comm.communicator import Communicator
from mpkit.strategies.comm.release import is_rank
from mpkit.strategies.comm.wire import Wire
from mpkit.trace.record.silent_recorder import SilentRecorder

# By torch's default process group, of which a process may have one after the other.
_JOINED: WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, Communicator]] = WeakKeyDictionary()


def note_group(comm: Communicator) -> None:
    """Note the communicator of the default process group, which this process has joined."""
    is_rank()
    _JOINED[_world()] = {comm.wire.device: comm}


def forget_group() -> None:
    """Forget what `note_group` noted: the process group stays, and the rank's recorder is closed."""
    _JOINED.pop(_world(), None)


def current_communicator(device: torch.device) -> Communicator:
    """Return the communicator of all ranks: that of `Cluster.run`, or one for the program's own process group.

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
    recorded = (comm for comm in by_device.values() if not isinstance(comm.wire.record, SilentRecorder))
    known = by_device.get(device) or next(recorded, None)
    if known is None:
        is_rank()
        backend = _world()._get_backend(device).name()  # "undefined" if it was not asked for by name
        wire = Wire(dist.get_rank(), dist.get_world_size(), SilentRecorder(), device, backend)
        known = by_device[device] = Communicator(wire)
    return known


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world
