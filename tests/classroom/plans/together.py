"""All ranks of an answer in one process, as threads: what an answer does that gathers everything and works alone.

One thread runs at a time. It hands over where it waits for another one: in `Simulated`, the communicator of such a
rank, nothing leaves the process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mpkit.strategies.rank_context import Context

__all__ = ["Simulated", "World"]


class World:
    """Simulated ranks: what they have posted, and whose turn it is."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.turn = threading.Condition()
        self.posted: dict[Any, dict[int, Any]] = {}
        self.failed: BaseException | None = None

    def run(self, ctx: Context, functions: Sequence[Callable[[Context], Any]]) -> list[Any]:
        """Call a function per rank, each with its simulated context; return what they return."""
        results: list[Any] = [None] * len(functions)
        grad = torch.is_grad_enabled()

        def work(rank: int) -> None:
            with self.turn, torch.set_grad_enabled(grad):
                try:
                    own = replace(ctx, rank=rank, comm=Simulated(self, rank))
                    results[rank] = functions[rank](own)
                except BaseException as error:  # raised again by the caller's thread
                    self.failed = self.failed or error
                self.turn.notify_all()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(functions))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failed is not None:
            raise self.failed
        return results

    def post(self, key: Any, place: int, value: Any) -> None:
        """Make a value known to the others."""
        self.posted.setdefault(key, {})[place] = value
        self.turn.notify_all()

    def wait_for(self, key: Any, many: int) -> dict[int, Any]:
        """Let the others run until so many values are posted."""

        def complete() -> bool:
            return self.failed is not None or len(self.posted.get(key, {})) >= many

        if not self.turn.wait_for(complete, timeout=20.0) or self.failed is not None:
            raise RuntimeError("the simulated ranks wait for each other, or one has failed")
        return self.posted[key]


class _Pending:
    def __init__(self, finish: Callable[[], Any]) -> None:
        self._finish, self._value, self._done = finish, None, False

    def wait(self) -> Any:
        if not self._done:
            self._value, self._done = self._finish(), True
        return self._value


class Simulated:
    """The communicator of a simulated rank, with the methods of `mpkit.strategies.comm.communicator`."""

    def __init__(self, world: World, rank: int, ranks: Sequence[int] | None = None) -> None:
        self.world, self.rank, self.world_size = world, rank, world.size
        self.ranks = tuple(ranks if ranks is not None else range(world.size))
        self.size = len(self.ranks)
        self.index = self.ranks.index(rank) if rank in self.ranks else -1
        self._issued = 0
        self._groups: dict[tuple[int, ...], Simulated] = {self.ranks: self}
        self._numbers: dict[Any, int] = {}

    def group(self, ranks: Sequence[int]) -> Simulated:
        members = tuple(sorted(ranks))
        return self._groups.setdefault(members, Simulated(self.world, self.rank, members))

    def _exchange(self, group: Simulated | None, tensor: Tensor, finish: Any, async_op: bool = False) -> Any:
        group = group or self
        key, group._issued = (group.ranks, group._issued), group._issued + 1
        self.world.post(key, group.index, tensor.detach().clone())

        def done() -> Any:
            posted = self.world.wait_for(key, group.size)
            return finish([posted[place] for place in range(group.size)], group.index)

        pending = _Pending(done)
        return pending if async_op else pending.wait()

    def all_reduce(
        self, tensor: Tensor, group: Any = None, async_op: bool = False, *, op: str = "sum"
    ) -> Any:
        def finish(parts: list[Tensor], index: int) -> Tensor:
            total = _reduced(parts, op)
            tensor.data.copy_(total)
            return tensor

        return self._exchange(group, tensor, finish, async_op)

    def all_gather(
        self, tensor: Tensor, group: Any = None, async_op: bool = False, *, out: Any = None
    ) -> Any:
        def finish(parts: list[Tensor], index: int) -> Tensor:
            whole = torch.cat([part if part.dim() else part[None] for part in parts])
            return whole if out is None else out.data.copy_(whole.view_as(out)) and out

        return self._exchange(group, tensor, finish, async_op)

    def reduce_scatter(
        self, tensor: Tensor, group: Any = None, async_op: bool = False, *, out: Any = None
    ) -> Any:
        def finish(parts: list[Tensor], index: int) -> Tensor:
            mine = _reduced(parts, "sum").chunk(len(parts))[index].clone()
            return mine if out is None else out.data.copy_(mine) and out

        return self._exchange(group, tensor, finish, async_op)

    def all_to_all(
        self,
        tensor: Tensor,
        group: Any = None,
        async_op: bool = False,
        *,
        sends: Any = None,
        receives: Any = None,
    ) -> Any:
        group = group or self
        rows = list(sends) if sends is not None else [len(tensor) // group.size] * group.size
        key, group._issued = (group.ranks, group._issued), group._issued + 1
        self.world.post(key, group.index, [part.clone() for part in tensor.detach().split(rows)])

        def done() -> Tensor:
            posted = self.world.wait_for(key, group.size)
            return torch.cat([posted[place][group.index] for place in range(group.size)])

        return _Pending(done) if async_op else done()

    def exchange(self, rows: Tensor, sends: Any, receives: Any, turn: str) -> Any:
        return self.all_to_all(rows, sends=sends, receives=receives)

    def barrier(self, group: Any = None) -> None:
        self._exchange(group, torch.empty(0), lambda parts, index: None)

    def _place(self, group: Any, root: int) -> int:
        return int((group or self).ranks.index(self.ranks[root]))

    def broadcast(self, tensor: Tensor, src: int = 0, group: Any = None) -> Tensor:
        place = self._place(group, src)

        def finish(parts: list[Tensor], index: int) -> Tensor:
            tensor.data.copy_(parts[place])
            return tensor

        return self._exchange(group, tensor, finish)  # type: ignore[no-any-return]

    def reduce(self, tensor: Tensor, dst: int = 0, group: Any = None, *, in_place: bool = False) -> Tensor:
        place = self._place(group, dst)

        def finish(parts: list[Tensor], index: int) -> Tensor:
            if index != place:
                return tensor
            total = _reduced(parts, "sum")
            if in_place:
                tensor.data.copy_(total)
                return tensor
            return total

        return self._exchange(group, tensor, finish)  # type: ignore[no-any-return]

    def gather(self, tensor: Tensor, dst: int = 0, group: Any = None) -> Tensor:
        place = self._place(group, dst)

        def finish(parts: list[Tensor], index: int) -> Tensor:
            whole = torch.cat([part if part.dim() else part[None] for part in parts])
            return whole if index == place else whole[:0]

        return self._exchange(group, tensor, finish)  # type: ignore[no-any-return]

    def scatter(self, tensor: Tensor, src: int = 0, group: Any = None) -> Tensor:
        place = self._place(group, src)
        return self._exchange(  # type: ignore[no-any-return]
            group, tensor, lambda parts, index: parts[place].chunk(len(parts))[index].clone()
        )

    def isend(self, tensor: Tensor, dst: int, tag: int | str = 0) -> Any:
        self.world.post(self._channel(self.rank, self.ranks[dst], tag), 0, tensor.detach().clone())
        return _Pending(lambda: tensor)

    def irecv(self, buffer: Tensor, src: int, tag: int | str = 0) -> Any:
        key = self._channel(self.ranks[src], self.rank, tag)

        def done() -> Tensor:
            buffer.data.copy_(self.world.wait_for(key, 1)[0])
            return buffer

        return _Pending(done)

    def _channel(self, src: int, dst: int, tag: int | str) -> Any:
        number = self._numbers.get((src, dst, tag), 0)
        self._numbers[src, dst, tag] = number + 1
        return "message", src, dst, tag, number

    def send(self, tensor: Tensor, dst: int, tag: int | str = 0) -> None:
        self.isend(tensor, dst, tag).wait()

    def recv(self, buffer: Tensor, src: int, tag: int | str = 0) -> Tensor:
        return self.irecv(buffer, src, tag).wait()  # type: ignore[no-any-return]


def _reduced(parts: Sequence[Tensor], op: str) -> Tensor:
    if op in ("max", "min"):
        return getattr(torch.stack(list(parts)), f"a{op}")(0)  # type: ignore[no-any-return]
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total / len(parts) if op == "mean" else total
