"""The store through which processes on several machines find each other, and the network interface that they use.

torchrun's agent serves a store already. Under srun and mpirun, rank 0 serves one at MASTER_ADDR:MASTER_PORT, and
listens at that address only. gloo and nccl get the interface that leads to MASTER_ADDR, unless the user names one.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
import time
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from mpkit.common.torch_private import _get_default_store
from mpkit.errors import MpkitError
from mpkit.launch.external.environment import LauncherPlace
from mpkit.launch.external.signed_store import SignedStore
from mpkit.launch.process.seal import Seal

__all__ = ["clone", "interface_to", "rendezvous", "use_interface_to", "wait_for"]

COMING = 300.0
"""Seconds within which all processes have to come."""

FIRST_PAUSE, LONGEST_PAUSE = 0.0005, 0.02
"""Seconds between two looks for somebody's key."""


def rendezvous(place: LauncherPlace) -> SignedStore:
    """Return a store that all processes of the launcher share, with a connection of its own, unsigned as yet.

    Each call returns a new part of the store, the same on all processes for their first call, second call, and so on.

    Raises:
        MpkitError: nothing answers at the launcher's address.
    """
    if dist.is_initialized():
        store = clone(_get_default_store())
    else:
        store = _connect(place)
    ours = PrefixStore(f"mpkit/{place.attempt}", store)
    number = ours.add(f"clusters{place.rank}", 1)
    return SignedStore(store, Seal(None), f"mpkit/{place.attempt}/{number}")


def clone(store: Store) -> Store:
    """Return the same store with a connection of its own: a thread that waits would block the others on one."""
    copy: Store = store.clone()  # type: ignore[attr-defined]
    return copy


def _connect(place: LauncherPlace) -> TCPStore:
    listening, where = None, f"{place.address}:{place.port}"
    if place.rank == 0 and not place.agent_store:
        listening = _listen(place)
    try:
        return TCPStore(
            place.address,
            place.port,
            place.world_size,
            listening is not None,
            timeout=timedelta(seconds=COMING),
            wait_for_workers=False,
            master_listen_fd=None if listening is None else listening.detach(),
        )
    except dist.DistError as error:
        raise MpkitError(
            f"rank {place.rank} on {place.host} finds nobody at MASTER_ADDR:MASTER_PORT = {where} "
            f"({str(error).splitlines()[0][:200]}). Does rank 0 run there, and can this host reach it? "
            f"`ping {place.address}` and `nc -vz {place.address} {place.port}` tell"
        ) from None


def _listen(place: LauncherPlace) -> socket.socket | None:
    """Listen at the launcher's address; None if this process already does, for an earlier cluster."""
    kind, _, _, _, address = socket.getaddrinfo(place.address, place.port, type=socket.SOCK_STREAM)[0]
    listening = socket.socket(kind, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(address)
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise MpkitError(
            f"rank 0 runs on {place.host}, and MASTER_ADDR={place.address} is no address of that host "
            f"({error.strerror}): MASTER_ADDR is to be the name or address of the node of rank 0"
        ) from None
    listening.listen(2 * place.world_size)
    return listening


def wait_for(
    store: Store,
    keys: Sequence[str],
    who: Sequence[str],
    left: Callable[[], Collection[int]] = tuple,
    seconds: float = COMING,
) -> list[bytes]:
    """Wait until all keys have values, and return these.

    Args:
        store: the store.
        keys: the keys, each written by one process.
        who: the processes, in words, for the error.
        left: returns which of these have ended, so that waiting for them is of no use.
        seconds: the limit.

    Raises:
        MpkitError: somebody did not write its key in time, or has ended without.
    """
    begun = looked = time.monotonic()
    pause = FIRST_PAUSE
    # Polled: within the store's own wait nobody would notice that a process has left, or Ctrl-C, and it prints a
    # warning of C++ code when its time is over.
    while not store.check(list(keys)):
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
        now = time.monotonic()
        if now - looked < 0.5:
            continue
        looked, ended = now, left()
        missing = [i for i, key in enumerate(keys) if not store.check([key])]
        gone = [who[i] for i in missing if i in ended]
        if gone or now - begun > seconds:
            how = (
                f"{', '.join(gone)} ended without"
                if gone
                else f"{', '.join(who[i] for i in missing)} did not"
            )
            raise MpkitError(
                f"not all processes came here{'' if gone else f' within {seconds:g} s'}: {how}. Every process of the "
                "launcher has to make the same calls of the cluster in the same order: no `if rank == 0:` around "
                "mk.Cluster.from_env(), cluster.train(...) or cluster.run(...)"
            )
    return [bytes(value) for value in store.multi_get(list(keys))]


def interface_to(address: str) -> str:
    """Return the name of the network interface of this host that leads to an address; "" if it cannot be found.

    >>> interface_to("127.0.0.1")
    'lo'
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing: it only chooses a route
            mine = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            if _address_of(name) == mine:
                return name
    except OSError:
        pass
    return ""


def use_interface_to(address: str) -> None:
    """Let gloo and nccl listen on the interface that leads to an address, unless the user names others."""
    name = interface_to(address)
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if name:
            os.environ.setdefault(variable, name)


def _address_of(interface: str) -> str:
    siocgifaddr = 0x8915
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(
                any_socket.fileno(), siocgifaddr, struct.pack("256s", interface.encode()[:15])
            )
        except OSError:  # it has no IPv4 address
            return ""
    return socket.inet_ntoa(answer[20:24])
