"""Communicator: the object through which every byte between ranks goes, and which records it.

Each call leaves a communication op in the trace (kind, group, its number in the group, payload, when it was issued
and when it was seen to be complete) and, where the caller waits for it, a WAIT op. Hangs are explained from these ops:
a rank that waits has an open WAIT, and a rank that never made the call has no op of that number.

The methods are written as functions, by concept:

    collectives     every rank of the group plays the same role, or one rank of it sends or receives
    messages        from one rank to another
    groups          which ranks form a communicator

All of them have the same phases:

    check       the caller is a member, roots exist, parts are equal; the call gets its number (`next_collective`)
    stage       the tensor as the backend takes it (`Wire.prepare_send`)
    record      the op begins in the trace, with the source line of the call (these three are `Wire.issue`)
    publish     the call is compared with what its peers have published
    start       torch.distributed is called
    wait        torch's handle, the comparison once more, the end of the op (`Work.wait`)

Source: the communicators of the MPI standard, chapter 7, which torch.distributed calls process groups.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy

import torch.distributed as dist
from torch import Tensor

from mpkit.strategies.comm import collectives, groups, messages
from mpkit.strategies.comm.wire import CallNumber, Wire
from mpkit.trace import Kind

__all__ = ["Communicator"]


class Communicator:
    """A group of ranks as seen by one of them: `ctx.comm` is that of all ranks.

    Tensors live on `ctx.device`. Roots, sources and destinations count the ranks of the communicator that is called,
    which on `ctx.comm` are the global ranks; only `group` takes global ranks everywhere.

    >>> import mpkit as mk, torch
    >>> def sums(ctx):
    ...     pairs = [ctx.comm.group([0, 1]), ctx.comm.group([2, 3])]
    ...     pair = pairs[ctx.rank // 2]
    ...     return ctx.comm.all_reduce(torch.tensor(ctx.rank)).item(), pair.all_reduce(torch.tensor(ctx.rank)).item()
    >>> with mk.Cluster(ranks=4, device="cpu") as cluster:
    ...     cluster.run(sums)
    [(6, 1), (6, 1), (6, 5), (6, 5)]

    Args:
        wire: this rank's end of all communication.
        ranks: the members' global ranks, ascending; None: all ranks.
        handle: torch's process group of these ranks; None: that of all ranks.

    Attributes:
        rank: this rank, as `ctx.rank`.
        world_size: the number of all ranks, as `ctx.world_size`.
        ranks: the members' global ranks, ascending.
        size: the number of members, n.
        index: this rank's place among the members, 0 to n - 1; -1: it is no member.
        name: the members as the trace spells them: "0,1,2,3".
        issued: the number of collectives so far, which is the number of the next one.
        label: tells communicators of the same ranks apart, "" for the first one: ranks that use them in different
            orders get an error, and not each other's numbers.
    """

    def __init__(
        self, wire: Wire, ranks: tuple[int, ...] | None = None, handle: dist.ProcessGroup | None = None
    ) -> None:
        self.wire, self.handle = wire, handle
        self.rank, self.world_size = wire.rank, wire.world_size
        if ranks is None:
            ranks = tuple(range(wire.world_size))
            wire.communicators[ranks] = self
        self.ranks = ranks
        self.size = len(ranks)
        self.index = ranks.index(wire.rank) if wire.rank in ranks else -1
        self.name = ",".join(map(str, ranks))
        self.label = ""
        self._counts = {"issued": 0, "siblings": 0}  # shared with the other communicators of these ranks

    def __repr__(self) -> str:
        return f"Communicator(ranks {list(self.ranks)}, this is rank {self.rank})"

    @property
    def issued(self) -> int:
        """The number of collectives of these ranks so far."""
        return self._counts["issued"]

    @issued.setter
    def issued(self, number: int) -> None:
        self._counts["issued"] = number

    def sibling(self) -> Communicator:
        """Return another communicator of the same ranks, whose calls match only its own."""
        self._counts["siblings"] += 1
        made = copy(self)
        made.label = f"{self.name}, number {self._counts['siblings'] + 1}"
        return made

    # ---- collectives
    all_reduce = collectives.all_reduce
    all_gather = collectives.all_gather
    reduce_scatter = collectives.reduce_scatter
    all_to_all = collectives.all_to_all
    barrier = collectives.barrier
    broadcast = collectives.broadcast
    reduce = collectives.reduce
    gather = collectives.gather
    scatter = collectives.scatter
    # ---- messages
    send = messages.send
    recv = messages.recv
    isend = messages.isend
    irecv = messages.irecv
    # ---- groups
    group = groups.group
    adopt = groups.adopt
    device_mesh = groups.device_mesh

    def next_collective(
        self, kind: Kind, tensor: Tensor, root: int = -1, reduction: str = "",
        *, parts: tuple[list[int], list[int]] | None = None,
    ) -> CallNumber:  # fmt: skip
        """Return this group's next collective, which takes its number.

        Args:
            kind: what it does.
            tensor: has the dtype and shape that all members must pass.
            root: the root that all members must name, a global rank; -1: there is none.
            reduction: the reduction that all members must name.
            parts: the rows for each member and from each, where they may differ.
        """
        number = self.issued
        self.issued = number + 1
        what = self.wire.what
        checks = self.wire.checks or (self.wire.checks_of_layers if what else None)
        call = None
        if checks is not None and self.size > 1:
            if parts is not None:
                call = checks.exchange(self.ranks, number, tensor, *parts, self.label)
            else:
                call = checks.collective(
                    self.ranks, number, kind, tensor, root, reduction, self.label, what=what
                )
        return CallNumber(kind, self.name, number, root, call)

    def subgroup(self, ranks: tuple[int, ...], handle: dist.ProcessGroup | None) -> Communicator:
        """Return a new communicator of some of the ranks; `group` and `adopt` keep one for each set of ranks."""
        return Communicator(self.wire, ranks, handle)

    def delays(self, pause: Callable[[], None]) -> None:
        """Call `pause` before each communication from now on.

        The pause belongs to no op, and so does not advance a virtual clock.
        """
        self.wire.before = pause
