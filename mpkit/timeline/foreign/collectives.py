"""Which communication an event is: its kind, its group, its payload and its number in the group.

    names       PyTorch's, NCCL's and RCCL's words for each kind
    metadata    what `record_param_comms` and NCCL's kernels say since torch 2.2
    shapes      the payload where there is no metadata, from the shapes of the inputs

Payloads count as in the kit's own traces, which is as NCCL's documentation counts them: the whole tensor that is
gathered or scattered.

Source: torch/csrc/distributed/c10d/ParamCommsUtils.hpp for the names of the metadata.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from mpkit.trace import Kind

__all__ = ["CollectiveCall", "call_of", "communicates", "kind_of", "members_of", "payload_of_shapes"]

_KINDS = {
    "allreduce": Kind.ALL_REDUCE, "allgather": Kind.ALL_GATHER, "reducescatter": Kind.REDUCE_SCATTER,
    "crossdevicereduce": Kind.ALL_REDUCE, "quickreduce": Kind.ALL_REDUCE, "deepep": Kind.ALL_TO_ALL,
    "ep::internode": Kind.ALL_TO_ALL, "ep::intranode": Kind.ALL_TO_ALL,
    "broadcast": Kind.BROADCAST, "alltoall": Kind.ALL_TO_ALL, "barrier": Kind.BARRIER, "gather": Kind.GATHER,
    "scatter": Kind.SCATTER, "reduce": Kind.REDUCE, "sendrecv": Kind.ALL_TO_ALL, "send": Kind.SEND, "recv": Kind.RECV,
}  # fmt: skip
"""By the word without underscores; a longer word comes before one that it contains."""

_BYTES = {
    "double": 8, "float64": 8, "long": 8, "long int": 8, "int64": 8, "float": 4, "float32": 4, "int": 4, "int32": 4,
    "half": 2, "c10::half": 2, "bfloat16": 2, "c10::bfloat16": 2, "short": 2,
}  # fmt: skip
_KERNEL = re.compile(
    r"^(?!triton_).*?(?:nccl(?:Dev)?Kernel|rccl|oneccl|hccl|mscclKernel|mscclpp|nvshmem|"
    r"deep_ep::(?!layout)|\bep::int(?:er|ra)node|cross_device_reduce|quickreduce|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|nccl.*SendRecv)",
    re.I | re.S,
)
"""NCCL, its kin, DeepEP and NVSHMEM, and the all-reduces that inference engines write themselves. Inductor names its
own kernels after the operators that they are fused from, so those compute."""
_ENDS = re.compile(r"([0-9]{1,6})\s*(->|<-)\s*([0-9]{1,6})")


class CollectiveCall(NamedTuple):
    """One communication as one rank sees it.

    Attributes:
        kind: what it does; None for what is no communication, such as a wait.
        nbytes: its payload; 0 if unknown.
        members: the ranks of its group, ascending; empty if unknown.
        peer: the other end of a message or the root, as a rank of the group; -1: none or unknown.
        dtype, elements: of the payload; "" and 0 if unknown.
        sequence: the number that the backend gave it; -1: unknown.
        axis: the name of the mesh axis that the group was made for; "" if unknown.
        parts: of an all-to-all of uneven parts, the bytes for each of the members; empty if they are equal or unknown.
    """

    kind: Kind | None
    nbytes: int = 0
    members: tuple[int, ...] = ()
    peer: int = -1
    dtype: str = ""
    elements: int = 0
    sequence: int = -1
    axis: str = ""
    parts: tuple[int, ...] = ()


def kind_of(name: str) -> Kind | None:
    """Return the kind that a collective's or a kernel's name tells; None if it tells none.

    >>> kind_of("_allgather_base"), kind_of("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgs)")
    (<Kind.ALL_GATHER: 35>, <Kind.REDUCE_SCATTER: 36>)
    >>> kind_of("wait"), kind_of("ncclDevKernel_Generic")
    (None, None)
    """
    word = name.lower().replace("_", "")
    return next((kind for known, kind in _KINDS.items() if known in word), None)


def communicates(name: str) -> bool:
    """Say whether a kernel's name is one of a library for communication.

    >>> communicates("ncclKernel_AllReduce_RING_LL_Sum_float"), communicates("vectorized_elementwise_kernel")
    (True, False)
    >>> communicates("void deep_ep::internode::combine<2>()"), communicates("triton_poi_fused_all_gather_into_tensor_3")
    (True, False)
    """
    return _KERNEL.match(name) is not None


def call_of(
    args: Mapping[str, Any], groups: Mapping[str, tuple[int, ...]], axes: Mapping[str, str]
) -> CollectiveCall:
    """Return the communication that metadata describes.

    Args:
        args: the arguments of a `record_param_comms` or of a kernel.
        groups: the ranks of each process group of `distributedInfo`, by name.
        axes: the mesh axes of these groups, by name.

    >>> call_of({"Collective name": "allreduce", "dtype": "Float", "In msg nelems": 4, "Out msg nelems": 4,
    ...          "Process Group Ranks": "[0, 1]"}, {}, {})[:3]
    (<Kind.ALL_REDUCE: 34>, 16, (0, 1))
    """
    name = str(args.get("Collective name", ""))
    elements = max(int(args.get("In msg nelems", 0) or 0), int(args.get("Out msg nelems", 0) or 0), 0)
    dtype = str(args.get("dtype", ""))
    members = members_of(args, groups)
    kind = kind_of(name)
    splits = _splits_of(args) if kind == Kind.ALL_TO_ALL else ()
    if len(splits) != len(members) or not sum(splits):
        splits = ()
    else:  # the payload is what this rank sends
        elements = max(int(args.get("In msg nelems", 0) or 0), 0)
    parts = tuple(elements * _size(dtype) * rows // sum(splits) for rows in splits)
    peer = -1
    if kind in (Kind.SEND, Kind.RECV):
        peer = int(args.get("Dst Rank" if kind == Kind.SEND else "Src Rank", -1))
    group = str(args.get("Process Group Name", ""))
    said = str(args.get("Process Group Description", ""))
    axis = said.removeprefix("mesh_") if said.startswith("mesh_") else axes.get(group, "")
    return CollectiveCall(
        kind, elements * _size(dtype), members, peer, dtype.lower(), elements, int(args.get("Seq", -1)), axis, parts
    )  # fmt: skip


def _splits_of(args: Mapping[str, Any]) -> tuple[int, ...]:
    """Return how many rows an all-to-all sends to each rank of its group; none if they are equal, or cut short.

    >>> _splits_of({"In split size": "[3, 0, 5]"}), _splits_of({"In split size": "[3, 0, ..., 5]"})
    ((3, 0, 5), ())
    """
    listed = args.get("In split size", "")
    text = listed if isinstance(listed, str) else json.dumps(listed)
    if not re.fullmatch(r"\[[0-9]{1,15}(?:, *[0-9]{1,15})*\]", text):
        return ()
    return tuple(int(number) for number in re.findall("[0-9]+", text))


def members_of(args: Mapping[str, Any], groups: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Return the ranks of the group of a communication: as listed, as counted, or as the file's header has them.

    >>> members_of({"Process Group Ranks": "[0, 4, ...]", "Global rank start": 0, "Global rank stride": 4,
    ...             "Group size": 3}, {})
    (0, 4, 8)
    """
    listed = args.get("Process Group Ranks", "")
    text = listed if isinstance(listed, str) else json.dumps(listed)
    size = int(args.get("Group size", 0) or 0)
    ranks = tuple(sorted(int(number) for number in re.findall(r"(?<!\d)[0-9]{1,6}(?!\d)", text)))
    if ranks and "..." not in text and len(ranks) >= size:
        return ranks
    known = groups.get(str(args.get("Process Group Name", "")), ())
    if known:
        return known
    stride = int(args.get("Global rank stride", 0) or 0)
    if size and stride > 0 and int(args.get("Global rank start", -1)) >= 0:
        first = int(args["Global rank start"])
        return tuple(range(first, first + size * stride, stride))
    return ranks


def payload_of_shapes(args: Mapping[str, Any], dtype: str = "") -> tuple[int, int, str]:
    """Return bytes, elements and dtype of the largest tensor (or list of tensors) among an operator's inputs.

    >>> payload_of_shapes({"Input Dims": [[[3, 4], [2]], []], "Input type": ["TensorList", "Scalar"]}, "float")
    (56, 14, 'float')
    >>> payload_of_shapes({"Input Dims": [[16], [8]], "Input type": ["float", "float"]})
    (64, 16, 'float')
    """
    types = [str(each) for each in args.get("Input type", ()) if _size(str(each))]
    dtype = dtype or (types[0] if types else "")
    elements = max((_elements(shape) for shape in args.get("Input Dims", ())), default=0)
    return elements * _size(dtype), elements, dtype.removeprefix("c10::").lower()


def ends_of(name: str) -> tuple[int, int] | None:
    """Return sender and receiver from an annotation such as "nccl:recv 0<-1", as ranks of the group.

    >>> ends_of("nccl:recv 0<-1"), ends_of("nccl:all_reduce")
    ((1, 0), None)
    """
    found = _ENDS.search(name)
    if found is None:
        return None
    one, way, other = int(found[1]), found[2], int(found[3])
    return (one, other) if way == "->" else (other, one)


def _elements(shape: Any) -> int:
    if not isinstance(shape, Sequence) or isinstance(shape, str) or not shape:
        return 0
    if isinstance(shape[0], Sequence):
        return sum(_elements(each) for each in shape)
    return prod(int(length) for length in shape)


def _size(dtype: str) -> int:
    word = dtype.lower()
    if word in _BYTES:
        return _BYTES[word]
    return 1 if re.match(r"byte|char|bool|u?int8|signed char|unsigned char|(c10::)?float8", word) else 0
