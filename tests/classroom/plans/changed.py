"""Answers that do what the reference does in another way: more memory, more messages, plain torch, copies.

keeping       nothing that is computed is freed before the answer ends
in_pieces     each message and each all-reduce in eight pieces
repeated      each communication four times, three of them for nothing
plain         torch.distributed in place of `ctx.comm`: a right answer, which passes or is judged by the same measures
on_copies     what is given is copied first, and the copies are changed
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from inspect import isclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mpkit.course.framework.layers import Layers
from mpkit.strategies.comm.tags import tag_number
from mpkit.strategies.rank_context import Context

__all__ = ["UNCHANGED", "in_pieces", "keeping", "on_copies", "plain", "repeated"]

PIECES, TIMES = 8, 4

UNCHANGED = "nothing that the answer was given has changed"
"""Printed by an answer on copies whose reference changes nothing in place."""


# ---- memory


class _Keep(TorchDispatchMode):
    def __init__(self, kept: list[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.kept.extend(each.detach() for each in tree_leaves(made) if isinstance(each, Tensor))
        return made


class _KeepLayers:
    def __init__(self, layers: Layers, kept: list[Any]) -> None:
        self._layers, self._kept = layers, kept

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._layers, name)
        if not callable(value):
            return value

        @wraps(value)
        def kept(*args: Any, **kwargs: Any) -> Any:
            made = value(*args, **kwargs)
            self._kept.append(made)
            return made

        return kept


def keeping(answer: Any) -> Any:
    """Return the answer that frees nothing before it ends; of a class, before the object goes."""

    def call(function: Any, kept: list[Any], args: Any, kwargs: Any) -> Any:
        given = [_KeepLayers(each, kept) if isinstance(each, Layers) else each for each in args]
        with _Keep(kept):
            return function(*given, **kwargs)

    if not isclass(answer):

        @wraps(answer)
        def mutant(*args: Any, **kwargs: Any) -> Any:
            kept: list[Any] = []
            return call(answer, kept, args, kwargs)

        return mutant

    def method(name: str, function: Any) -> Any:
        @wraps(function)
        def kept(self: Any, *args: Any, **kwargs: Any) -> Any:
            lists = self.__dict__.setdefault("_kept", [])
            return call(function, lists, (self, *args), kwargs)

        return kept

    own = {name: method(name, each) for name, each in vars(answer).items() if callable(each)}
    return type(answer.__name__, (answer,), own)


# ---- communication


def _with_comm(answer: Any, change: Callable[[Any], Any]) -> Any:
    """Return the answer whose context has a changed communicator."""

    def changed(given: Any) -> Any:
        return replace(given, comm=change(given.comm)) if isinstance(given, Context) else given

    if isclass(answer):

        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            answer.__init__(self, *map(changed, args), **kwargs)

        return type(answer.__name__, (answer,), {"__init__": __init__})

    @wraps(answer)
    def mutant(*args: Any, **kwargs: Any) -> Any:
        return answer(*map(changed, args), **kwargs)

    return mutant


class _Done:
    def __init__(self, works: list[Any], result: Callable[[], Any]) -> None:
        self._works, self._result = works, result

    def wait(self) -> Any:
        for work in self._works:
            work.wait()
        return self._result()


class _Changed:
    """A communicator that hands on what it does not change."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def _true(self, group: Any) -> Any:
        return group._comm if isinstance(group, _Changed) else group

    def group(self, ranks: Any) -> Any:
        return type(self)(self._comm.group(ranks))


class _Pieces(_Changed):
    def _each(self, start: Any, tensor: Tensor) -> list[Any]:
        flat = tensor.detach().view(-1)
        return [start(piece) for piece in flat.chunk(min(PIECES, max(1, len(flat))))]

    def isend(self, tensor: Tensor, dst: int, tag: Any = 0) -> Any:
        whole = tensor.detach().contiguous()
        return _Done(self._each(lambda piece: self._comm.isend(piece, dst, tag), whole), lambda: tensor)

    def irecv(self, buffer: Tensor, src: int, tag: Any = 0) -> Any:
        return _Done(self._each(lambda piece: self._comm.irecv(piece, src, tag), buffer), lambda: buffer)

    def send(self, tensor: Tensor, dst: int, tag: Any = 0) -> None:
        self.isend(tensor, dst, tag).wait()

    def recv(self, buffer: Tensor, src: int, tag: Any = 0) -> Any:
        return self.irecv(buffer, src, tag).wait()

    def all_reduce(
        self, tensor: Tensor, group: Any = None, async_op: bool = False, *, op: str = "sum"
    ) -> Any:
        whole, group = tensor.detach().contiguous(), self._true(group)

        def result() -> Tensor:
            if whole.data_ptr() != tensor.data_ptr():
                tensor.data.copy_(whole)
            return tensor

        works = self._each(lambda piece: self._comm.all_reduce(piece, group, async_op=True, op=op), whole)
        done = _Done(works, result)
        return done if async_op else done.wait()

    def broadcast(self, tensor: Tensor, src: int = 0, group: Any = None) -> Tensor:
        whole = tensor.detach().contiguous()
        self._each(lambda piece: self._comm.broadcast(piece, src, self._true(group)), whole)
        tensor.data.copy_(whole)
        return tensor

    def all_gather(
        self, tensor: Tensor, group: Any = None, async_op: bool = False, *, out: Any = None
    ) -> Any:
        group = self._true(group)
        flat = tensor.detach().contiguous().view(-1)
        works = [
            self._comm.all_gather(piece, group, async_op=True)
            for piece in flat.chunk(min(PIECES, max(1, len(flat))))
        ]

        def result() -> Tensor:
            rows = [work.wait().view((group or self._comm).size, -1) for work in works]
            shape = tensor.shape if tensor.dim() else (1,)
            whole = torch.cat(rows, 1).view(-1, *shape[1:])
            return whole if out is None else out.data.copy_(whole)

        done = _Done([], result)
        return done if async_op else done.wait()

    def reduce_scatter(
        self, tensor: Tensor, group: Any = None, async_op: bool = False, *, out: Any = None
    ) -> Any:
        group = self._true(group)
        n = (group or self._comm).size
        rows = tensor.detach().contiguous().view(n, -1)
        works = [
            self._comm.reduce_scatter(piece.contiguous(), group, async_op=True)
            for piece in rows.chunk(min(PIECES, max(1, rows.shape[1])), 1)
        ]

        def result() -> Tensor:
            mine = torch.cat([work.wait().view(-1) for work in works]).view(-1, *tensor.shape[1:])
            return mine if out is None else out.data.copy_(mine)

        done = _Done([], result)
        return done if async_op else done.wait()


class _Repeated(_Changed):
    def __getattr__(self, name: str) -> Any:
        true = getattr(self._comm, name)
        if name not in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather",
                        "scatter", "send", "recv", "isend", "irecv"):  # fmt: skip
            return true

        def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            args = tuple(map(self._true, args))
            kwargs = {key: self._true(each) for key, each in kwargs.items()}
            spare = kwargs | {"out": None} if "out" in kwargs else kwargs
            works = [true(tensor.detach().clone(), *args, **spare) for _ in range(TIMES - 1)]
            last = true(tensor, *args, **kwargs)
            if not hasattr(last, "wait"):
                return last
            return _Done(works, last.wait)

        return call


class _Plain(_Changed):
    """torch.distributed itself."""

    def _handle(self, group: Any) -> tuple[Any, Any]:
        members = self._true(group) or self._comm
        return members, members.handle

    def all_reduce(
        self, tensor: Tensor, group: Any = None, async_op: bool = False, *, op: str = "sum"
    ) -> Any:
        members, handle = self._handle(group)
        kind = {"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}.get(op, dist.ReduceOp.SUM)
        whole = tensor.detach().contiguous()
        work = dist.all_reduce(whole, kind, handle, async_op=True)

        def result() -> Tensor:
            if op == "mean":
                whole.div_(members.size)
            if whole.data_ptr() != tensor.data_ptr():
                tensor.data.copy_(whole)
            return tensor

        done = _Done([work], result)
        return done if async_op else done.wait()

    def all_gather(
        self, tensor: Tensor, group: Any = None, async_op: bool = False, *, out: Any = None
    ) -> Any:
        members, handle = self._handle(group)
        sent = tensor.detach().contiguous()
        sent = sent if sent.dim() else sent[None]
        rows = [torch.empty_like(sent) for _ in range(members.size)]
        work = dist.all_gather(rows, sent, handle, async_op=True)
        done = _Done([work], lambda: torch.cat(rows) if out is None else out.data.copy_(torch.cat(rows)))
        return done if async_op else done.wait()

    def reduce_scatter(
        self, tensor: Tensor, group: Any = None, async_op: bool = False, *, out: Any = None
    ) -> Any:
        members, handle = self._handle(group)
        parts = list(tensor.detach().contiguous().chunk(members.size))
        mine = torch.empty_like(parts[0]) if out is None else out
        work = dist.reduce_scatter(mine, parts, group=handle, async_op=True)
        done = _Done([work], lambda: mine)
        return done if async_op else done.wait()

    def broadcast(self, tensor: Tensor, src: int = 0, group: Any = None) -> Tensor:
        dist.broadcast(tensor.data, self._comm.ranks[src], self._handle(group)[1])
        return tensor

    def barrier(self, group: Any = None) -> None:
        dist.barrier(self._handle(group)[1])

    def isend(self, tensor: Tensor, dst: int, tag: Any = 0) -> Any:
        work = dist.isend(tensor.detach().contiguous(), self._comm.ranks[dst], tag=tag_number(tag))
        return _Done([work], lambda: tensor)

    def irecv(self, buffer: Tensor, src: int, tag: Any = 0) -> Any:
        work = dist.irecv(buffer.data, self._comm.ranks[src], tag=tag_number(tag))
        return _Done([work], lambda: buffer)

    def send(self, tensor: Tensor, dst: int, tag: Any = 0) -> None:
        self.isend(tensor, dst, tag).wait()

    def recv(self, buffer: Tensor, src: int, tag: Any = 0) -> Any:
        return self.irecv(buffer, src, tag).wait()


def in_pieces(answer: Any) -> Any:
    """Return the answer that sends each message, and makes each collective, in pieces."""
    return _with_comm(answer, _Pieces)


def repeated(answer: Any) -> Any:
    """Return the answer that makes each communication several times."""
    return _with_comm(answer, _Repeated)


def plain(answer: Any) -> Any:
    """Return the answer that calls torch.distributed."""
    return _with_comm(answer, _Plain)


# ---- in place


def on_copies(answer: Any) -> Any:
    """Return the answer that changes copies of what it is given."""

    @wraps(answer)
    def mutant(*args: Any, **kwargs: Any) -> Any:
        first = args[:1] if args and isinstance(args[0], Context) else ()
        rest = args[len(first) :]
        own = copy.deepcopy((rest, kwargs))
        try:
            return answer(*first, *own[0], **own[1])
        finally:
            if _numbers((rest, kwargs)) == _numbers(own):
                print(UNCHANGED)

    return mutant


def _numbers(value: Any) -> Any:
    """Return the values of all tensors in what an answer is given, to be compared."""
    if isinstance(value, Tensor):
        grad = value.grad.tolist() if value.is_leaf and value.grad is not None else None
        return str(value.tolist()), str(grad)
    if isinstance(value, nn.Module):
        return [_numbers(each) for each in (*value.parameters(), *value.buffers())]
    if isinstance(value, list | tuple):
        return [_numbers(each) for each in value]
    if isinstance(value, dict):
        return {key: _numbers(each) for key, each in value.items()}
    return None
