"""The process group of a launch's ranks: where they find each other, whom they trust, and how a program joins it.

store_of        a file in the launch's folder, which no other user can read or write
sign_objects    signatures on the objects that ranks send each other over gloo's ports
as_torchrun     the variables by which a program under torchrun knows its rank
join            `init_process_group` in the program joins the group that this rank is in already
"""

from __future__ import annotations

import hashlib
import hmac
import os
import pickle
import time
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d as c10d

from mpkit.common.launch_folder import OWN
from mpkit.common.process_wide import Replacements
from mpkit.common.torch_private import _world
from mpkit.errors import MpkitError
from mpkit.strategies.comm.release import keep

FIRST_PAUSE, LONGEST_PAUSE = 0.0002, 0.01
"""Seconds between two polls for a key of the store."""


def store_of(folder: Path, ranks: int, backend: str) -> Any:
    """Open the store of a run.

    Args:
        folder: the run's folder, of mode 0700.
        ranks: the number of ranks that share it.
        backend: "gloo", or "nccl", whose threads query without Python's lock and so need torch's own store.
    """
    store = FileStore(str(folder / "store"), ranks)
    return store if backend == "nccl" else RunStore(store)


class RunStore(Store):
    """A `FileStore` that polls for a missing key often at first; torch's own polls every 10 ms, at each rank's start.

    It waits without limit: the launcher reports hangs.
    """

    def __init__(self, file: FileStore) -> None:
        super().__init__()
        self._file = file

    def set(self, key: str, value: str) -> None:
        """Write `value` under `key`."""
        self._file.set(key, value)

    def get(self, key: str) -> bytes:
        """Wait until `key` has a value and return it."""
        self.wait([key])
        return bytes(self._file.get(key))

    def add(self, key: str, amount: int) -> int:
        """Add to the integer under `key`, 0 at first, and return the sum."""
        return int(self._file.add(key, amount))

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys have values."""
        return bool(self._file.check(keys))

    def delete_key(self, key: str) -> bool:
        """Delete `key` and return whether it had a value."""
        return bool(self._file.delete_key(key))

    def num_keys(self) -> int:
        """Return the number of keys that have values."""
        return int(self._file.num_keys())

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have values."""
        pause = FIRST_PAUSE
        while not self._file.check(keys):
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)


SIZE = hashlib.sha256().digest_size


def sign_objects(secret: bytes) -> None:
    """Let torch.distributed sign the objects that it pickles (HMAC-SHA256), and check those that it unpickles.

    Every user of the machine can connect to gloo's ports, and nothing is unpickled that no rank of this launch wrote.
    """

    class Pickler:
        def __init__(self, file: IO[bytes]) -> None:
            self._file = file

        def dump(self, value: Any) -> None:
            content = pickle.dumps(value)
            self._file.write(hmac.digest(secret, content, "sha256") + content)

    class Unpickler:
        def __init__(self, file: IO[bytes]) -> None:
            self._file = file

        def load(self) -> Any:
            signed = self._file.read()
            if not hmac.compare_digest(signed[:SIZE], hmac.digest(secret, signed[SIZE:], "sha256")):
                raise MpkitError(
                    "an object of torch.distributed: no process of this launch wrote this. Somebody else reaches the "
                    "ranks' connections (docs/security.md)"
                )
            return pickle.loads(signed[SIZE:])

    replaced = Replacements()  # for as long as the rank lives
    replaced.put(c10d, "_pickler", Pickler)
    replaced.put(c10d, "_unpickler", Unpickler)


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

    A destroyed group is kept, so that no DistributedDataParallel holds it last (`mpkit.strategies.comm.release`).

    Args:
        rank, ranks, backend: this rank, the world size and the backend of the group.
        store: where the ranks find each other.

    Returns:
        What was replaced, to be restored if the process outlives the rank.
    """
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
            said = {name: kwargs[name] for name in ("timeout", "pg_options", "device_id") if name in kwargs}
            make(backend, store=PrefixStore(f"again{times}", store), rank=rank, world_size=ranks, **said)

    def destroy_process_group(group: Any = None) -> None:
        keep(_world.pg_map if group in (None, dist.group.WORLD) else [group])
        destroy(group)

    init_process_group.__doc__, destroy_process_group.__doc__ = make.__doc__, destroy.__doc__
    replaced = Replacements()
    for module in (dist, c10d):
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
