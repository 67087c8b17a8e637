"""What a program expects of its launcher: torchrun's environment variables, and a process group to join.

as_torchrun    the variables by which a program under torchrun knows its rank
join           `init_process_group` in the program joins the group that this rank is in already
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from mpkit.support.replaced import Replaced

__all__ = ["join"]


def join(rank: int, ranks: int, backend: str, store: Any) -> None:
    """Let `init_process_group` join the group that exists, or make it anew once the program has destroyed it.

    Args:
        rank: this rank.
        ranks: the world size.
        backend: the backend of the group.
        store: where the ranks find each other.
    """
    make = dist.init_process_group
    times = 0

    def init_process_group(backend_asked: str | None = None, *args: Any, **kwargs: Any) -> None:
        nonlocal times
        asked = kwargs.pop("backend", backend_asked)
        if asked == "fake":  # ranks that are played on tensors without content: `mpkit.fake`
            return make(asked, *args, **kwargs)
        _check(asked, kwargs.get("rank", -1), kwargs.get("world_size", -1), rank, ranks, backend)
        if not dist.is_initialized():
            times += 1
            again = distributed_c10d.PrefixStore(f"again{times}", store)
            kept = {name: kwargs[name] for name in ("timeout", "pg_options", "device_id") if name in kwargs}
            make(backend, store=again, rank=rank, world_size=ranks, **kept)

    init_process_group.__doc__ = make.__doc__
    replaced = Replaced()  # for as long as the rank lives
    for module in (dist, distributed_c10d):
        replaced.put(module, "init_process_group", init_process_group)


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
