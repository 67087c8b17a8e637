"""Ranks that wait for each other for ever: who waits where, and who never came."""

from __future__ import annotations

import pytest
import torch

import mpkit as mk


def hang_message(cluster: mk.Cluster, fn: object, timeout: float | None = 0.5) -> str:
    with pytest.raises(mk.Deadlock) as caught:
        cluster.run(fn, timeout=timeout)  # type: ignore[arg-type]
    return str(caught.value)


def test_a_missing_rank(cluster: mk.Cluster) -> None:
    def fn(ctx):  # type: ignore[no-untyped-def]
        ctx.comm.barrier()
        if ctx.rank != 3:
            ctx.comm.all_reduce(torch.ones(1))

    says = hang_message(cluster, fn)
    assert "rank 0 waits in all_reduce number 1 of ranks 0,1,2,3" in says
    assert "test_hangs.py:" in says and "in fn" in says
    assert "rank 3 never came to all_reduce number 1 of ranks 0,1,2,3: it has finished" in says


def test_without_a_timeout_it_is_noticed_as_well(cluster: mk.Cluster) -> None:
    says = hang_message(cluster, lambda ctx: ctx.comm.barrier() if ctx.rank else None, timeout=None)
    assert "rank 0 never came to barrier number 0" in says


def test_crossed_receives(cluster: mk.Cluster) -> None:
    def fn(ctx):  # type: ignore[no-untyped-def]
        if ctx.rank < 2:
            other = 1 - ctx.rank
            ctx.comm.recv(torch.empty(1), other)
            ctx.comm.send(torch.ones(1), other)

    says = hang_message(cluster, fn)
    assert "rank 0 waits in recv from rank 1 (tag 0, number 0)" in says
    assert "rank 1 never sent it: it waits in recv from rank 0" in says


def test_different_order_of_collectives(cluster: mk.Cluster) -> None:
    def fn(ctx):  # type: ignore[no-untyped-def]
        pair = ctx.comm.group([0, 1])
        if ctx.rank == 0:
            ctx.comm.all_reduce(torch.ones(1), pair)
        if ctx.rank == 1:
            ctx.comm.recv(torch.empty(1), 0)

    says = hang_message(cluster, fn)
    assert "rank 1 never came to all_reduce number 0 of ranks 0,1: it waits in recv from rank 0" in says


def test_an_endless_loop_shows_its_line(cluster: mk.Cluster) -> None:
    def fn(ctx):  # type: ignore[no-untyped-def]
        if ctx.rank == 2:
            while True:
                pass
        ctx.comm.barrier()

    says = hang_message(cluster, fn)
    assert "rank 2 is not waiting" in says
    assert "test_hangs.py" in says and "line" in says


@pytest.mark.soak
def test_slow_is_not_hung(cluster: mk.Cluster) -> None:
    """While one rank computes, the others may wait; here for longer than the ranks' patience with waiting."""
    from mpkit.launch.hang import hang

    def fn(ctx):  # type: ignore[no-untyped-def]
        import time

        if ctx.rank == 0:
            end = time.monotonic() + 1.5 * hang.GRACE
            while time.monotonic() < end:
                pass
        ctx.comm.barrier()
        return ctx.rank

    assert cluster.run(fn) == [0, 1, 2, 3]
