"""Whether two ranks' calls match, and what to say if they do not.

IssuedCall    a communication as one rank issued it, found in its trace by group and number
fits          compares kind, root, dtype, shape and reduction of a collective, or dtype and shape of a message
why_not       says in one sentence which ranks and lines do not match, and what would work
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpkit.trace.files import RankTrace
from mpkit.trace.records import LAYER, Kind

SHARDED = (
    "ZeRO-3 gathers a layer's parameters when the layer is called, and sums its gradients after its backward: all "
    "ranks call the same layers in the same order. Where samples decide which layers are called (a branch, an expert "
    "in a module of its own), zero=2 keeps parameters whole; or call the "
    "layer in any case, of no samples, layer(x[:0]), where there are none for it."
)
"""The advice if ranks call different layers whose parameters are sharded."""

ROOT_ARGUMENT = {Kind.BROADCAST: "src", Kind.SCATTER: "src", Kind.REDUCE: "dst", Kind.GATHER: "dst"}
"""The name of the argument for the root."""

FIRST_COMM, LAST_COMM = 32, 63


@dataclass(frozen=True)
class IssuedCall:
    """A communication that a rank issued."""

    rank: int
    kind: Kind  # WAIT for the creation of a group, which takes a number among all ranks' collectives
    group: str  # as the trace spells it: "0,1,2,3", or "0>1#tag" for a message
    number: int  # of the call in that group
    peer: int  # the root of a collective, the other end of a message, or -1
    text: str  # the arguments, such as 'float32[4], op="sum"'; "" in a training, which does not record them
    nbytes: int  # of the payload
    where: str  # the line that issued it, such as "file.py:12 in function"
    layer: str = ""  # whose parameters or gradients it sends, if known

    @classmethod
    def from_record(cls, rank: int, trace: RankTrace, op: Any) -> IssuedCall:
        """Make an `IssuedCall` from a record of a rank's trace."""
        text = trace.name(int(op["name"]))
        return cls(
            rank, Kind(int(op["kind"])), trace.name(int(op["group"])), int(op["number"]), int(op["peer"]),
            "" if text.startswith(LAYER) else text, int(op["bytes"]), trace.name(int(op["where"])),
            text.removeprefix(LAYER) if text.startswith(LAYER) else "",
        )  # fmt: skip

    def __str__(self) -> str:
        """Name the communication: "recv from rank 0 (tag 3, number 0)"."""
        if self.is_message:
            towards = "to" if self.kind == Kind.SEND else "from"
            return f"{self.kind.word} {towards} rank {self.peer} (tag {self.tag}, number {self.number})"
        what = self.call if self.kind == Kind.WAIT else self.kind.word
        return f"{what} number {self.number} of ranks {self.group}"

    @property
    def tag(self) -> str:
        """The tag of a message."""
        return self.group.split("#")[-1]

    @property
    def is_message(self) -> bool:
        """Whether this is one end of a message."""
        return self.kind in (Kind.SEND, Kind.RECV)

    @property
    def tensor_text(self) -> str:
        """The dtype and shape of its tensor, or at least its size."""
        return self.text or f"{self.nbytes:,} bytes{f' of {self.layer}' * bool(self.layer)}"

    @property
    def call(self) -> str:
        """The call as a user would write it: all_reduce(float32[4], op="sum")."""
        if self.kind == Kind.WAIT:
            return f"group({self.text})"
        if self.kind == Kind.BARRIER:
            return "barrier()"
        root = f", {ROOT_ARGUMENT[self.kind]}={self.peer}" if self.kind in ROOT_ARGUMENT else ""
        return f"{self.kind.word}({self.tensor_text}{root})"

    @property
    def is_sharding(self) -> bool:
        """Whether ZeRO made the call, for a layer."""
        return "mpkit/strategies/replicas/" in self.where

    @property
    def line(self) -> str:
        """The line alone: " at file.py:12"."""
        return self.place_text.rpartition(" in ")[0]

    @property
    def place_text(self) -> str:
        """The line and its function: " at file.py:12 in function"; "" if they are not known."""
        return f" at {self.where}" if self.where else ""


def find_issued(rank: int, trace: RankTrace, group: str, number: int) -> IssuedCall | None:
    """Return the `number`-th communication of `group` on this rank; None if it has not got there."""
    ops = trace.ops
    kind = ops["kind"]
    issues = ((kind >= FIRST_COMM) & (kind <= LAST_COMM)) | (kind == Kind.WAIT)
    for op in ops[np.flatnonzero((ops["number"] == number) & issues)]:
        if trace.name(int(op["group"])) == group:
            return IssuedCall.from_record(rank, trace, op)
    return None


def fits(a: IssuedCall, b: IssuedCall) -> bool:
    """Return whether two ranks' ends of one communication match: by size, if dtype and shape were not recorded."""
    same = a.text == b.text if a.text and b.text else a.nbytes == b.nbytes
    if a.is_message or b.is_message:
        return same
    return same and a.kind == b.kind and (a.kind not in ROOT_ARGUMENT or a.peer == b.peer)


def why_not(a: IssuedCall, b: IssuedCall) -> str:
    """Explain why two ranks' ends of one communication do not match, on which lines, and what would work.

    >>> sent = IssuedCall(0, Kind.SEND, "0>1#0", 0, 1, "int64[2]", 16, "train.py:3 in step")
    >>> received = IssuedCall(1, Kind.RECV, "0>1#0", 0, 0, "float32[4]", 16, "train.py:7 in step")
    >>> print(why_not(sent, received))
    rank 1 receives float32[4] at train.py:7 what rank 0 sent as int64[2] at train.py:3. Receive into a buffer of the
    dtype and shape that is sent, such as ctx.comm.recv(torch.empty(2, dtype=torch.int64), src=0).
    """
    if a.is_message:
        sent, received = (a, b) if a.kind == Kind.SEND else (b, a)
        return (
            f"rank {received.rank} receives {received.tensor_text}{received.line} what rank {sent.rank} sent as "
            f"{sent.tensor_text}{sent.line}. {_message_advice(sent, received)}"
        )
    return (
        f"rank {a.rank} calls {a.call}{a.line}, where rank {b.rank} calls {b.call}{b.line}: both are call number "
        f"{a.number} of ranks {a.group}. {_collective_advice(a, b)}"
    )


def _message_advice(sent: IssuedCall, received: IssuedCall) -> str:
    tensor, buffer = _Tensor.parse(sent.text), _Tensor.parse(received.text)
    if tensor is None or buffer is None:
        return "A receive buffer has the dtype and shape of what is sent."
    tag = sent.tag
    named = "" if tag == "0" else f", tag={tag}" if tag.isdigit() else f", tag={tag!r}"
    such = f"such as ctx.comm.recv({tensor.empty}, src={sent.rank}{named})"
    if tensor.dtype == buffer.dtype and tensor.numel == buffer.numel:
        return f"They have as many elements, in another shape: receive into that shape, {such}, and view it afterwards."
    return f"Receive into a buffer of the dtype and shape that is sent, {such}."


def _collective_advice(a: IssuedCall, b: IssuedCall) -> str:
    if a.is_sharding and b.is_sharding:
        return SHARDED
    if Kind.WAIT in (a.kind, b.kind):
        return (
            "Every rank of the run makes the same groups, members or not, in the same order and before or after the "
            "same collectives of all ranks."
        )
    if a.kind != b.kind:
        return (
            "All ranks of a group call the same collectives in the same order: look for the branch, or the loop, in "
            "which these two part."
        )
    if a.kind in ROOT_ARGUMENT and a.peer != b.peer:
        name = ROOT_ARGUMENT[a.kind]
        return f"All ranks name the same root, such as {name}={min(a.peer, b.peer)}."
    if a.kind == Kind.ALL_TO_ALL and a.text == b.text:
        return (
            "One sends another number of rows than the other's receives= says. Ranks learn how many come from each by "
            "ctx.comm.all_to_all(torch.tensor(sends)).tolist()."
        )
    mine, theirs = _Tensor.parse(a.text), _Tensor.parse(b.text)
    if mine is None or theirs is None:
        return "All ranks call it with tensors of one size."
    if mine.dtype != theirs.dtype:
        return f"All ranks give one dtype: tensor.to(torch.{theirs.dtype}) on rank {a.rank}, for one."
    if mine.group != theirs.group and (mine.shape, mine.reduction) == (theirs.shape, theirs.reduction):
        return (
            "They are of two groups of the same ranks: all ranks use groups that share ranks in the same order, as "
            "NCCL demands. One group of these ranks is enough."
        )
    if mine.reduction != theirs.reduction:
        return f'All ranks name the same reduction, such as op="{theirs.reduction}".'
    if a.kind in (Kind.BROADCAST, Kind.SCATTER):
        root = mine if a.rank == a.peer else theirs
        return f"All ranks give a tensor of the root's shape; those that only receive, {root.empty}."
    if mine.numel == theirs.numel:
        return "All ranks give one shape, not only as many elements: tensor.reshape(...) or .t() makes it so."
    return (
        "All ranks give one shape: does one of them bring another tensor? Where lengths differ on purpose, pad the "
        "shorter ones to the longest."
    )


@dataclass(frozen=True)
class _Tensor:
    """A tensor as `IssuedCall.text` describes it."""

    dtype: str
    shape: tuple[int, ...]
    reduction: str
    group: str

    @classmethod
    def parse(cls, text: str) -> _Tensor | None:
        match = re.fullmatch(r'(\w+)\[([\d, ]*)\](?:, op="(\w+)")?(?:, group="(\w*)")?', text)
        if match is None:
            return None
        dtype, sizes, reduction, group = match.groups()
        shape = tuple(int(size) for size in sizes.split(",") if size.strip())
        return cls(dtype, shape, reduction or "", group or "")

    @property
    def numel(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def empty(self) -> str:
        """Python code that makes an empty tensor like this."""
        shape = str(self.shape[0]) if len(self.shape) == 1 else str(self.shape)
        dtype = "" if self.dtype == "float32" else f", dtype=torch.{self.dtype}"
        return f"torch.empty({shape}{dtype})"
