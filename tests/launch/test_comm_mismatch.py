"""Communication that does not fit is an error with both ranks and both lines; what fits goes through unharmed.

Programs are drawn at random: calls that all ranks make, and in between one or two in which two of the ranks part.
"""

from __future__ import annotations

import linecache
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import mpkit as mk
from mpkit.launch.hang import hang

FEW, ALL = 12, 200
"""Programs that `make test` draws, and `make soak`."""

DTYPES = ["float32", "float64", "int32", "int64", "bfloat16", "uint8", "float16"]
ROOTED = {"broadcast": "src", "scatter": "src", "reduce": "dst", "gather": "dst"}
KINDS = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", *ROOTED, "barrier"]
WITH_TENSOR = KINDS[:-1]


@dataclass
class Draw:
    """Calls of one program, as lines of Python."""

    random: random.Random
    ranks: int
    groups: list[list[int]] = field(default_factory=list)

    def shape(self) -> list[int]:
        """Divisible in the first dimension by every size of a group."""
        return [
            12 * self.random.randint(1, 2),
            *(self.random.randint(1, 3) for _ in range(self.random.randint(0, 2))),
        ]

    def tensor(self, **fixed: object) -> str:
        shape, dtype = fixed.get("shape") or self.shape(), fixed.get("dtype") or self.random.choice(DTYPES)
        strided = self.random.random() < 0.2 and len(shape) > 1  # type: ignore[arg-type]
        if strided:  # the same shape, other strides
            return f"torch.ones({shape[::-1]}, dtype=torch.{dtype}).permute({list(range(len(shape)))[::-1]})"  # type: ignore[index]
        return f"torch.ones({shape}, dtype=torch.{dtype})"

    def collective(
        self, kind: str, tensor: str, *, root: int = 0, op: str = "sum", group: str = "None"
    ) -> str:
        if kind == "barrier":
            return f"ctx.comm.barrier({group})"
        arguments = [tensor]
        if kind in ROOTED:
            arguments.append(f"{ROOTED[kind]}={root}")
        if kind == "all_reduce" and op != "sum":
            arguments.append(f"op={op!r}")
        arguments.append(f"group={group}")
        asynchronous = kind in ("all_reduce", "all_gather", "reduce_scatter") and self.random.random() < 0.3
        call = f"ctx.comm.{kind}({', '.join(arguments)}{', async_op=True' * asynchronous})"
        return call + ".wait()" * asynchronous


Pair = tuple[list[str], list[str]]
"""The calls of the rank that parts from the others, and theirs."""


def other(draw: Draw, values: list[str], value: str) -> str:
    return draw.random.choice([each for each in values if each != value])


def kind(draw: Draw) -> Pair:
    one = draw.random.choice(KINDS)
    tensor = draw.tensor()
    return tuple([draw.collective(each, tensor)] for each in (one, other(draw, KINDS, one)))  # type: ignore[return-value]


def dtype(draw: Draw) -> Pair:
    one, shape = draw.random.choice(DTYPES), draw.shape()
    what = draw.random.choice(WITH_TENSOR)
    tensors = (draw.tensor(shape=shape, dtype=each) for each in (one, other(draw, DTYPES, one)))
    return tuple([draw.collective(what, tensor)] for tensor in tensors)  # type: ignore[return-value]


def shape(draw: Draw) -> Pair:
    """Another number of elements, or as many in another shape."""
    one = [*draw.shape(), 2]
    another = draw.random.choice(
        [[*one[:-1], 4], [one[0] * 2, *one[1:]], [one[0] * 2, *one[1:-1]], [*one, 1]]
    )
    what, name = draw.random.choice(WITH_TENSOR), draw.random.choice(DTYPES)
    return tuple([draw.collective(what, draw.tensor(shape=each, dtype=name))] for each in (one, another))  # type: ignore[return-value]


def op(draw: Draw) -> Pair:
    ops = ["sum", "mean", "max", "min"]
    one, tensor = draw.random.choice(ops), draw.tensor(dtype="float32")
    return tuple([draw.collective("all_reduce", tensor, op=each)] for each in (one, other(draw, ops, one)))  # type: ignore[return-value]


def root(draw: Draw) -> Pair:
    what, tensor = draw.random.choice(list(ROOTED)), draw.tensor()
    roots = draw.random.sample(range(draw.ranks), 2)
    return tuple([draw.collective(what, tensor, root=each)] for each in roots)  # type: ignore[return-value]


def order(draw: Draw) -> Pair:
    one = draw.collective(draw.random.choice(KINDS), draw.tensor())
    two = draw.collective("all_reduce", "torch.ones(5)")
    return [one, two], [two, one]


def group(draw: Draw) -> Pair:
    """The same group is made, and another, in another order; then a collective in each."""
    tensor = draw.tensor()
    calls = [draw.collective("all_reduce", tensor, group=each) for each in ("pair", "None")]
    return calls, calls[::-1]


def groups_made(draw: Draw) -> Pair:
    calls = ["ctx.comm.group([0])", "ctx.comm.group([1])"]
    return draw.random.choice(
        [(calls[:1], calls[1:]), (calls, calls[::-1]), (calls[:1], ["ctx.comm.barrier()"])]
    )


def message(draw: Draw) -> Pair:
    """From the rank that parts (`here`) to another (`there`), or back."""
    one, name, tag = draw.shape(), draw.random.choice(DTYPES), draw.random.choice(["0", "3", "'F2'"])
    sent = draw.tensor(shape=one, dtype=name)
    what = draw.random.choice(["dtype", "shape", "length", "tag", "crossed"])
    if what == "dtype":
        buffer, to = f"torch.zeros({one}, dtype=torch.{other(draw, DTYPES, name)})", tag
    elif what == "shape":
        buffer, to = f"torch.zeros({[1, *one]}, dtype=torch.{name})", tag
    elif what == "length":
        buffer, to = f"torch.zeros({[one[0] * 2, *one[1:]]}, dtype=torch.{name})", tag
    else:
        buffer, to = f"torch.zeros({one}, dtype=torch.{name})", "7" if what == "tag" else tag
    wait = draw.random.choice(["", "i"])
    end = ".wait()" if wait else ""
    send = f"ctx.comm.{wait}send({sent}, PEER, tag={tag}){end}"
    recv = f"ctx.comm.{wait}recv({buffer}, PEER, tag={to}){end}"
    if what == "crossed":
        return [recv, send], [recv, send]
    return draw.random.choice([([send], [recv]), ([recv], [send])])


MISMATCHES: list[Callable[[Draw], Pair]] = [
    kind, dtype, shape, op, root, order, group, groups_made, message, message,
]  # fmt: skip


@dataclass
class Program:
    """A function for `Cluster.run`, and the lines at which two ranks part."""

    source: str
    ranks: int
    here: int
    there: list[int]
    lines: tuple[list[int], list[int]]

    def function(self, name: str) -> Callable[..., object]:
        linecache.cache[name] = (len(self.source), None, self.source.splitlines(keepends=True), name)
        space: dict[str, Callable[..., object]] = {}
        exec(compile(self.source, name, "exec"), {"torch": torch}, space)
        return space["program"]


def program(number: int) -> Program:
    draw = Draw(random.Random(number), 0)
    mismatch = MISMATCHES[number % len(MISMATCHES)]
    draw.ranks = draw.random.randint(3 if mismatch is group else 2, 4)  # of 2 ranks, the pair is all
    here, there = draw.random.sample(range(draw.ranks), 2)
    common = [
        draw.collective(draw.random.choice(KINDS), draw.tensor()) for _ in range(draw.random.randint(0, 3))
    ]
    mine, theirs = mismatch(draw)
    lines = ["def program(ctx):", f"    pair = ctx.comm.group([{min(here, there)}, {max(here, there)}])"]
    lines += [f"    {call}" for call in common]
    lines.append(f"    if ctx.rank == {here}:")
    first = len(lines)
    lines += [f"        {call}".replace("PEER", str(there)) for call in mine]
    second = len(lines) + 1
    alone = mismatch in (message, group)  # a matter between two
    lines.append(f"    elif ctx.rank == {there}:" if alone else "    else:")
    lines += [f"        {call}".replace("PEER", str(here)) for call in theirs]
    end = len(lines)
    if mismatch is group:  # the others are members of one of both groups
        lines += ["    else:", f"        {next(call for call in mine if 'group=None' in call)}"]
    lines.append("    ctx.comm.barrier()")
    return Program(
        "\n".join(lines) + "\n", draw.ranks, here,
        [there] if alone else [rank for rank in range(draw.ranks) if rank != here],
        (list(range(first + 1, second)), list(range(second + 1, end + 1))),
    )  # fmt: skip


@pytest.mark.parametrize(
    "number", [*range(FEW), *(pytest.param(i, marks=pytest.mark.soak) for i in range(FEW, ALL))]
)
def test_two_ranks_part(
    clusters: Callable[[int], mk.Cluster], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hang, "WAITING", 1e6)  # no time-out ends it
    drawn = program(number)
    name = f"<program {number}>"
    launch = clusters(drawn.ranks).launch(drawn.function(name), ())
    launch.finish()
    with pytest.raises((mk.errors.CommMismatch, mk.errors.Deadlock)) as caught:
        launch.results()
    says = str(caught.value)
    for ranks, lines in (([drawn.here], drawn.lines[0]), (drawn.there, drawn.lines[1])):
        assert any(f"rank {rank} " in says for rank in ranks), (says, drawn.source)
        assert any(f"{name}:{line}" in says for line in lines), (says, drawn.source)
    if isinstance(caught.value, mk.errors.CommMismatch):
        assert {caught.value.rank, caught.value.other} & {drawn.here}, says
        assert "Traceback" not in says and "\n" not in says
    else:
        assert "Why:" in says, says


@pytest.mark.parametrize(
    "number", [*range(3), *(pytest.param(i, marks=pytest.mark.soak) for i in range(3, ALL // 10))]
)
def test_ranks_that_agree(clusters: Callable[[int], mk.Cluster], number: int) -> None:
    """Other strides, other tensors, other lines on each rank; 0-dim, empty, complex and bool; messages that cross."""
    draw = Draw(random.Random(number), 2 + number % 3)
    calls = [draw.collective(draw.random.choice(KINDS), draw.tensor()) for _ in range(6)]
    calls += [
        "ctx.comm.all_gather(torch.tensor(1.0))",
        "ctx.comm.all_reduce(torch.ones(2, dtype=torch.complex64))",
        "ctx.comm.broadcast(torch.ones(2, dtype=torch.bool))",
        "ctx.comm.all_reduce(torch.ones(3).expand(2, 3).clone() if ctx.rank else torch.ones(3, 2).t())",
        "ctx.comm.all_gather(torch.empty(0, 3))",
    ]
    draw.random.shuffle(calls)
    lines = [
        "def program(ctx):",
        "    pair = ctx.comm.group([0, 1])",
        "    right = (ctx.rank + 1) % ctx.world_size",
    ]
    for call in calls:
        lines += ["    if ctx.rank == 0:", f"        {call}", "    else:", f"        {call}"]
    lines += [
        "    sent = [ctx.comm.isend(torch.full((2,), i), right, tag=i) for i in range(3)]",
        "    left = (ctx.rank - 1) % ctx.world_size",
        "    got = [ctx.comm.recv(torch.zeros(2, dtype=torch.int64), left, tag=i).tolist() for i in (2, 0, 1)]",
        "    for work in sent: work.wait()",
        "    return got",
    ]
    drawn = Program("\n".join(lines) + "\n", draw.ranks, 0, [], ([], []))
    got = clusters(draw.ranks).run(drawn.function(f"<agreed {number}>"))
    assert got == [[[2, 2], [0, 0], [1, 1]]] * draw.ranks


def test_more_calls_than_were_made_room_for(clusters: Callable[[int], mk.Cluster]) -> None:
    """The files of what ranks publish grow; a rank that runs ahead of the others grows them for all."""

    def fn(ctx):  # type: ignore[no-untyped-def]
        other = 1 - ctx.rank
        works = [ctx.comm.isend(torch.ones(1), other, tag=i % 7) for i in range(1200)]
        for i in range(1200):
            ctx.comm.recv(torch.zeros(1), other, tag=i % 7)
        for work in works:
            work.wait()
        for work in [ctx.comm.all_reduce(torch.ones(1), async_op=True) for _ in range(1200)]:
            work.wait()
        ctx.comm.all_reduce(torch.ones(1 + ctx.rank))

    with pytest.raises(
        mk.errors.CommMismatch, match=r"call number 1200 of ranks 0,1\. All ranks give one shape"
    ):
        clusters(2).run(fn)


def test_a_call_of_torch_distributed_names_its_line(clusters: Callable[[int], mk.Cluster]) -> None:
    """Of torch.distributed itself: compared with the peer's, or refused by torch."""

    def compared(ctx):  # type: ignore[no-untyped-def]
        if ctx.rank:
            torch.distributed.recv(torch.zeros(1), 0)
        else:
            torch.distributed.send(torch.tensor([5]), 1)

    def refused(ctx):  # type: ignore[no-untyped-def]
        torch.distributed.broadcast(torch.ones(1), 7)

    with pytest.raises(
        mk.errors.CommMismatch, match=r"rank 1 receives float32\[1\] at .* sent as int64\[1\]"
    ) as caught:
        clusters(2).run(compared)
    line = compared.__code__.co_firstlineno + 2
    assert f"test_comm_mismatch.py:{line} what rank 0 sent" in str(caught.value)
    with pytest.raises(mk.RankFailed, match="invalid root rank: 7") as caught:
        clusters(2).run(refused)
    assert "in refused" in str(caught.value) and "distributed_c10d" not in str(caught.value)


def test_the_nearest_message_explains_a_deadlock(clusters: Callable[[int], mk.Cluster]) -> None:
    def fn(ctx):  # type: ignore[no-untyped-def]
        if ctx.rank:
            ctx.comm.recv(torch.zeros(3), 0, tag="F4")
        else:
            ctx.comm.send(torch.zeros(3), 1, tag="F3")

    with pytest.raises(
        mk.errors.Deadlock, match=r"rank 0 never sent it: it waits in send to rank 1 .tag F3"
    ) as caught:
        clusters(2).run(fn)
    assert "Instead it sent float32[3] to rank 1 with tag F3" in str(caught.value)
    assert "only slow" not in str(caught.value)


def two_groups(ctx: Any, crossed: bool) -> list[float]:
    first, second = ctx.comm.group([0, 1]), ctx.comm.group([0, 1])
    order = (second, first) if crossed and ctx.rank else (first, second)
    numbers = {id(first): 1.0, id(second): 10.0}
    return [group.all_reduce(torch.tensor(numbers[id(group)])).item() for group in order]


def test_two_groups_of_the_same_ranks_are_two_groups(clusters: Callable[[int], mk.Cluster]) -> None:
    assert clusters(2).run(two_groups, False) == [[2.0, 20.0]] * 2
    with pytest.raises(mk.errors.CommMismatch, match="number 2"):
        clusters(2).run(two_groups, True)
