"""Communicator: every byte between ranks passes through it, and it records each call.

A call leaves a communication op in the trace (kind, group, its number in the group, payload, when it was issued and
when it was seen to be complete) and, if the caller waits for it, a WAIT op. Hangs are explained from these ops: a rank
that waits has an open WAIT, and a rank that never made the call has no op of that number.

    collectives     all ranks of the group play the same role, or one of them, the root, sends or receives
    messages        from one rank to another, matched by a tag
    groups          which ranks form a communicator

All methods have the same phases:

    check       the caller is a member, roots exist, parts are equal (`arguments`)
    number      the call gets its number in its group or channel (`next_collective`)
    stage       the tensor as the backend takes it (`Wire.prepare_send`)
    issue       record the op with the user's line, publish the call to its peers, call torch (`Wire.issue`)
    wait        torch's handle, the comparison once more, the end of the op (`Work.wait`)

Payload is counted as in nccl-tests: the tensor for all-reduce, broadcast and reduce, what this rank sends for an
all-to-all of uneven parts, and the whole (gathered or not yet scattered) tensor for the others.

Source: the MPI standard, chapters 6 and 7, whose communicators torch.distributed calls process groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from mpkit.strategies.comm import arguments
from mpkit.strategies.comm.arguments import Parts, output_tensor, part_shape, root_of, tag_number
from mpkit.strategies.comm.flat_collectives import start_all_gather, start_reduce_scatter
from mpkit.strategies.comm.wire import CallNumber, Wire, Work
from mpkit.trace import Kind

REDUCTIONS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,  # divided afterwards, which every backend supports
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


class Communicator:
    """A group of ranks as seen by one of them: `ctx.comm` is that of all ranks.

    Tensors live on `ctx.device`. All ranks of the communicator take part in a collective; roots, sources and
    destinations are numbered among them, so on `ctx.comm` they are global ranks. `group` always takes global ranks.
    With `async_op=True` a collective returns a `Work` at once, whose `wait()` returns the result.

    >>> import mpkit as mk, torch
    >>> def sums(ctx):
    ...     pairs = [ctx.comm.group([0, 1]), ctx.comm.group([2, 3])]
    ...     pair = pairs[ctx.rank // 2]
    ...     return ctx.comm.all_reduce(torch.tensor(ctx.rank)).item(), pair.all_reduce(torch.tensor(ctx.rank)).item()
    >>> with mk.Cluster(ranks=4, device="cpu") as cluster:
    ...     cluster.run(sums)
    [(6, 1), (6, 1), (6, 5), (6, 5)]

    Args:
        ranks: None for all ranks.
        handle: torch's process group of these ranks; None for that of all ranks.

    Attributes:
        rank, world_size: as in `ctx`.
        ranks: the members' global ranks, ascending.
        size: the number of members, n.
        index: this rank's place among the members, 0 to n - 1; -1 if it is not a member.
        name: the members as the trace spells them: "0,1,2,3".
        label: distinguishes communicators of the same ranks ("" for the first one), so that ranks that use them in
            different orders get an error, and not each other's numbers.
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

    def take_number(self) -> int:
        """Return the number of the next collective, and count it."""
        self._counts["issued"] += 1
        return self._counts["issued"] - 1

    def next_collective(
        self, kind: Kind, tensor: Tensor, root: int = -1, reduction: str = "", *, parts: Parts | None = None
    ) -> CallNumber:
        """Take the number of the next collective, in which all members must pass this dtype, shape and root."""
        number, what = self.take_number(), self.wire.what
        checks = self.wire.checks or (self.wire.checks_of_layers if what else None)
        call = None
        if checks is not None and self.size > 1:
            call = (
                checks.collective(self.ranks, number, kind, tensor, root, reduction, self.label, what=what)
                if parts is None
                else checks.exchange(self.ranks, number, tensor, *parts, self.label)
            )
        return CallNumber(kind, self.name, number, root, call)

    def _wire_of_member(self, what: str) -> Wire:
        """Return the wire, after checking that this rank may call a collective of the group."""
        if self.index < 0:
            raise ValueError(
                f"rank {self.rank} called {what} in the group of ranks {list(self.ranks)}, to which it does not "
                f"belong: only members call, as in `if ctx.rank in group.ranks: group.{what}(...)`"
            )
        return self.wire

    # ---- collectives in which every rank contributes and receives ----------------------------------------

    @overload
    def all_reduce(self, tensor: Tensor, *, async_op: Literal[False] = ..., op: str = ...) -> Tensor: ...
    @overload
    def all_reduce(self, tensor: Tensor, *, async_op: Literal[True], op: str = ...) -> Work: ...
    def all_reduce(self, tensor: Tensor, *, async_op: bool = False, op: str = "sum") -> Tensor | Work:
        """Overwrite `tensor` (any shape) with the sum, or the "mean", "max" or "min", over all ranks; return it."""
        # ---- check
        wire = self._wire_of_member("all_reduce")
        if op not in REDUCTIONS:
            raise ValueError(f"all_reduce(op={op!r}): there are 'sum', 'mean', 'max' and 'min'")
        arguments.check_reducible(tensor, op)
        # ---- stage
        sent = wire.prepare_send(tensor)
        received = partial(wire.finish_receive, sent, tensor)
        result = received if op != "mean" else lambda: received().div_(self.size)
        # ---- number, issue
        number = self.next_collective(Kind.ALL_REDUCE, tensor, reduction=op)
        start = partial(dist.all_reduce, sent, REDUCTIONS[op], self.handle, async_op=True)
        work = wire.issue(number, tensor.nbytes, start, result, waits=not async_op)
        # ---- wait
        return work if async_op else work.wait()

    @overload
    def all_gather(
        self, tensor: Tensor, *, async_op: Literal[False] = ..., out: Tensor | None = ...
    ) -> Tensor: ...
    @overload
    def all_gather(self, tensor: Tensor, *, async_op: Literal[True], out: Tensor | None = ...) -> Work: ...
    def all_gather(
        self, tensor: Tensor, *, async_op: bool = False, out: Tensor | None = None
    ) -> Tensor | Work:
        """Return the n ranks' tensors (k, ...), concatenated along the first dimension: (n k, ...).

        Args:
            out: (n k, ...), filled and returned; None for a new tensor. `tensor` may be this rank's part of it.
        """
        wire = self._wire_of_member("all_gather")
        sent = wire.prepare_send(tensor if tensor.dim() else tensor[None])
        whole = output_tensor(wire, out, (self.size * sent.shape[0], *sent.shape[1:]), sent, "all_gather")
        number = self.next_collective(Kind.ALL_GATHER, sent)
        start, result = partial(start_all_gather, self, whole, sent), partial(wire.finish_receive, whole, out)
        work = wire.issue(number, self.size * tensor.nbytes, start, result, waits=not async_op)
        return work if async_op else work.wait()

    @overload
    def reduce_scatter(
        self, tensor: Tensor, *, async_op: Literal[False] = ..., out: Tensor | None = ...
    ) -> Tensor: ...
    @overload
    def reduce_scatter(
        self, tensor: Tensor, *, async_op: Literal[True], out: Tensor | None = ...
    ) -> Work: ...
    def reduce_scatter(
        self, tensor: Tensor, *, async_op: bool = False, out: Tensor | None = None
    ) -> Tensor | Work:
        """Sum the n ranks' tensors (n k, ...) and return this rank's part of the first dimension: (k, ...).

        Args:
            out: (k, ...), filled and returned; None for a new tensor. It may be this rank's part of `tensor`.
        """
        wire = self._wire_of_member("reduce_scatter")
        part = part_shape(self, tensor, "reduce_scatter")
        sent = wire.prepare_send(tensor)
        mine = output_tensor(wire, out, part, sent, "reduce_scatter")
        number = self.next_collective(Kind.REDUCE_SCATTER, tensor)
        start, result = (
            partial(start_reduce_scatter, self, mine, sent),
            partial(wire.finish_receive, mine, out),
        )
        work = wire.issue(number, tensor.nbytes, start, result, waits=not async_op)
        return work if async_op else work.wait()

    def all_to_all(
        self, tensor: Tensor, *, sends: Sequence[int] | None = None, receives: Sequence[int] | None = None
    ) -> Tensor:
        """Exchange parts, so that part j of rank i's tensor becomes part i of rank j's: a transposition.

        Args:
            tensor: (n k, ...) for n ranks, as is the result; with uneven parts (sum of `sends`, ...), and the result is
                (sum of `receives`, ...).
            sends: the number of rows for each member; None for equal parts.
            receives: the number of rows from each member, which ranks learn by an all_to_all of `sends`.
        """
        wire = self._wire_of_member("all_to_all")
        parts = arguments.uneven_parts(self, tensor, sends, receives)
        if parts is None:
            part_shape(self, tensor, "all_to_all")
        to, of = parts or (None, None)
        sent = wire.prepare_send(tensor)
        swapped = wire.make_buffer(sent.shape if of is None else (sum(of), *sent.shape[1:]), sent)
        number = self.next_collective(Kind.ALL_TO_ALL, tensor, parts=parts)
        start = partial(dist.all_to_all_single, swapped, sent, of, to, self.handle, async_op=True)
        return wire.run(number, tensor.nbytes, start, partial(wire.finish_receive, swapped), rows=to or ())

    def barrier(self) -> None:
        """Wait until every rank has reached this call."""
        wire = self._wire_of_member("barrier")
        nothing = torch.empty(0)
        start = partial(dist.barrier, self.handle, async_op=True)
        number = self.next_collective(Kind.BARRIER, nothing)
        wire.run(number, 0, start, lambda: nothing)

    # ---- collectives with a root: it sends to all ranks of the group, or receives from all ----------------

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Overwrite every rank's tensor (any shape, the same on all ranks) with rank `src`'s, and return it."""
        wire = self._wire_of_member("broadcast")
        source = root_of(self, src, "broadcast")
        sent = wire.prepare_send(tensor)
        number = self.next_collective(Kind.BROADCAST, tensor, source)
        start = partial(dist.broadcast, sent, source, self.handle, async_op=True)
        return wire.run(number, tensor.nbytes, start, partial(wire.finish_receive, sent, tensor))

    def reduce(self, tensor: Tensor, dst: int = 0, *, in_place: bool = False) -> Tensor:
        """Return the sum of all ranks' tensors (any shape) on rank `dst`, and a rank's own tensor on the others.

        With `in_place`, `dst`'s tensor receives the sum, and the contents of the other ranks' tensors are undefined.
        """
        wire = self._wire_of_member("reduce")
        target = root_of(self, dst, "reduce")
        sent = wire.prepare_send(tensor)
        if not in_place:
            sent = sent.clone()  # gloo leaves partial sums in every rank's tensor
        at_root = partial(wire.finish_receive, sent, tensor if in_place else None)
        number = self.next_collective(Kind.REDUCE, tensor, target)
        start = partial(dist.reduce, sent, target, group=self.handle, async_op=True)
        return wire.run(number, tensor.nbytes, start, at_root if self.rank == target else lambda: tensor)

    def gather(self, tensor: Tensor, dst: int = 0) -> Tensor:
        """Return all ranks' tensors (k, ...), concatenated (n k, ...), on rank `dst`; an empty tensor on the others."""
        wire = self._wire_of_member("gather")
        target = root_of(self, dst, "gather")
        sent = wire.prepare_send(tensor if tensor.dim() else tensor[None])
        rows = self.size * sent.shape[0] if self.rank == target else 0
        whole = wire.make_buffer((rows, *sent.shape[1:]), sent)
        parts = list(whole.chunk(self.size)) if self.rank == target else None
        number = self.next_collective(Kind.GATHER, sent, target)
        start = partial(dist.gather, sent, parts, target, self.handle, async_op=True)
        return wire.run(number, self.size * tensor.nbytes, start, partial(wire.finish_receive, whole))

    def scatter(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Return this rank's part (k, ...) of rank `src`'s tensor (n k, ...).

        All ranks pass a tensor of this shape; only `src`'s needs memory: `torch.empty(1).expand(n * k)` will do.
        """
        wire = self._wire_of_member("scatter")
        source = root_of(self, src, "scatter")
        part = part_shape(self, tensor, "scatter")
        sent = wire.prepare_send(tensor) if self.rank == source else tensor
        mine = wire.make_buffer(part, sent)
        parts = list(sent.chunk(self.size)) if self.rank == source else None
        number = self.next_collective(Kind.SCATTER, tensor, source)
        start = partial(dist.scatter, mine, parts, source, self.handle, async_op=True)
        return wire.run(number, tensor.nbytes, start, partial(wire.finish_receive, mine))

    # ---- messages ----------------------------------------------------------------------------------------

    def isend(self, tensor: Tensor, dst: int, tag: int | str = 0) -> Work:
        """Start sending `tensor` (any shape) to rank `dst`; it must not be changed before `wait()`.

        The matching `irecv` has a buffer of this shape, and the same tag: an integer, or a letter and one, as "F3".
        """
        other = arguments.peer_of(self, dst, "isend")
        number = self._next_message(Kind.SEND, other, tag, tensor)
        sent = self.wire.prepare_send(tensor)
        start = partial(dist.isend, sent, other, tag=tag_number(tag))
        return self.wire.issue(number, tensor.nbytes, start, lambda: tensor)

    def irecv(self, buffer: Tensor, src: int, tag: int | str = 0) -> Work:
        """Start receiving from rank `src` into `buffer`; `wait()` returns the filled buffer."""
        other, wire = arguments.peer_of(self, src, "irecv"), self.wire
        if not buffer.is_contiguous():
            raise ValueError(
                f"irecv needs a contiguous buffer, not one of strides {buffer.stride()}: torch.empty"
            )
        number = self._next_message(Kind.RECV, other, tag, buffer)
        filled = wire.make_buffer(buffer.shape, buffer) if wire.staged else buffer
        start = partial(dist.irecv, filled, other, tag=tag_number(tag))
        return wire.issue(number, buffer.nbytes, start, partial(wire.finish_receive, filled, buffer))

    def send(self, tensor: Tensor, dst: int, tag: int | str = 0) -> None:
        """Send `tensor` to rank `dst` and wait until it may be changed again."""
        self.isend(tensor, dst, tag).wait()

    def recv(self, buffer: Tensor, src: int, tag: int | str = 0) -> Tensor:
        """Receive into `buffer` from rank `src` and wait until it is filled."""
        return self.irecv(buffer, src, tag).wait()

    def _next_message(self, kind: Kind, other: int, tag: int | str, tensor: Tensor) -> CallNumber:
        """Take the number of the next message to or from a global rank."""
        tag_number(tag)  # raises if the tag is malformed
        channel, number, ends = self.wire.take_message(kind, other, tag)
        checks = self.wire.checks
        call = None if checks is None else checks.message(channel, number, ends, tensor)
        return CallNumber(kind, channel, number, other, call)

    # ---- groups ------------------------------------------------------------------------------------------

    def group(self, ranks: Sequence[int]) -> Communicator:
        """Return the communicator of these global ranks, whose methods only its members call.

        Every rank of the run makes this call in the same order, whether it is a member or not. Two groups of the same
        ranks stay separate: a call of one does not match a call of the other.

        Raises:
            ValueError: there are no ranks, a rank does not exist, or a rank is given twice.
            CommMismatch: another rank creates a different group, or calls a collective of all ranks.
        """
        members = tuple(sorted(ranks))
        unique = len(set(members)) == len(members)
        if not members or not unique or not 0 <= members[0] <= members[-1] < self.world_size:
            raise ValueError(
                f"group({list(ranks)}) needs different ranks out of 0 to {self.world_size - 1}, at least one; "
                f"all of them are those of ctx.comm"
            )
        known = self.wire.communicators.get(members)
        if known is None:
            return self.adopt(members, self._torch_group(members))
        known._counts["siblings"] += 1
        sibling = copy(known)
        sibling.label = f"{known.name}, number {known._counts['siblings'] + 1}"
        return sibling

    def adopt(self, ranks: tuple[int, ...], handle: dist.ProcessGroup | None) -> Communicator:
        """Return the communicator of these ranks, in ascending order, for an existing torch group."""
        known = self.wire.communicators
        if ranks not in known:
            known[ranks] = self.subgroup(ranks, handle)
        return known[ranks]

    def subgroup(self, ranks: tuple[int, ...], handle: dist.ProcessGroup | None) -> Communicator:
        """Create a communicator of some of the ranks; a dry run's creates fake ones."""
        return Communicator(self.wire, ranks, handle)

    def device_mesh(self, device: torch.device, shape: Mapping[str, int]) -> DeviceMesh | None:
        """Create torch's mesh of all ranks, at the same time on each, by the axes' names and lengths; None if fake."""
        ranks = torch.arange(self.world_size).view(*shape.values())
        return DeviceMesh(device.type, ranks, mesh_dim_names=tuple(shape))

    def _torch_group(self, ranks: tuple[int, ...]) -> Any:
        """Create torch's group, which is a collective of all ranks and takes a number among these."""
        wire = self.wire
        if wire.checks is None or wire.world_size == 1:
            return dist.new_group(list(ranks))
        world = wire.communicators[tuple(range(wire.world_size))]
        number = world.take_number()
        call = wire.checks.group(world.ranks, number, ranks)
        where = wire.find_source_line()
        waiting = wire.record.begin(Kind.WAIT, call.text, group=world.name, number=number, where=where)
        call.publish()
        handle = dist.new_group(list(ranks))
        call.compare()
        wire.record.end(waiting)
        return handle

    def delays(self, pause: Callable[[], None]) -> None:
        """Call `pause` before each communication from now on, outside of any op and of the virtual clock."""
        self.wire.before = pause
