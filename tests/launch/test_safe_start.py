"""Where helper processes take their modules from, and where ranks meet: nothing that another user could give them."""

from __future__ import annotations

import os
import pickle
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import mpkit as mk
from mpkit.launch.process.store import store_of
from tests.limits import PROGRAM

SCRIPT = """
import mpkit as mk
with mk.Cluster(2, device="cpu", start="spawn") as cluster:
    print(cluster.run(lambda ctx: ctx.world_size))
"""


@pytest.mark.soak
def test_spawned_ranks_import_nothing_from_the_current_folder(tmp_path: Path) -> None:
    """As in test_cluster.py; an empty part of PYTHONPATH means this folder too."""
    here, safe = tmp_path / "here", tmp_path / "safe"
    here.mkdir()
    safe.mkdir()
    for name in ("random", "types", "select", "torch", "mpkit", "sitecustomize", "xmlrpc"):
        (here / f"{name}.py").write_text(f"open({str(tmp_path / 'taken')!r}, 'a').write(__name__)\n")
    (safe / "script.py").write_text(f"import os; os.environ['PYTHONPATH'] = {os.pathsep!r}\n" + SCRIPT)
    command = [sys.executable, str(safe / "script.py")]
    done = subprocess.run(command, cwd=here, text=True, capture_output=True, timeout=PROGRAM)
    assert "[2, 2]" in done.stdout, done.stderr
    assert not (tmp_path / "taken").exists()


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


def test_a_key_is_waited_for(tmp_path: Path) -> None:
    one, other = (store_of(tmp_path, 2, "gloo") for _ in range(2))
    assert not one.check(["late"])
    threading.Timer(0.02, lambda: other.set("late", "here")).start()
    assert one.get("late") == b"here"
    assert (one.add("n", 2), other.add("n", 3), one.num_keys() >= 2) == (2, 5, True)
    assert one.delete_key("late") and not other.check(["late"])


def test_groups_are_made_through_the_store(cluster: mk.Cluster) -> None:
    def work(ctx):  # type: ignore[no-untyped-def]
        pairs = ctx.comm.group([0, 1]), ctx.comm.group([2, 3])
        return ctx.comm.all_reduce(torch.tensor([float(ctx.rank)]), pairs[ctx.rank // 2]).item()

    assert cluster.run(work) == [1.0, 1.0, 5.0, 5.0]
