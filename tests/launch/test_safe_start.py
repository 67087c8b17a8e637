"""Where helper processes take their modules from, and where ranks meet: nothing that another user could give them."""

from __future__ import annotations

import os
import pickle
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mpkit as mk
from mpkit.common.launch_folder import reserve
from mpkit.strategies.data.digest import SampleLog
from mpkit.trace.record.recorder import Recorder


def test_ranks_meet_in_a_private_folder_and_listen_on_loopback_only(cluster: mk.Cluster) -> None:
    def look(ctx):  # type: ignore[no-untyped-def]
        ctx.comm.barrier()
        found = []
        for name in ("tcp", "tcp6"):
            for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]:
                address, state, inode = (line.split()[at] for at in (1, 3, 9))
                if state == "0A":
                    found.append((address.split(":")[0], f"socket:[{inode}]"))
        mine = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)}
        ctx.comm.barrier()
        return [address for address, inode in found if inode in mine], str(ctx.record.folder)

    def _is_open(fd: str) -> bool:
        return os.path.lexists(f"/proc/self/fd/{fd}")

    listens, folders = zip(*cluster.run(look), strict=True)
    assert all(len(one) == 1 for one in listens), "gloo's own, and no store's"
    assert {address for one in listens for address in one} <= {"0100007F", "0000000000000000FFFF00000100007F"}
    assert stat.S_IMODE(os.stat(folders[0]).st_mode) == 0o700


def test_an_object_that_no_rank_has_signed_is_not_unpickled(cluster: mk.Cluster, tmp_path: Path) -> None:
    """Anybody on the machine can connect to gloo's ports; here rank 0 sends what such a stranger would."""

    class Runs:
        def __reduce__(self):  # type: ignore[no-untyped-def]
            return os.mkdir, (str(tmp_path / "ran"),)

    def work(ctx):  # type: ignore[no-untyped-def]
        objects: list[object] = [None] * 4
        dist.all_gather_object(objects, {"rank": ctx.rank, "function": work.__name__})
        assert objects[3] == {"rank": 3, "function": "work"}
        if ctx.rank == 0:
            dist.distributed_c10d._pickler = pickle.Pickler
        dist.broadcast_object_list([Runs()])

    with pytest.raises(
        mk.RankFailed, match=r"an object of torch.distributed: no process of this launch wrote this"
    ):
        cluster.run(work)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("rank0.error", lambda folder: reserve(folder, 1)),
        ("rank0.ops", lambda folder: Recorder(folder, 0, torch.device("cpu"))),
        ("rank0.names", lambda folder: Recorder(folder, 0, torch.device("cpu"))),
        ("rank0.mem", lambda folder: Recorder(folder, 0, torch.device("cpu"))),
        ("rank0.taken", lambda folder: SampleLog(folder, 0)),
    ],
)
def test_a_link_in_a_run_folder_is_not_followed(
    name: str, write: Callable[[Path], Any], tmp_path: Path
) -> None:
    folder, victim = tmp_path / "run", tmp_path / "victim.txt"
    folder.mkdir()
    victim.write_text("precious")
    for target in (victim, tmp_path / "new.txt"):
        (folder / name).symlink_to(target)
        with pytest.raises(FileExistsError):
            write(folder)
        for path in folder.iterdir():
            path.unlink()
    assert victim.read_text() == "precious" and not (tmp_path / "new.txt").exists()
