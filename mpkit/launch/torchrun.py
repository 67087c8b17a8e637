"""Ranks that a launcher has started (torchrun, srun, mpirun), on one machine or several; this process is one of them.

torch joins the processes, and the launcher ends all when one fails. mpkit adds what neither does:

    tell      facts that each process publishes in torch's store: its host, its device, what it is to train
    same      all processes ask for the same, or all raise the same error before anything starts (`agree_on_job`)
    clock     how far each node's clock is from rank 0's, so that the traces of all nodes have one clock
    leave     a process that ends says so, and no other waits for it in vain

`mpkit.launch.launched_rank` runs this process's rank. What goes through the store is as safe as torch's own messages
are: whoever reaches its port can read and forge it (docs/security.md).
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import json
import os
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, rendezvous  # type: ignore[attr-defined]

from mpkit.common.exceptions import report
from mpkit.common.torch_private import _get_default_store
from mpkit.devices.local import gpus
from mpkit.devices.local.choose import DeviceChoice, row_of
from mpkit.devices.placement_notes import spans_nodes
from mpkit.errors import MpkitError
from mpkit.launch.place import LauncherPlace, place_here

if TYPE_CHECKING:
    from mpkit.strategies.prepare.prepare import TrainJob


T = TypeVar("T")

COMING = 300.0  # seconds within which all processes have to come
PINGS = 8


class Launcher:
    """All processes of a launcher, as one of them sees them. Every process makes the same calls in the same order.

    `chosen` has the devices of this node's ranks, by their number on the node.
    """

    def __init__(self, chosen: DeviceChoice) -> None:
        self.place: LauncherPlace = place_here()
        self.rank, self.ranks = self.place.rank, self.place.world_size
        self.names = [f"rank {each}" for each in range(self.ranks)]  # for messages
        self.broken = False  # a launch has failed: its ranks may wait in its collectives still
        self._tells = 0
        if name := interface_to(self.place.address):  # unless the user names others
            for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                os.environ.setdefault(variable, name)
        self._store = _open_store(self.place)
        atexit.register(self._leave)
        hello = {"host": self.place.host, "node": self.place.node}
        told = self.tell(hello | _describe_device(chosen, self.place.local_rank))
        self.hosts: list[str] = [each["host"] for each in told]
        self.nodes: list[str] = [each["node"] for each in told]
        self.local = tuple(rank for rank, node in enumerate(self.nodes) if node == self.place.node)
        self.first = self.local[0]  # of this node's ranks
        self.firsts = sorted({self.nodes.index(node) for node in self.nodes} - {0})  # of other nodes
        many = len(set(self.nodes)) > 1
        for rank, (host, node) in enumerate(zip(self.hosts, self.nodes, strict=True)):
            which = f" (node {node})" if many and node != host else ""
            self.names[rank] = f"rank {rank} of {self.ranks} on {host}{which}"
        _check_alike(told, self.nodes, self.names)
        self.devices: list[list[str]] = [each["row"] for each in told if each["row"]]  # by rank; on CPUs []
        own = "nccl" if _all_alone(told, self.nodes) else "gloo"
        self.backend: str = dist.get_backend() if dist.is_initialized() else own

    def store_for(self, name: str) -> Store:
        """Return the part of the store in which a process group meets."""
        return PrefixStore(f"{name}{self._tells}", self._store)

    def tell(self, value: Any) -> list[Any]:
        """Publish a value of JSON types, and return the values of all processes, by rank."""
        self._tells += 1
        keys = [f"told{self._tells}.{rank}" for rank in range(self.ranks)]
        self._store.set(keys[self.rank], json.dumps(value))
        self._wait(keys)
        return [json.loads(self._store.get(key)) for key in keys]

    def _wait(self, keys: Sequence[str]) -> None:
        """Wait for the keys of all ranks. Polled: the store's own wait notices neither Ctrl-C nor who has left."""
        begun = looked = time.monotonic()
        while not self._store.check(list(keys)):
            time.sleep(0.002)
            if (now := time.monotonic()) - looked < 0.5:
                continue
            looked = now
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            gone = [self.names[rank] for rank in missing if self._store.check([f"left{rank}"])]
            if gone or now - begun > COMING:
                late = ", ".join(self.names[rank] for rank in missing)
                how = f"{', '.join(gone)} ended without" if gone else f"{late} did not within {COMING:g} s"
                raise MpkitError(
                    f"not all processes came here: {how}. Every process of the launcher has to make the same calls of "
                    "the cluster in the same order: no `if rank == 0:` around mk.Cluster.from_env(), "
                    "cluster.train(...) or cluster.run(...)"
                )

    def _leave(self) -> None:
        """Let others know that this process ends, if the store is still there."""
        with suppress(dist.DistError, RuntimeError):
            self._store.set(f"left{self.rank}", "")

    def same(self, what: str, call: Callable[[], T], facts: Callable[[T], dict[str, Any]]) -> T:
        """Call a function on every process, and return its result if no process raised and all agree.

        `what` names in words what it makes; `facts` returns what all processes must have in common, of JSON types, by
        its name in words. Otherwise all processes raise rank 0's error, or that of the first rank that raised.
        """
        made, own = None, None
        try:
            made = call()
            told: dict[str, Any] = {"facts": facts(made)}
        except Exception as error:
            own, told = error, {"error": str(error)}
        everyone = self.tell(told)
        for rank, each in enumerate(everyone):
            if "error" in each:
                if own is not None and str(own) == each["error"]:
                    raise own
                which = "" if rank == 0 else f"{self.names[rank]}, and not rank 0, refused {what}: "
                raise ValueError(f"{which}{each['error']}") from own
        for name, value in everyone[0]["facts"].items():
            for rank, each in enumerate(everyone):
                if (other := each["facts"][name]) != value:
                    remedy = REMEDIES.get(name, f"{name} is {value} on rank 0 and {other} there")
                    raise ValueError(
                        f"the processes do not agree on {what}: {name} on {self.names[rank]} differs from rank 0's. "
                        f"Every process runs the same script and has to ask for the same: {remedy}"
                    )
        assert made is not None
        return made

    def clock_offset(self) -> tuple[int, int]:
        """Return the ns to add to this node's times to have rank 0's, and the largest error of that.

        Cristian's algorithm over the store: the first rank of each node in turn asks rank 0 for its time, which is
        taken to be that of the middle of the round trip; of several round trips the shortest counts, and the error is
        at most half of it. (F. Cristian, Probabilistic clock synchronization, 1989.)
        """
        best = (0, 0)
        for first in self.firsts:
            for number in range(PINGS):
                ask, answer = (f"{word}{self._tells}.{first}.{number}" for word in ("ask", "answer"))
                if self.rank == first:
                    sent = time.monotonic_ns()
                    self._store.set(ask, "")
                    self._store.wait([answer])
                    came = time.monotonic_ns()
                    error = (came - sent) // 2
                    if number == 0 or error < best[1]:
                        best = int(self._store.get(answer)) - (sent + came) // 2, error
                elif self.rank == 0:
                    self._store.wait([ask])
                    self._store.set(answer, str(time.monotonic_ns()))
        return tuple(self.tell(best)[self.first]) if self.firsts else best


REMEDIES = {
    "weights": "the model is made with other random numbers on each rank: torch.manual_seed(0) before it is made",
    "data": "the batches are not the same on each rank: make them with a seed, the whole batch on every rank; mpkit "
    "gives each rank its share (no DistributedSampler)",
}


def agree_on_job(launcher: Launcher | None, make_job: Callable[[], TrainJob]) -> TrainJob:
    """Return the job; under a launcher, once all processes have found that they ask for the same.

    Rank 0 decides which steps are verified. Warn if the plan's features work against each other, and in rank 0's
    process if tensor parallelism spans nodes.
    """
    from mpkit.strategies.prepare.prepare import warn_if_unwise

    if launcher is None:
        job = make_job()
        warn_if_unwise(job.plan)
        return job
    job = launcher.same("this training", make_job, _facts_in_common)
    job = replace(job, how=replace(job.how, verified=tuple(launcher.tell(job.how.verified)[0])))
    plan, nodes = job.plan, launcher.nodes
    warn_if_unwise(plan)
    words = spans_nodes(plan.mesh.groups("tp"), nodes.__getitem__, max(Counter(nodes).values()))
    if launcher.rank == 0 and plan.tp > 1 and words:
        report(f"{plan!r}: {words}")
    return job


def _facts_in_common(job: TrainJob) -> dict[str, Any]:
    """Return what every process has to ask for alike; otherwise replicas would begin with other weights, say."""
    weights = hashlib.sha256()
    for name, tensor in job.what.model.state_dict().items():
        if hasattr(tensor, "detach"):
            values = tensor.detach().cpu().contiguous()
            values = values.double() if values.is_floating_point() else values
            weights.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode() + values.numpy().tobytes())
    how = {"steps": job.how.steps, "seed": job.how.seed}  # before the weights, which differ with the seed
    facts = {"plan": str(job.plan), **how, "weights": weights.hexdigest()}
    if len(job.what.batches):
        from mpkit.strategies.data.digest import data_digest

        facts["data"] = data_digest(*job.what.batches[0])
    return facts


def _describe_device(chosen: DeviceChoice, local_rank: int) -> dict[str, Any]:
    """Return what other processes have to know of this one's device, of JSON types.

    A launcher may let each process see one GPU only (srun --gpus-per-task=1): then all are on cuda:0, and only the UUID
    tells that these are different devices.
    """
    if not chosen.numbers:
        return {"device": chosen.kind, "named": chosen.named, "is": "", "row": []}
    row = row_of(chosen, local_rank, gpus.inventory_of(chosen.kind))
    which = row.device if row.identity == "?" else row.identity
    return {"device": chosen.kind, "named": chosen.named, "is": which, "row": list(row)}


def _check_alike(told: Sequence[dict[str, Any]], nodes: Sequence[str], names: Sequence[str]) -> None:
    """Check that all processes have the same kind of device, and that a node has a rank per named device."""
    for rank, each in enumerate(told):
        if each["device"] != told[0]["device"]:
            raise ValueError(
                f"{names[rank]} has device {each['device']}, and {names[0]} {told[0]['device']}: all ranks compute on "
                "the same kind of device: mk.Cluster.from_env(device='cpu') on each"
            )
        here, named = nodes.count(nodes[rank]), each["named"]
        if named > here:
            raise ValueError(
                f"devices= names {named} devices, and the launcher has started {here} rank{'s'[: here > 1]} on the "
                f"node of {names[rank]}: the list is for the ranks of one node, the first for LOCAL_RANK 0. Name "
                f"{here}, or start {named} per node (torchrun --nproc-per-node {named})"
            )


def _all_alone(told: Sequence[dict[str, Any]], nodes: Sequence[str]) -> bool:
    """Return whether each rank has a GPU of its own.

    >>> _all_alone([{"device": "cuda", "is": "GPU-0a"}, {"device": "cuda", "is": "GPU-1a"}], ["a", "a"])
    True
    >>> _all_alone([{"device": "cuda", "is": "cuda:1"}] * 2, ["a", "a"])
    False
    """
    places = {(node, each["is"]) for node, each in zip(nodes, told, strict=True)}
    return all(each["device"] == "cuda" for each in told) and len(places) == len(told)


def _open_store(place: LauncherPlace) -> Store:
    """Return a store that all processes share: torchrun's agent serves it, or else rank 0, as torch has it.

    Each call returns a new part of it, the same on all processes for their first call, second call, and so on.
    """
    if dist.is_initialized():
        store = _get_default_store()
    else:
        os.environ.setdefault("MASTER_ADDR", place.address)
        os.environ.setdefault("MASTER_PORT", f"{place.port}")
        try:
            limit = timedelta(seconds=COMING)
            store, _, _ = next(rendezvous("env://", place.rank, place.world_size, timeout=limit))
        except dist.DistError as error:
            raise MpkitError(
                f"rank {place.rank} on {place.host} finds nobody at MASTER_ADDR:MASTER_PORT = {place.address}:"
                f"{place.port} ({str(error).splitlines()[0][:200]}). Does rank 0 run there, and can this host reach "
                f"it? `ping {place.address}` and `nc -vz {place.address} {place.port}` tell"
            ) from None
    number = PrefixStore(f"mpkit/{place.attempt}", store).add(f"clusters{place.rank}", 1)
    return PrefixStore(f"mpkit/{place.attempt}/{number}", store)


def interface_to(address: str) -> str:
    """Return the name of the network interface of this host that leads to an address; "" if it cannot be found.

    >>> interface_to("127.0.0.1")
    'lo'
    """
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing: it only chooses a route
        mine = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no IPv4 address
                siocgifaddr = 0x8915
                answer = fcntl.ioctl(probe.fileno(), siocgifaddr, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == mine:
                    return name
    return ""
