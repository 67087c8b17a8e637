"""How processes start: where they take modules from and meet, events in a rare order, calls from two threads."""

import io
import json
import logging
import os
import pickle
import random
import stat
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import mpkit as mk
from mpkit.common.launch_folder import reserve
from mpkit.strategies.data.digest import SampleLog
from mpkit.strategies.prepare.isolation import quiet
from mpkit.trace.record.recorder import Recorder
from tests.limits import EVENT

# ---- Where helper processes take their modules from, and where ranks meet: nothing that another user could give them.


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


@pytest.mark.parametrize(("name", "write"), [
    ("rank0.error", lambda folder: reserve(folder, 1)),
    ("rank0.ops", lambda folder: Recorder(folder, 0, torch.device("cpu"))),
    ("rank0.names", lambda folder: Recorder(folder, 0, torch.device("cpu"))),
    ("rank0.mem", lambda folder: Recorder(folder, 0, torch.device("cpu"))),
    ("rank0.taken", lambda folder: SampleLog(folder, 0)),
])  # fmt: skip
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


# ---- The loop of the process that ranks are forked from, with its events in an order that is rare.

DEATHS_FIRST = """
import os, selectors
from mpkit.launch.process.fork_server import ForkServer

class DeathsFirst(selectors.DefaultSelector):
    '''Once ranks are there, waits until their deaths and the end of their pipe are both known: deaths first.'''
    def select(self, timeout=None):
        ready = super().select(timeout)
        while len(self.get_map()) > 2 and {key.data for key, _ in ready} < {"child", "done"}:
            ready = super().select(timeout)
        return sorted(ready, key=lambda pair: pair[0].data != "child")

class Short(ForkServer):
    '''Its ranks leave at once.'''
    def start(self, *args):
        return os.fork() or os._exit(0)

server = Short(1)
server.selector = DeathsFirst()
server.serve(0)
"""


def test_a_launch_that_ends_within_one_round_of_events() -> None:
    fork_server = subprocess.Popen(
        [sys.executable, "-c", DEATHS_FIRST], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert fork_server.stdin is not None and fork_server.stdout is not None
    for _ in range(2):
        fork_server.stdin.write(json.dumps({"do": "launch", "folder": "", "ranks": 2, "modules": []}) + "\n")
        fork_server.stdin.flush()
        seen: list[str] = []
        while "over" not in seen:
            line = fork_server.stdout.readline()
            assert line, f"the fork server ended after {seen}"
            seen.append(json.loads(line)["event"])
        assert seen.count("exit") == 2
    fork_server.communicate(timeout=EVENT)
    assert fork_server.returncode == 0


# ---- Trainings from two threads: what the whole process shares is afterwards as it was.


def shared() -> list[object]:
    """Return what belongs to the process."""
    drawn = torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()
    return [sys.stdout, list(warnings.filters), warnings.showwarning, logging.root.manager.disable, drawn]


def test_the_second_thread_waits_and_what_others_print_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thread a enters first and would leave last: each would restore what the other changed."""
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    inside, end, order = threading.Event(), threading.Event(), []

    def a() -> None:
        with quiet():
            print("not shown")
            torch.rand(3)
            inside.set()
            assert end.wait(EVENT)
            order.append("a")

    def b() -> None:
        with quiet():
            order.append("b")

    before = shared()
    first, second = threading.Thread(target=a), threading.Thread(target=b)
    first.start()
    assert inside.wait(EVENT)
    stream = sys.stdout
    print("shown")
    second.start()
    end.set()
    first.join(), second.join()
    assert order == ["a", "b"] and shared() == before and sys.stdout is out
    print("shown too", file=stream)  # somebody has kept it
    assert out.getvalue() == "shown\nshown too\n"
