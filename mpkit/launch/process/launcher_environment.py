"""What a program expects of its launcher: torchrun's environment variables, and a process group to join.

as_torchrun    the variables by which a program under torchrun knows its rank
join           `init_process_group` in the program joins the group that this rank is in already, and the groups that the
               program destroys end with the rank
"""

from __future__ import annotations

import os
from typing import Any

from mpkit.common.process_wide import Replacements
from mpkit.strategies.comm.release import keep

__all__ = ["OWN", "as_torchrun", "join"]

OWN = "mpkit-"
"""How TORCHELASTIC_RUN_ID begins in the ranks of a Cluster."""


def as_torchrun(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun sets for this rank of a run on one machine.

    Args:
        rank: this rank.
        ranks: the world size.
        port: a free port; nothing listens there unless the program opens a store of its own.

    >>> as_torchrun(1, 4, 29500)["LOCAL_RANK"]
    '1'
    """
    return {
        "RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "ROLE_RANK": f"{rank}",
        "WORLD_SIZE": f"{ranks}", "LOCAL_WORLD_SIZE": f"{ranks}", "ROLE_WORLD_SIZE": f"{ranks}",
        "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "NODE_RANK": "0", "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}",
        "TORCHELASTIC_RUN_ID": f"{OWN}{os.getppid()}", "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }  # fmt: skip


def join(rank: int, ranks: int, backend: str, store: Any) -> Replacements:
    """Let `init_process_group` join the group that exists, or make it anew once the program has destroyed it.

    Args:
        rank: this rank.
        ranks: the world size.
        backend: the backend of the group.
        store: where the ranks find each other.

    Returns:
        What was replaced, to be restored if the process outlives the rank.

    A destroyed group is kept, so that no DistributedDataParallel holds it last (`mpkit.strategies.comm.release`).
    """
    import torch.distributed as dist  # the launching process, which imports this module, may do without
    from torch.distributed import distributed_c10d

    from mpkit.common.torch_private import _world

    make, destroy = dist.init_process_group, dist.destroy_process_group
    times = 0

    def init_process_group(backend_asked: str | None = None, *args: Any, **kwargs: Any) -> None:
        nonlocal times
        asked = kwargs.pop("backend", backend_asked)
        if asked == "fake":  # ranks that are played on tensors without content: `mpkit.prediction.dry_run`
            return make(asked, *args, **kwargs)
        _check(asked, kwargs.get("rank", -1), kwargs.get("world_size", -1), rank, ranks, backend)
        if not dist.is_initialized():
            times += 1
            again = distributed_c10d.PrefixStore(f"again{times}", store)
            said = {name: kwargs[name] for name in ("timeout", "pg_options", "device_id") if name in kwargs}
            make(backend, store=again, rank=rank, world_size=ranks, **said)

    def destroy_process_group(group: Any = None) -> None:
        keep(_world.pg_map if group in (None, dist.group.WORLD) else [group])
        destroy(group)

    init_process_group.__doc__, destroy_process_group.__doc__ = make.__doc__, destroy.__doc__
    replaced = Replacements()
    for module in (dist, distributed_c10d):
        replaced.put(module, "init_process_group", init_process_group)
        replaced.put(module, "destroy_process_group", destroy_process_group)
    return replaced


def _check(asked: str | None, as_rank: int, of: int, rank: int, ranks: int, backend: str) -> None:
    """Check what a program asks of its process group.

    Raises:
        ValueError: this run has another backend, or another rank or world size.
    """
    if asked is not None and backend not in str(asked).lower():
        here = "are CPU processes, or share GPUs" if backend == "gloo" else "have a GPU each"
        raise ValueError(
            f'init_process_group(backend="{asked}"): the ranks of this run {here}, and {backend} joins them; leave the '
            f'backend out, or write init_process_group("{backend}")'
        )
    if as_rank not in (-1, rank) or of not in (-1, ranks):
        raise ValueError(
            f"init_process_group(rank={as_rank}, world_size={of}): this is rank {rank} of {ranks}; leave both out, or "
            'write rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])'
        )
