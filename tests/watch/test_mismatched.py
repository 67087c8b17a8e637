"""Calls of torch.distributed that do not fit their peers' end with both ranks and lines, as those of `ctx.comm` do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mpkit as mk
from tests.limits import EVENT


def kinds(ctx: Any) -> None:
    x = torch.ones(4)
    if ctx.rank:
        dist.all_reduce(x)
    else:
        dist.broadcast(x, 0)


def dtypes(ctx: Any) -> None:
    dist.all_reduce(torch.ones(4, dtype=torch.int64 if ctx.rank else torch.float32))


def shapes(ctx: Any) -> None:
    dist.all_gather_into_tensor(torch.empty(8 + 4 * ctx.rank), torch.ones(4 + 2 * ctx.rank))


def roots(ctx: Any) -> None:
    dist.broadcast(torch.ones(4), ctx.rank)


def reductions(ctx: Any) -> None:
    dist.all_reduce(torch.ones(4), dist.ReduceOp.MAX if ctx.rank else dist.ReduceOp.SUM)


def messages(ctx: Any) -> None:
    if ctx.rank:
        dist.recv(torch.empty(4), 0)
    else:
        dist.send(torch.ones(2, dtype=torch.int64), 1)


def groups(ctx: Any) -> None:
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    dist.all_reduce(torch.ones(4), group=second if ctx.rank else first)


def functional(ctx: Any) -> None:
    all_reduce = torch.distributed._functional_collectives.all_reduce
    all_reduce(torch.ones(4 + ctx.rank), "sum", dist.group.WORLD)


@pytest.mark.parametrize("watch", [False, True])
@pytest.mark.parametrize(
    ("program", "said"),
    {
        kinds: r"calls (broadcast|all_reduce).*where rank \d calls (broadcast|all_reduce)",
        dtypes: r"(int64|float32)\[4\].*where rank \d calls all_reduce\((int64|float32)\[4\]",
        shapes: r"all_gather\(float32\[(8|12)\].*float32\[(8|12)\]",
        roots: r"All ranks name the same root",
        reductions: r'op="(max|sum)".*op="(max|sum)"',
        messages: r"rank 1 receives float32\[4\] at .* what rank 0 sent as int64\[2\]",
        groups: r'group="\d+".*group="\d+".*two groups of the same ranks',
        functional: r"float32\[(4|5)\].*float32\[(4|5)\]",
    }.items(),
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_both_ranks_and_lines_are_named(
    program: Callable[[Any], None], said: str, watch: bool, clusters: Callable[[int], mk.Cluster]
) -> None:
    with pytest.raises(mk.errors.CommMismatch, match=rf"(?s){said}") as error:
        clusters(2).run(program, watch=watch, timeout=EVENT)
    assert str(error.value).count("test_mismatched.py:") >= 2


@pytest.mark.parametrize("watch", [False, True])
def test_what_fits_goes_on(watch: bool, clusters: Callable[[int], mk.Cluster]) -> None:
    """Objects, uneven all-to-alls, tags of any size, calls of ctx.comm in between, and one call from several lines."""

    def fits(ctx: Any) -> float:
        objects: list[Any] = [None, None]
        dist.all_gather_object(objects, "x" * (1 + 100 * ctx.rank))
        sent, received = torch.ones(3), torch.empty(2 + 2 * ctx.rank)
        dist.all_to_all_single(
            received, sent, [1 + ctx.rank] * 2, [1, 2]
        )  # parts of other sizes on each rank
        ctx.comm.all_reduce(torch.ones(2))
        handle = dist.isend(sent[:1], 1 - ctx.rank, tag=5_000_000)
        dist.recv(received[:1], 1 - ctx.rank, tag=5_000_000)
        handle.wait()
        total = torch.ones(1)
        if ctx.rank:
            dist.all_reduce(total)
        else:
            dist.all_reduce(total)
        pair = dist.new_group([0, 1])
        dist.barrier(pair)
        return float(total) + len(objects[1])

    assert clusters(2).run(fits, watch=watch) == [103.0, 103.0]
