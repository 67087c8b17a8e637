"""Collectives and messages do what their docstrings say, on real ranks, and are recorded."""

import re
from collections.abc import Callable

import pytest
import torch

import mpkit as mk
from mpkit.trace import Kind
from tests.serial import Clusters

KINDS = [
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter",
]  # fmt: skip


def run_program(ctx, program, world):  # type: ignore[no-untyped-def]
    """Each step of the program in a group that this rank may or may not belong to."""
    groups = [ctx.comm.group(ranks) for _, ranks, _, _ in program]
    found = []
    for (kind, ranks, root, inputs), group in zip(program, groups, strict=True):
        if ctx.rank in ranks:
            mine = inputs[ranks.index(ctx.rank)].clone()
            root_argument = (
                [ranks.index(root)] if kind in ("broadcast", "reduce", "gather", "scatter") else []
            )
            found.append(getattr(group, kind)(mine, *root_argument))
        else:
            found.append(None)
    return found


def expected(kind: str, ranks: list[int], root: int, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """By member of the group."""
    n, total = len(ranks), sum(given[1:], given[0])
    at_root = [rank == root for rank in ranks]
    return {
        "all_reduce": lambda: [total] * n,
        "all_gather": lambda: [torch.cat(given)] * n,
        "reduce_scatter": lambda: list(total.chunk(n)),
        "all_to_all": lambda: [torch.cat([g.chunk(n)[i] for g in given]) for i in range(n)],
        "broadcast": lambda: [given[ranks.index(root)]] * n,
        "reduce": lambda: [total if is_root else own for is_root, own in zip(at_root, given, strict=True)],
        "gather": lambda: [torch.cat(given) if is_root else given[0][:0] for is_root in at_root],
        "scatter": lambda: list(given[ranks.index(root)].chunk(n)),
    }[kind]()


def test_each_collective(clusters: Clusters) -> None:
    """Among all ranks, among some, and alone; from and to the first and the last of them."""
    generator = torch.Generator().manual_seed(0)
    program: list[object] = []
    for number, kind in enumerate(KINDS):
        for ranks in ([0, 1, 2, 3], [1, 3], [2]):
            dtype = [torch.float32, torch.float64, torch.int64][number % 3]
            inputs = torch.randint(-9, 9, (len(ranks), 2 * len(ranks), 3), generator=generator).to(dtype)
            program += [(kind, ranks, root, list(inputs)) for root in {ranks[0], ranks[-1]}]
    check_program(clusters, 4, program)


def check_program(clusters: Clusters, world: int, program: list[object]) -> None:
    got = clusters(world).run(run_program, program, world)
    for step, (kind, ranks, root, inputs) in enumerate(program):  # type: ignore[misc]
        for member, want in zip(ranks, expected(kind, ranks, root, inputs), strict=True):
            assert torch.equal(got[member][step], want), (kind, ranks, root, member)


def test_reductions(cluster: mk.Cluster) -> None:
    def reduce_by_each(ctx):  # type: ignore[no-untyped-def]
        given = torch.ones(2) * (ctx.rank + 1)
        return [ctx.comm.all_reduce(given.clone(), op=op).tolist() for op in ("sum", "mean", "max", "min")]

    assert cluster.run(reduce_by_each) == [[[want] * 2 for want in (10.0, 2.5, 4.0, 1.0)]] * 4


def test_async_and_views(cluster: mk.Cluster) -> None:
    """An all-reduce of a strided view lands in that view; asynchronous ones in the order of their waits."""

    def fn(ctx):  # type: ignore[no-untyped-def]
        x = torch.zeros(4, 4)
        works = [ctx.comm.all_reduce(x[:, i], async_op=True) for i in range(4)]
        x_before = x.clone()
        for work in reversed(works):
            work.wait()
        ctx.comm.all_reduce(x[:, 1].fill_(ctx.rank))
        return x_before.sum().item(), x.sum(0).tolist()

    assert cluster.run(fn) == [(0.0, [0.0, 24.0, 0.0, 0.0])] * 4


@pytest.mark.parametrize(("ranks", "dtype"), [(1, torch.float64), (3, torch.bfloat16)])
def test_gathering_and_scattering_into_a_given_tensor(
    clusters: Clusters, ranks: int, dtype: torch.dtype
) -> None:
    """Also where the part is a place in the whole; nothing else is written to."""

    def fn(ctx):  # type: ignore[no-untyped-def]
        n, mine = ctx.world_size, slice(2 * ctx.rank, 2 * ctx.rank + 2)
        whole, part = torch.zeros(2 * n, 3, dtype=dtype), torch.full((2, 3), ctx.rank + 1, dtype=dtype)
        assert ctx.comm.all_gather(part, out=whole) is whole
        gathered, whole = whole, torch.zeros_like(whole)
        whole[mine] = part
        ctx.comm.all_gather(whole[mine], async_op=True, out=whole).wait()
        assert torch.equal(whole, gathered)
        reduced = torch.empty_like(part)
        assert ctx.comm.reduce_scatter(whole, out=reduced) is reduced
        assert torch.equal(whole, gathered)
        ctx.comm.reduce_scatter(whole, async_op=True, out=whole[mine]).wait()
        assert torch.equal(whole[mine], reduced)
        return gathered[::2, 0].tolist(), reduced[1].tolist()

    want = list(range(1, ranks + 1))
    assert clusters(ranks).run(fn) == [(want, [ranks * (r + 1.0)] * 3) for r in range(ranks)]


def test_messages_with_tags_may_cross(cluster: mk.Cluster) -> None:
    def fn(ctx):  # type: ignore[no-untyped-def]
        right, left = (ctx.rank + 1) % 4, (ctx.rank - 1) % 4
        sent = [ctx.comm.isend(torch.full((2,), 10.0 * ctx.rank + i), right, f"F{i}") for i in range(3)]
        got = [ctx.comm.recv(torch.empty(2), left, f"F{i}")[0].item() for i in (2, 0, 1)]
        for work in sent:
            work.wait()
        return got

    assert cluster.run(fn) == [[10.0 * left + i for i in (2, 0, 1)] for left in (3, 0, 1, 2)]
    for number, rank in enumerate(cluster.trace.ranks):  # a channel is named from who sends to who receives
        channels = {rank.name(op["group"]).partition("#")[0] for op in rank.ops if op["kind"] == Kind.SEND}
        assert channels == {f"{number}>{(number + 1) % 4}"}


MISTAKES: list[tuple[Callable[..., object], str]] = [
    (lambda ctx: ctx.comm.reduce_scatter(torch.ones(6)), "into 4 equal parts.*shape .6,. does not allow"),
    (lambda ctx: ctx.comm.all_gather(torch.ones(2), out=torch.ones(4)), r"shape \(8,\) and torch.float32"),
    (lambda ctx: ctx.comm.broadcast(torch.ones(1), 7), "there is no rank 7"),
    (lambda ctx: ctx.comm.isend(torch.ones(1), ctx.rank), "that is this rank itself"),
    (lambda ctx: ctx.comm.irecv(torch.ones(1), 9), "there are ranks 0 to 3"),
    (lambda ctx: ctx.comm.isend(torch.ones(1), (ctx.rank + 1) % 4, "forward"), "tag='forward'"),
    (lambda ctx: ctx.comm.all_reduce(torch.ones(1), op="avg"), "'sum', 'mean', 'max' and 'min'"),
    (lambda ctx: ctx.comm.group([0, 0]), r"group\(\[0, 0\]\) needs different ranks"),
    (lambda ctx: ctx.comm.group([5 - 5]).barrier(), "rank . called barrier in the group of ranks"),
]


def test_mistakes_teach(cluster: mk.Cluster) -> None:
    def make_each(ctx):  # type: ignore[no-untyped-def]
        said = []
        for call, _ in MISTAKES:
            try:
                call(ctx)
            except ValueError as error:
                said.append(str(error))
        return said

    said = cluster.run(make_each)[1]
    assert len(said) == len(MISTAKES)
    for text, (_, says) in zip(said, MISTAKES, strict=True):
        assert re.search(f"(?s){says}", text)

    def in_a_group(ctx):  # type: ignore[no-untyped-def]
        ctx.comm.all_reduce(torch.ones(1), group=ctx.comm.group([0, 1]))

    with pytest.raises(
        mk.RankFailed, match=r"pair = ctx.comm.group\(\[0, 1\]\), and pair.all_reduce\(\.\.\.\)"
    ):
        cluster.run(in_a_group)
    with pytest.raises(mk.RankFailed, match=r"barrier\(\) takes 1 positional argument but 2 were given$"):
        cluster.run(lambda ctx: ctx.comm.barrier(torch.ones(1)))


def exchange_rows(ctx, group, numbers):  # type: ignore[no-untyped-def]
    """Rank i of the group sends `numbers[i][j]` rows to rank j, each with both their places in it."""
    comm = ctx.comm.group(group)
    if ctx.rank not in group:
        return None
    i, n = comm.index, len(group)
    sends, receives = numbers[i], [numbers[j][i] for j in range(n)]
    rows = [[10.0 * i + j, 0.5] for j in range(n) for _ in range(sends[j])]
    return comm.all_to_all(torch.tensor(rows).view(-1, 2), sends=sends, receives=receives)


def test_uneven_parts_of_an_all_to_all(clusters: Clusters) -> None:
    """Some send nothing to some, one receives all, and one nothing; bytes are those that a rank sends."""
    numbers, group = [[1, 3, 0], [0, 2, 0], [4, 1, 0]], [0, 1, 3]
    found = clusters(4).run(exchange_rows, group, numbers)
    for j, rank in enumerate(group):
        assert found[rank][:, 0].tolist() == [10.0 * i + j for i in range(3) for _ in range(numbers[i][j])]
        ops = clusters(4).trace.ranks[rank].ops
        assert ops["bytes"][ops["kind"] == Kind.ALL_TO_ALL].tolist() == [8 * sum(numbers[j])]


def test_uneven_parts_must_fit(clusters: Clusters) -> None:
    rows, cluster = torch.ones(3, 2), clusters(2)
    says = r"(?s)of 3 rows among 2 ranks.*all_to_all\(torch.tensor\(sends"
    for parts in ({"sends": [3, 0]}, {"sends": [2, 0], "receives": [1, 1]}, {"sends": [3], "receives": [3]}):
        with pytest.raises(mk.RankFailed, match=says):
            cluster.run(lambda ctx, parts=parts: ctx.comm.all_to_all(rows, **parts))
    with pytest.raises(mk.errors.CommMismatch, match=r"float32\[any, 2\]"):
        cluster.run(
            lambda ctx: ctx.comm.all_to_all(
                rows if ctx.rank else rows.double(), sends=[3, 0], receives=[3 * (ctx.rank == 0)] * 2
            )
        )


def expects(ctx, sends, receives):  # type: ignore[no-untyped-def]
    return ctx.comm.all_to_all(torch.ones(4, 3), sends=sends[ctx.rank], receives=receives[ctx.rank])


def test_rows_that_are_not_those_expected(clusters: Clusters) -> None:
    """Rank 1 expects fewer rows than rank 0 sends, or more: no rank goes on with what was in memory before."""
    sends = [[2, 2], [2, 2]]
    assert len(clusters(2).run(expects, sends, sends)[0]) == 4
    says = r"(?s)all_to_all\(float32\[any, 3\]\).*another number of rows than the other's receives= says"
    for wrong in (1, 3):
        with pytest.raises(mk.errors.CommMismatch, match=says):
            clusters(2).run(expects, sends, [[2, 2], [wrong, 2]])
