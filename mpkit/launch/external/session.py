"""Session: all processes that a launcher started, as one cluster."""

from __future__ import annotations

import atexit
import json
import platform
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from mpkit.devices.local.choose import DeviceChoice
from mpkit.errors import MpkitError
from mpkit.launch.external.environment import LauncherPlace, place_here
from mpkit.launch.external.greeting import greet
from mpkit.launch.external.node_devices import all_alone, check_named, tell
from mpkit.launch.external.rendezvous import rendezvous, use_interface_to, wait_for
from mpkit.launch.external.secret import find_secret
from mpkit.launch.external.signed_store import SignedStore

__all__ = ["Session"]

T = TypeVar("T")


class Session:
    """This process's membership. Every process makes one, and then makes the same calls in the same order.

    Args:
        chosen: the devices of this node's ranks, by their number on the node.

    Attributes:
        place: this process among all.
        hosts, nodes: the host and the node of each rank.
        names: the ranks in words, for messages.
        devices: by rank, its device in words (`mpkit.devices.local.table.DeviceRow`); [] on CPUs.
        backend: the backend that suits all processes; that of the process group if there is one already.
        store: the store; values that no process of this launch has signed are not believed.
        seal: signs them.
        broken: whether a launch has failed: its ranks may wait in its collectives still.

    Raises:
        ValueError: no launcher started this process, the processes differ in what they run, or more devices are named
            than a node has ranks.
        MpkitError: not all processes came.
    """

    def __init__(self, chosen: DeviceChoice) -> None:
        self.place: LauncherPlace = place_here()
        use_interface_to(self.place.address)
        self.store = rendezvous(self.place)
        self.broken = False
        self._counts: Counter[str] = Counter()
        ranks = self.place.world_size
        self.names = [f"rank {each}" for each in range(ranks)]
        atexit.register(self._leave)
        hello = {
            "host": self.place.host,
            "node": self.place.node,
            **tell(chosen, self.place.local_rank),
            "versions": [platform.python_version(), torch.__version__],
        }
        told, self.seal = greet(
            self.store, self.place, find_secret(), hello, lambda: self.wait(self.store, "hello")
        )
        self.store = self.store.signed_by(self.seal)
        self.hosts: list[str] = [each["host"] for each in told]
        self.nodes: list[str] = [each["node"] for each in told]
        many = len(set(self.nodes)) > 1
        self.names = [
            f"rank {each} of {ranks} on {told[each]['host']}"
            + (f" (node {told[each]['node']})" if many and told[each]["node"] != told[each]["host"] else "")
            for each in range(ranks)
        ]
        self._check_alike(told)
        check_named(told, self.nodes, self.names)
        self.devices: list[list[str]] = [each["row"] for each in told if each["row"]]
        self.backend = "nccl" if all_alone(told, self.nodes) else "gloo"
        if dist.is_initialized():
            self.backend = dist.get_backend()

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.place.rank

    @property
    def ranks(self) -> int:
        """The number of processes."""
        return self.place.world_size

    @property
    def leads(self) -> bool:
        """Whether this is the first rank of its node."""
        return self.nodes.index(self.place.node) == self.rank

    def part(self, what: str) -> SignedStore:
        """Return a new part of the store, with a connection of its own: the same on all processes at the n-th call."""
        self._counts[what] += 1
        return self.store.clone().part(f"{what}{self._counts[what]}")

    def wait(self, store: Store, name: str) -> list[bytes]:
        """Wait until every process has written its key, such as "ready3", and return what they wrote, by rank.

        Raises:
            MpkitError: somebody has ended, or did not come in time.
        """
        return wait_for(
            store, [f"{name}{rank}" for rank in range(self.ranks)], self.names, self._departed_ranks
        )

    def _departed_ranks(self) -> list[int]:
        return [rank for rank in range(self.ranks) if self.store.check([f"left{rank}"])]

    def _leave(self) -> None:
        """Let others know that this process ends, if the store is still there."""
        with suppress(dist.DistError, RuntimeError):
            self.store.set(f"left{self.rank}", "")

    def check(self) -> None:
        """Check that the ranks can still be used.

        Raises:
            MpkitError: an earlier launch failed.
        """
        if self.broken:
            raise MpkitError(
                "an earlier run of these processes has failed, and some of them may be gone: let the error end the "
                "script, and the launcher starts all ranks again (torchrun --max-restarts 3 does so by itself)"
            )

    def same(self, what: str, call: Callable[[], T], facts: Callable[[T], dict[str, Any]]) -> T:
        """Call a function on every process, and return its result if no process raised and all agree.

        Args:
            what: what it makes, in words.
            call: the function.
            facts: what all processes must have in common, of JSON types, by its name in words.

        Raises:
            ValueError: rank 0's error, or that of the first rank that raised, on all processes alike; or the processes
                do not agree.
        """
        store, made = self.part("same"), None
        try:
            made = call()
            told: dict[str, Any] = {"facts": facts(made)}
            own: Exception | None = None
        except Exception as error:
            own = error
            told = {"error": str(error), "kind": type(error).__name__}
        store.set(f"told{self.rank}", json.dumps(told))
        all_told = [json.loads(text) for text in self.wait(store, "told")]
        for rank, each in enumerate(all_told):
            if "error" in each:
                if own is not None and str(own) == each["error"]:
                    raise own
                which = "" if rank == 0 else f"{self.names[rank]}, and not rank 0, refused {what}: "
                raise ValueError(f"{which}{each['error']}") from own
        for name, value in all_told[0]["facts"].items():
            for rank, each in enumerate(all_told):
                if each["facts"][name] != value:
                    raise ValueError(_differs(what, name, value, each["facts"][name], self.names[rank]))
        assert made is not None
        return made

    def _check_alike(self, told: list[dict[str, Any]]) -> None:
        for rank, each in enumerate(told):
            for name in ("device", "versions"):
                if each[name] != told[0][name]:
                    raise ValueError(
                        f"{self.names[rank]} has {name} {each[name]}, and {self.names[0]} {told[0][name]}: "
                        + (
                            "all ranks compute on the same kind of device: mk.Cluster.from_env(device='cpu') on each"
                            if name == "device"
                            else "Python and torch have to be the same everywhere"
                        )
                    )


REMEDIES = {
    "weights": "the model is made with other random numbers on each rank: torch.manual_seed(0) before it is made",
    "data": "the batches are not the same on each rank: make them with a seed, the whole batch on every rank; mpkit "
    "gives each rank its share (no DistributedSampler)",
}


def _differs(what: str, name: str, first: Any, other: Any, who: str) -> str:
    remedy = REMEDIES.get(name, f"{name} is {first} on rank 0 and {other} there")
    return (
        f"the processes do not agree on {what}: {name} on {who} differs from rank 0's. Every process runs the same "
        f"script and has to ask for the same: {remedy}"
    )
