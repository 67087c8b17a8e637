"""Every communication of a program, whoever issues it.

Every collective and message is one of c10d's operators, whether Python, DDP's reducer in C++, FSDP2 or a functional
collective issues it. They go through torch's dispatcher. A kernel for the key BackendSelect, which every call passes
just before the backend's own kernel, sees them all:

    record      begin the op, with its group, payload and the program's line
    compare     compare the program's own calls with its peers', as those of `ctx.comm`
    go on       redispatch to the kernel of the backend, without Python's lock
    follow      hand torch's handle to `Completion`, which writes the end

Payloads count as in the kit's own traces and NCCL's documentation: the whole gathered or scattered tensor, not a rank's
part of it.

Source: torch's operators in torch/csrc/distributed/c10d/Ops.cpp, its order of dispatch keys in c10/core/DispatchKey.h.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from mpkit.common.disk import write_whole
from mpkit.common.torch_private import DispatchKey, _dispatch_keyset_full_after, wait_tensor
from mpkit.strategies.comm.call_checks import CallChecks, CheckedCall
from mpkit.strategies.comm.communicator import Communicator
from mpkit.strategies.program_calls.completion import Completion
from mpkit.strategies.program_calls.program import Annotations, SourceLines
from mpkit.strategies.rank_context import Context
from mpkit.trace import Kind
from mpkit.trace.record.recorder import Recorder

_COMPARED = {*Kind} - {Kind.ALL_TO_ALL}  # whose parts may differ from rank to rank
_NOTHING = torch.empty(0)
_MEMBERS: dict[str, Any] = dict(dist.ReduceOp.RedOpType.__members__)
_REDUCTIONS = {int(number): name.lower() for name, number in _MEMBERS.items()}


class C10dOperator(NamedTuple):
    """One of c10d's operators, and which of its arguments is what; -1 for none."""

    kind: Kind
    tensors: int = 0  # the payload
    peer: int = -1  # the other end of a message, or the root, a rank of the group
    per_rank: bool = False  # whether `tensors` is one rank's part of the payload
    tag: int = -1
    reduces: int = -1  # the reduction


OPERATORS = {
    "allreduce_": C10dOperator(Kind.ALL_REDUCE, reduces=2),
    "allreduce_coalesced_": C10dOperator(Kind.ALL_REDUCE, reduces=2),
    "allgather_": C10dOperator(Kind.ALL_GATHER),
    "_allgather_base_": C10dOperator(Kind.ALL_GATHER),
    "allgather_coalesced_": C10dOperator(Kind.ALL_GATHER),
    "allgather_into_tensor_coalesced_": C10dOperator(Kind.ALL_GATHER),
    "reduce_scatter_": C10dOperator(Kind.REDUCE_SCATTER, tensors=1, reduces=3),
    "_reduce_scatter_base_": C10dOperator(Kind.REDUCE_SCATTER, tensors=1, reduces=3),
    "reduce_scatter_tensor_coalesced_": C10dOperator(Kind.REDUCE_SCATTER, tensors=1, reduces=3),
    "broadcast_": C10dOperator(Kind.BROADCAST, peer=2),
    "reduce_": C10dOperator(Kind.REDUCE, peer=3, reduces=2),
    "gather_": C10dOperator(Kind.GATHER, tensors=1, peer=3, per_rank=True),
    "scatter_": C10dOperator(Kind.SCATTER, peer=3, per_rank=True),
    "alltoall_": C10dOperator(Kind.ALL_TO_ALL, tensors=1),
    "alltoall_base_": C10dOperator(Kind.ALL_TO_ALL, tensors=1),
    "barrier": C10dOperator(Kind.BARRIER, tensors=-1),
    "monitored_barrier_": C10dOperator(Kind.BARRIER, tensors=-1),
    "send": C10dOperator(Kind.SEND, peer=2, tag=3),
    "recv_": C10dOperator(Kind.RECV, peer=2, tag=3),
    "recv_any_source_": C10dOperator(Kind.RECV, tag=2),
}
"""The operators of c10d that communicate, by name."""


class Communication:
    """The operators of c10d as one rank calls them.

    Args:
        comm: the communicator of all ranks: its groups and messages are numbered together with the program's.
        checks: compares calls with the peers'; None for that of `comm`.
        direct_only: ignore calls by DDP, FSDP and the like.
    """

    def __init__(
        self, comm: Communicator, completion: Completion, lines: SourceLines, annotations: Annotations,
        checks: CallChecks | None = None, *, direct_only: bool = False,
    ) -> None:  # fmt: skip
        self._direct_only = direct_only
        self._checks = checks or comm.wire.checks
        self._comm, self._completion, self._lines, self._annotations = comm, completion, lines, annotations
        self._record: Recorder = comm.wire.record
        self.before: Callable[[], None] = lambda: None  # is called before each call is recorded
        self._groups: dict[int, tuple[Any, Communicator]] = {}
        self._texts: dict[tuple[torch.dtype, torch.Size], str] = {}
        self._axes: dict[str, str] = {}  # the axes in a DeviceMesh, by the group's name
        self._libraries: list[torch.library.Library] = []

    # ---- begin and end of watching

    def install(self) -> None:
        """Register a kernel in front of each operator that communicates."""
        c10d = torch.library.Library("c10d", "IMPL")
        functional = torch.library.Library("_c10d_functional", "IMPL")
        self._libraries, after = [c10d, functional], _dispatch_keyset_full_after(DispatchKey.BackendSelect)
        for name, operator in OPERATORS.items():
            if hasattr(torch.ops.c10d, name):
                c10d.impl(name, self._kernel(name, operator, after), "BackendSelect", with_keyset=True)
        functional.impl("wait_tensor", self._wait_tensor(after), "BackendSelect", with_keyset=True)

    def uninstall(self) -> None:
        """Remove the kernels."""
        for library in self._libraries:
            library._destroy()
        self._libraries = []
        self._groups.clear()

    # ---- the kernels

    def _kernel(self, name: str, operator: C10dOperator, after: Any) -> Any:
        """Return the kernel in front of an operator; `after` are the dispatch keys of the backends."""
        go_on = getattr(torch.ops.c10d, name).default._handle.redispatch_boxed
        at_group = place_of_group(name)
        unbox, completion, lines, begin = dist.Work.unbox, self._completion, self._lines, self._begin
        direct_only = self._direct_only

        def kernel(keyset: Any, *args: Any) -> Any:
            where = lines.running_line()
            if where is None or (direct_only and not lines.is_direct):  # None: ctx.comm, which records it
                return go_on(keyset & after, *args)
            by_python = lines.by_python
            completion.settle()
            self.before()
            op, call = begin(operator, args, args[at_group], where)
            if call is not None:
                call.publish()
            out = go_on(keyset & after, *args)
            handle = out[-1] if isinstance(out, tuple) else out
            if handle is None:  # monitored_barrier returns when it is complete
                self._record.end(op)
            else:
                completion.follow(op, unbox(handle), where, args[0], by_python=by_python, call=call)
            return out

        return kernel

    def _wait_tensor(self, after: Any) -> Any:
        go_on = wait_tensor.default.redispatch

        def kernel(keyset: Any, tensor: torch.Tensor) -> Any:
            return self._completion.wait_for_output(tensor, lambda: go_on(keyset & after, tensor))

        return kernel

    # ---- record

    def _begin(
        self, operator: C10dOperator, args: tuple[Any, ...], boxed: Any, where: str
    ) -> tuple[int, CheckedCall | None]:
        """Begin the op of a call; return it, with its check if the program makes the call itself."""
        kind, group = operator.kind, self._group(boxed)
        tensors = _payload(args[operator.tensors]) if operator.tensors >= 0 else []
        nbytes = tensors[0].nbytes if len(tensors) == 1 else sum([tensor.nbytes for tensor in tensors])
        if operator.per_rank:
            nbytes *= group.size
        other = args[operator.peer] if operator.peer >= 0 else -1
        peer = group.ranks[other] if 0 <= other < group.size else -1  # torch rejects a missing one
        if operator.tag >= 0:
            name, number, ends = self._comm.wire.take_message(kind, peer, args[operator.tag])
        else:
            name, number, ends = group.name, group.take_number(), (-1, -1)
        text, said = self._text(tensors) if tensors else "", self._annotations.innermost
        call, checks = None, self._checks
        if checks is not None and self._lines.is_direct and kind in _COMPARED and group.size > 1:
            tensor = tensors[0] if tensors else _NOTHING
            if operator.tag < 0:
                reduction = _REDUCTIONS[args[operator.reduces].op()] if operator.reduces >= 0 else ""
                if kind != Kind.ALL_REDUCE and reduction == "sum":  # `ctx.comm` names all_reduce's only
                    reduction = ""
                # torch's name of a group is the same on all of its ranks.
                handle = dist.ProcessGroup.unbox(boxed)
                group_name = "" if handle == dist.group.WORLD else str(handle.group_name)
                call = checks.collective(group.ranks, number, kind, tensor, peer, reduction, group_name)
                text = call.text.replace(self._text([tensor]), text)
            elif peer >= 0:
                call = checks.message(name, number, ends, tensor)
        elif said:
            text = f"{said}: {text}"
        op = self._record.begin(kind, text, group=name, number=number, peer=peer, nbytes=nbytes, where=where)
        if kind == Kind.ALL_TO_ALL and (parts := _uneven_parts(args, tensors)):
            self._record.note_parts(op, parts)
        return op, call

    def _group(self, boxed: Any) -> Communicator:
        """Return the communicator of a process group's ranks, which counts their collectives."""
        handle = dist.ProcessGroup.unbox(boxed)
        known = self._groups.get(id(handle))
        if known is None:
            ranks = tuple(sorted(dist.get_process_group_ranks(handle)))
            known = self._groups[id(handle)] = handle, self._comm.adopt(ranks, handle)  # keeps it alive
            if handle.group_desc.startswith("mesh_"):
                self._axes[known[1].name] = handle.group_desc.removeprefix("mesh_")
                path = self._record.folder / f"rank{self._comm.rank}.axes"
                write_whole(path, json.dumps(self._axes).encode())
        return known[1]

    def _text(self, tensors: list[torch.Tensor]) -> str:
        """Describe the tensors of a call: "float32[4] and 2 more"."""
        key = tensors[0].dtype, tensors[0].shape
        if key not in self._texts:
            self._texts[key] = f"{str(key[0]).removeprefix('torch.')}{list(key[1])}"
        return self._texts[key] if len(tensors) == 1 else f"{self._texts[key]} and {len(tensors) - 1} more"


@cache
def place_of_group(name: str) -> int:
    """Return which argument of an operator is the process group; -1 for none."""
    arguments = getattr(torch.ops.c10d, name).default._schema.arguments
    return next((i for i, argument in enumerate(arguments) if argument.name == "process_group"), -1)


def _uneven_parts(args: Sequence[Any], tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the bytes that an all-to-all sends to each member of its group; [] if all get equally many.

    `alltoall_` has a list of tensors, one per member; `alltoall_base_` one tensor, and the rows for each member in its
    fifth argument, which is empty for equal parts.

    >>> rows = torch.zeros(5, 2)
    >>> _uneven_parts([rows, rows, None, [5], [4, 1]], [rows]), _uneven_parts([rows, rows, None, [], []], [rows])
    ([32, 8], [])
    """
    if len(tensors) == 1 and len(args) > 4 and isinstance(args[4], Sequence):
        parts = [tensors[0].nbytes // max(1, tensors[0].shape[0]) * rows for rows in args[4]]
    else:
        parts = [tensor.nbytes for tensor in tensors]
    return parts if len(set(parts)) > 1 else []


def _payload(tensors: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors in an argument, which is a tensor, a list of them or a list of lists."""
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    return [tensor for inner in tensors for tensor in _payload(inner)]


# ---- a program's own calls, compared ---------------------------------------------------------------------------


@contextmanager
def compare_calls(comm: Communicator, checks: CallChecks | None = None) -> Iterator[None]:
    """Within the block, compare the program's own calls of torch.distributed with its peers', as those of `ctx.comm`.

    Calls by DDP, FSDP, DTensor or a DeviceMesh are neither recorded nor kept alive. `checks` is by default that of
    `comm`, the communicator of all ranks; without any, as between machines, this does nothing.
    """
    checks = checks or comm.wire.checks
    if checks is None or comm.world_size == 1:
        yield
        return
    completion = Completion(comm.wire.record)
    communication = Communication(comm, completion, SourceLines(), Annotations(), checks, direct_only=True)
    completion.install()
    communication.install()
    try:
        yield
    finally:
        communication.uninstall()
        completion.uninstall()


class ComparedFunction:
    """A rank's function, under its own name, whose calls of torch.distributed are compared."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__name__ = getattr(function, "__name__", type(function).__name__)

    def __call__(self, context: Context, *args: Any) -> Any:
        """Call the function on this rank; if it passes a group to a collective, say how to call one."""
        try:
            with compare_calls(context.comm):
                return self.function(context, *args)
        except TypeError as error:
            if call := re.match(
                r"Communicator\.(\w+)\(\) (got an unexpected keyword argument 'group'"
                r"|(?<!barrier\(\) )(?<!send\(\) )(?<!recv\(\) )(?<!group\(\) )takes)",
                str(error),
            ):
                error.args = (
                    f"{error}. A collective is among the ranks of the communicator that is called: "
                    f"pair = ctx.comm.group([0, 1]), and pair.{call[1]}(...) on its ranks",
                )
            raise
