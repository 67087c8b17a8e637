"""A disk that is full, at any moment: training goes on without its trace, or fails saying where there is no space."""

import contextlib
import gc
import linecache
import os
import re
import resource
import subprocess
import tempfile
from collections.abc import Callable, Iterator

import pytest
import torch

import mpkit as mk
from tests.serial import Clusters

MEGABYTE = 1_000_000


@pytest.fixture(scope="module")
def fill(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], None]]:
    """fill(n): leave n bytes in the folder of runs, a disk of 12 MB.

    Where mounting is not permitted: files of this process, or of a rank, can grow by no more than that.
    """
    disk = tmp_path_factory.mktemp("disk")
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "none", disk], capture_output=True)
    before, limits = tempfile.tempdir, resource.getrlimit(resource.RLIMIT_FSIZE)
    mounted = mount.returncode == 0

    def leave(free: int) -> None:
        if not mounted:
            limit = limits[0] if free >= 12 * MEGABYTE else free
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
            return
        gc.collect()  # runs that nobody keeps give back their space now, not later
        ballast = disk / "ballast"
        ballast.write_bytes(b"")
        stat = os.statvfs(disk)
        goal, block = stat.f_bavail * stat.f_frsize - free, bytes(4096)
        with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while goal > 0 or not free:  # until there is no space, if there is to be none
                goal -= file.write(block)

    tempfile.tempdir = str(disk)
    yield leave
    tempfile.tempdir = before
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    if mounted:
        subprocess.run(["umount", "-l", disk], check=True)


@pytest.fixture
def two(clusters: Clusters, fill: Callable[[int], None]) -> Iterator[mk.Cluster]:
    fill(12 * MEGABYTE)
    linecache.clearcache()  # source of files that are gone is sent to ranks: a launch here needs the same space always
    yield clusters(2)
    fill(12 * MEGABYTE)
    assert clusters(2).run(lambda ctx: ctx.rank) == [0, 1]


@pytest.mark.slow
def test_before_the_start(two: mk.Cluster, fill: Callable[[int], None]) -> None:
    fill(0)
    with pytest.raises(OSError, match=r"no space left in \S+ \(needed [\d,]+ bytes, free 0 bytes") as caught:
        two.run(lambda ctx: ctx.rank)
    assert str(tempfile.tempdir) in str(caught.value)
    fill(2 * MEGABYTE)
    with pytest.raises(OSError, match=r"no space left in .* \(needed 30\.\d MB, free"):
        two.run(lambda ctx, data: None, bytes(30 * MEGABYTE))
    fill(150_000)  # enough for what is sent to ranks, not for what they record
    with pytest.raises(mk.RankFailed, match=r"rank \d of 2 failed: OSError: .*no space left in .* \(needed"):
        two.run(lambda ctx: ctx.rank)


def test_a_disk_that_fills_up_costs_the_trace_and_not_the_run(
    two: mk.Cluster, fill: Callable[[int], None]
) -> None:
    def work(ctx):  # type: ignore[no-untyped-def]
        print("shown")
        ctx.comm.barrier()
        if ctx.rank == 0:
            fill(0)
        ctx.comm.barrier()
        for step in range(3000):
            with ctx.record.step(step), ctx.record.span(f"span {step}" if step > 10 else "span"):
                pass
        print("x" * 3_000_000)  # more than the trace gave back
        os.system("head -c 100000 /dev/zero")
        total = ctx.comm.all_reduce(torch.ones(1)).item()
        if ctx.rank == 0:
            fill(3 * MEGABYTE)
        ctx.comm.barrier()
        return total

    printed: list[str] = []
    launch = two.launch(work, (), sink=printed.append)  # what pytest captures would lie on that disk
    launch.finish()
    assert launch.results() == [2.0, 2.0]
    assert "[rank 0] shown" in printed
    assert re.search(r"mpkit: what rank \d printed after this is lost: no space left in", "".join(printed))
    counts = [len(rank.ops) for rank in two.trace.ranks]
    assert 0 < min(counts) < 6000  # what one gave back, the other may have used
    assert two.timeline().world_size == 2
