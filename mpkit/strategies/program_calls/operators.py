"""What each of c10d's operators does.

Every collective and message of a program is one of them, whether Python, DDP's reducer in C++, FSDP2 or a functional
collective has issued it.

Payloads count as in the kit's own traces, which is as NCCL's documentation counts them: the whole tensor that is
gathered or scattered, not a rank's part of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from mpkit.trace import Kind

__all__ = ["OPERATORS", "C10dOperator", "payload", "uneven_parts"]


class C10dOperator(NamedTuple):
    """One of c10d's operators.

    Attributes:
        kind: what it does.
        tensors: which argument holds the tensors that make up the payload.
        peer: which argument names the other end of a message or the root, a rank of the group; -1: none does.
        per_rank: whether that argument is one rank's part, so that the payload is as many of it as there are ranks.
        tag: which argument is a message's tag; -1: none is.
        reduces: which argument is the reduction; -1: none is.
    """

    kind: Kind
    tensors: int = 0
    peer: int = -1
    per_rank: bool = False
    tag: int = -1
    reduces: int = -1


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


def uneven_parts(args: Sequence[Any], tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the bytes that an all-to-all sends to each member of its group; [] if all get as many.

    Args:
        args: of the operator: `alltoall_` has a list of tensors, one per member; `alltoall_base_` one tensor, and the
            rows for each member in its fifth argument, which is empty if they are as many.
        tensors: the payload.

    >>> rows = torch.zeros(5, 2)
    >>> uneven_parts([rows, rows, None, [5], [4, 1]], [rows]), uneven_parts([rows, rows, None, [], []], [rows])
    ([32, 8], [])
    """
    if len(tensors) == 1 and len(args) > 4 and isinstance(args[4], Sequence):
        parts = [tensors[0].nbytes // max(1, tensors[0].shape[0]) * rows for rows in args[4]]
    else:
        parts = [tensor.nbytes for tensor in tensors]
    return parts if len(set(parts)) > 1 else []


def payload(tensors: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors in an argument, which is a tensor, a list of them or a list of lists.

    >>> [tensor.nbytes for tensor in payload([[torch.zeros(2)], [torch.zeros(3)]])]
    [8, 12]
    """
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    return [
        tensor
        for inner in tensors
        for tensor in ((inner,) if isinstance(inner, torch.Tensor) else payload(inner))
    ]
