"""Communication that does not fit is an error with both ranks and both lines; what fits goes through unharmed."""

import linecache
from typing import Any

import pytest
import torch

import mpkit as mk
from mpkit.launch.hang import hang
from tests.serial import Clusters

ALL, FIRST = "ranks 0, 1 and 2", "ranks 0 and 1"
MISMATCHES: dict[str, tuple[str, list[str], list[str]]] = {
    # who parts: rank 0 from the others, or from rank 1 alone; its calls, and theirs
    "kind": (ALL, ["all_reduce(ones(6))"], ["all_gather(ones(6))"]),
    "kind, of a barrier": (ALL, ["barrier()"], ["broadcast(ones(6), 0)"]),
    "dtype": (ALL, ["reduce_scatter(ones(6))"], ["reduce_scatter(ones(6, dtype=torch.int64))"]),
    "dtype, asynchronous": (ALL, ["all_gather(ones(6), async_op=True).wait()"],
        ["all_gather(ones(6, dtype=torch.uint8), async_op=True).wait()"]),
    "length": (ALL, ["all_to_all(ones(6))"], ["all_to_all(ones(12))"]),
    "shape of as many": (ALL, ["all_reduce(ones(6, 2))"], ["all_reduce(ones(12))"]),
    "reduction": (ALL, ["all_reduce(ones(6), op='max')"], ["all_reduce(ones(6))"]),
    "root": (ALL, ["broadcast(ones(6), src=0)"], ["broadcast(ones(6), src=1)"]),
    "root of a gather": (ALL, ["gather(ones(6), dst=2)"], ["gather(ones(6), dst=1)"]),
    "order": (ALL, ["all_reduce(ones(5))", "scatter(ones(6), 1)"], ["scatter(ones(6), 1)", "all_reduce(ones(5))"]),
    "groups made": (ALL, ["group([0])"], ["group([1])"]),
    "order of groups made": (ALL, ["group([0])", "group([1])"], ["group([1])", "group([0])"]),
    "group for a barrier": (ALL, ["group([0])"], ["barrier()"]),
    "order of groups": (FIRST, ["pair.all_reduce(ones(6))", "all_reduce(ones(6))"],
        ["all_reduce(ones(6))", "pair.all_reduce(ones(6))"]),
    "dtype of a message": (FIRST, ["send(ones(6), 1)"], ["recv(ones(6, dtype=torch.int32), 0)"]),
    "shape of a message": (FIRST, ["isend(ones(6), 1).wait()"], ["irecv(ones(1, 6), 0).wait()"]),
    "length of a message": (FIRST, ["recv(ones(12), 1)"], ["send(ones(6), 0)"]),
    "tag": (FIRST, ["send(ones(6), 1, tag='F2')"], ["recv(ones(6), 0, tag=7)"]),
    "both receive first": (FIRST, ["recv(ones(6), 1)", "send(ones(6), 1)"], ["recv(ones(6), 0)", "send(ones(6), 0)"]),
}  # fmt: skip


@pytest.mark.parametrize(("who", "mine", "theirs"), MISMATCHES.values(), ids=MISMATCHES)
def test_two_ranks_part(
    clusters: Clusters, who: str, mine: list[str], theirs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hang, "WAITING", 1e6)  # no time-out ends it
    alone = (
        []
        if who == ALL
        else ["    else:", "        ctx.comm.all_reduce(ones(6))" * ("pair" in str(mine)) or "        pass"]
    )
    lines = ["def program(ctx):", "    pair = ctx.comm.group([0, 1])", "    if ctx.rank == 0:"]
    lines += [f"        {'' if call.startswith('pair') else 'ctx.comm.'}{call}" for call in mine]
    lines += ["    else:" if who == ALL else "    elif ctx.rank == 1:"]
    lines += [f"        {'' if call.startswith('pair') else 'ctx.comm.'}{call}" for call in theirs]
    here, there = range(4, 4 + len(mine)), range(5 + len(mine), 5 + len(mine) + len(theirs))
    source = "\n".join([*lines, *alone, "    ctx.comm.barrier()", ""])
    name = f"<program {mine[0]}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    space: dict[str, Any] = {}
    exec(compile(source, name, "exec"), {"torch": torch, "ones": torch.ones}, space)
    launch = clusters(3).launch(space["program"], ())
    launch.finish()
    with pytest.raises((mk.errors.CommMismatch, mk.errors.Deadlock)) as caught:
        launch.results()
    says = str(caught.value)
    for ranks, numbers in (([0], here), ([1, 2] if who == ALL else [1], there)):
        assert any(f"rank {rank} " in says for rank in ranks), (says, source)
        assert any(f"{name}:{line}" in says for line in numbers), (says, source)
    if isinstance(caught.value, mk.errors.CommMismatch):
        assert 0 in {caught.value.rank, caught.value.other}, says
        assert "Traceback" not in says and "\n" not in says
    else:
        assert "Why:" in says, says


def test_ranks_that_agree(clusters: Clusters) -> None:
    """Other strides, other tensors, other lines on each rank; 0-dim, empty, complex and bool; messages that cross."""

    def fn(ctx: Any) -> list[Any]:
        if ctx.rank == 0:
            ctx.comm.all_reduce(torch.ones(2, 3))
        else:
            ctx.comm.all_reduce(torch.ones(3, 2).t())
        ctx.comm.all_gather(torch.tensor(1.0))
        ctx.comm.all_gather(torch.empty(0, 3))
        ctx.comm.all_reduce(torch.ones(2, dtype=torch.complex64))
        ctx.comm.broadcast(torch.ones(2, dtype=torch.bool))
        right, left = (ctx.rank + 1) % 3, (ctx.rank - 1) % 3
        sent = [ctx.comm.isend(torch.full((2,), i), right, tag=i) for i in range(3)]
        got = [ctx.comm.recv(torch.zeros(2, dtype=torch.int64), left, tag=i).tolist() for i in (2, 0, 1)]
        for work in sent:
            work.wait()
        return got

    assert clusters(3).run(fn) == [[[2, 2], [0, 0], [1, 1]]] * 3


@pytest.mark.slow
def test_more_calls_than_were_made_room_for(clusters: Clusters) -> None:
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


def test_a_call_of_torch_distributed_names_its_line(clusters: Clusters) -> None:
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


def test_the_nearest_message_explains_a_deadlock(clusters: Clusters) -> None:
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


def test_two_groups_of_the_same_ranks_are_two_groups(clusters: Clusters) -> None:
    assert clusters(2).run(two_groups, False) == [[2.0, 20.0]] * 2
    with pytest.raises(mk.errors.CommMismatch, match="number 2"):
        clusters(2).run(two_groups, True)
