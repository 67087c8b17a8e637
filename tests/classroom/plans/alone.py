"""Answers that get right numbers without dividing the work: every rank, or one of them, is all ranks at once.

    every rank gathers what all are given (`gathered`), and runs the reference for all of them
    the first rank does so, and sends each of the others its results (`on_first`)

What is given is packed with its gradients, so that whatever the reference changes in place can be changed in place on
the rank that it belongs to.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn

from mpkit.strategies.rank_context import Context
from mpkit.trace.record.recorder import Recorder
from tests.classroom.plans.together import World

__all__ = ["gathered", "on_first"]


def gathered(answer: Any) -> Any:
    """Return the answer that gathers everything on every rank, and is all ranks there."""

    def mutant(ctx: Context, *args: Any, **kwargs: Any) -> Any:
        packed = _packed((args, kwargs))
        same = len(set(_all_gather(ctx, hashlib.sha256(packed).digest()))) == 1
        every = [packed] * ctx.world_size if same else _all_gather(ctx, packed)
        given = [_unpacked(ctx, one) for one in every]
        given[ctx.rank] = args, kwargs
        ranks = _AllRanks(ctx, answer, given)
        mine = ranks.results[ctx.rank]

        def backward(dy: Tensor) -> list[Any]:
            return ranks.backward([pickle.loads(one) for one in _all_gather(ctx, _packed(dy))])[ctx.rank]

        return _bridged(mine, backward, (args, kwargs))

    return mutant


def on_first(answer: Any) -> Any:
    """Return the answer that sends everything to rank 0, which is all ranks."""

    def mutant(ctx: Context, *args: Any, **kwargs: Any) -> Any:
        every, ranks = _gather(ctx, _packed((args, kwargs))), None
        if ctx.rank == 0:
            ranks = _AllRanks(ctx, answer, [(args, kwargs), *(_unpacked(ctx, one) for one in every[1:])])
        changed = _scatter(ctx, [_packed(one) for one in ranks.outcomes] if ranks else [])
        (given, _), mine = ranks.outcomes[0] if ranks else _unpacked(ctx, changed)
        if ranks is None:
            _restore(args, given)

        def backward(dy: Tensor) -> list[Any]:
            dys = _gather(ctx, _packed(dy))
            found = ranks.backward([pickle.loads(one) for one in dys]) if ranks else []
            return list(pickle.loads(_scatter(ctx, [_packed(one) for one in found])))

        return _bridged(mine, backward, (args, kwargs))

    return mutant


class _AllRanks:
    """The reference on all ranks of a world in this process, with what each is given."""

    def __init__(self, ctx: Context, answer: Any, given: list[Any]) -> None:
        self._ctx, self._given, self._world = ctx, given, World(ctx.world_size)

        def one(mine: Any, simulated: Context) -> Any:
            return answer(simulated, *mine[0], **mine[1])

        self.results = self._world.run(ctx, [partial(one, mine) for mine in given])

    @property
    def outcomes(self) -> list[Any]:
        """By rank, what it was given, as it is now, and its result."""
        return list(zip(self._given, self.results, strict=True))

    def backward(self, dys: list[Tensor]) -> list[list[Any]]:
        """Return, by rank, the gradients of the tensors that it was given."""

        def one(rank: int, _: Context) -> list[Any]:
            leaves = list(_leaves(self._given[rank]))
            return list(torch.autograd.grad(self.results[rank], leaves, dys[rank], allow_unused=True))

        return self._world.run(self._ctx, [partial(one, rank) for rank in range(len(dys))])


def _bridged(result: Any, backward: Callable[[Tensor], list[Any]], given: Any) -> Any:
    """Return a result whose backward, if it has one, is that of all ranks together."""
    if not (isinstance(result, Tensor) and result.requires_grad):
        return result
    return _Bridge.apply(result.detach(), backward, *_leaves(given))  # type: ignore[no-untyped-call]


class _Bridge(torch.autograd.Function):
    """The edge between this rank's graph and that of all ranks together."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, backward: Callable[[Tensor], list[Any]], *leaves: Tensor) -> Tensor:
        ctx.together = backward
        return out.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return None, None, *ctx.together(dy)


# ---- what is given, as bytes


class _Packer(cloudpickle.Pickler):
    """A pickler that keeps gradients, and whether a tensor is a parameter."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor):
            values = obj.detach().contiguous().numpy().copy()
            return _tensor, (
                values,
                obj.requires_grad,
                obj.grad if obj.is_leaf else None,
                isinstance(obj, nn.Parameter),
            )
        return super().reducer_override(obj)

    def persistent_id(self, obj: Any) -> str | None:
        return "recorder" if isinstance(obj, Recorder) else None


class _Unpacker(pickle.Unpickler):
    """Whatever a rank does in another's place, it records as its own."""

    def __init__(self, file: io.BytesIO, recorder: Recorder) -> None:
        super().__init__(file)
        self._recorder = recorder

    def persistent_load(self, pid: str) -> Recorder:
        return self._recorder


def _tensor(values: Any, requires_grad: bool, grad: Any, parameter: bool) -> Tensor:
    tensor = torch.from_numpy(values)
    if parameter:
        tensor = nn.Parameter(tensor, requires_grad)
    elif requires_grad:
        tensor.requires_grad_()
    tensor.grad = grad
    return tensor


def _packed(value: Any) -> bytes:
    file = io.BytesIO()
    _Packer(file).dump(value)
    return file.getvalue()


def _unpacked(ctx: Context, data: bytes) -> Any:
    return _Unpacker(io.BytesIO(data), ctx.record).load()


def _restore(own: Any, new: Any) -> None:
    """Change what a rank was given as the first rank changed its copy."""
    if isinstance(own, Tensor):
        if own.numel():
            own.data.copy_(new.data)
        own.grad = new.grad
    elif isinstance(own, nn.Module):
        for mine, theirs in zip(_tensors_of(own), _tensors_of(new), strict=True):
            _restore(mine, theirs)
    elif isinstance(own, torch.optim.Optimizer):
        own.load_state_dict(new.state_dict())
    elif isinstance(own, list | tuple):
        for mine, theirs in zip(own, new, strict=True):
            _restore(mine, theirs)
    elif isinstance(own, dict):
        for key, mine in own.items():
            _restore(mine, new[key])


def _tensors_of(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _leaves(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.requires_grad:
            yield value
    elif isinstance(value, nn.Module):
        yield from (each for each in value.parameters() if each.requires_grad)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _leaves(each)
    elif isinstance(value, dict):
        yield from _leaves(list(value.values()))


# ---- bytes between ranks


def _all_gather(ctx: Context, data: bytes) -> list[bytes]:
    sizes = ctx.comm.all_gather(torch.tensor([len(data)])).tolist()
    rows = ctx.comm.all_gather(_filled(data, max(sizes))).split(max(sizes))
    return [row[:size].numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]


def _gather(ctx: Context, data: bytes) -> list[bytes]:
    sizes = ctx.comm.all_gather(torch.tensor([len(data)])).tolist()
    whole = ctx.comm.gather(_filled(data, max(sizes)))
    if ctx.rank:
        return []
    return [row[:size].numpy().tobytes() for row, size in zip(whole.split(max(sizes)), sizes, strict=True)]


def _scatter(ctx: Context, data: list[bytes]) -> bytes:
    n = ctx.world_size
    sizes = torch.tensor([len(one) for one in data] if data else [0] * n)
    sizes = ctx.comm.broadcast(sizes)
    most = int(sizes.max())
    rows = [_filled(one, most) for one in data]
    whole = torch.cat(rows) if rows else torch.empty(n * most, dtype=torch.uint8)
    return ctx.comm.scatter(whole)[: int(sizes[ctx.rank])].numpy().tobytes()


def _filled(data: bytes, size: int) -> Tensor:
    filled = torch.zeros(size, dtype=torch.uint8)
    filled[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return filled
