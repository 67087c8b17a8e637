"""One process per machine that has imported torch: what it forks is a helper or kernel of the user who asks."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

import mpkit as mk
from mpkit.launch.process.warm_fork import WarmFork, WarmProcessRejects
from mpkit.launch.process.warm_process import identity
from tests.limits import EVENT, PROGRAM, wait_for

NOBODY = 65534
IDENTITY = "mpkit.launch.process.warm_fork.identity"


@pytest.fixture(scope="module")
def warm() -> Iterator[psutil.Popen]:
    """A warm process, with a variable in its environment that nobody may see; its socket is `socket`."""
    folder = tempfile.mkdtemp(dir="/tmp")  # pytest's folders are closed to other users
    os.chmod(folder, 0o755)
    socket = os.path.join(folder, "sock")
    process = psutil.Popen(
        [sys.executable, "-m", "mpkit", "warm", socket],
        stdout=subprocess.PIPE,
        env={**os.environ, "A_SECRET": "of the instructor"},
    )
    process.socket = socket
    assert socket in process.stdout.readline().decode()
    yield process
    process.kill()
    process.wait()
    process.stdout.close()
    shutil.rmtree(folder)


def test_a_cluster_forks_its_helper_from_the_warm_process_and_shares_its_memory(
    warm: psutil.Popen, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MPKIT_WARM", warm.socket)
    monkeypatch.setenv("MINE", "of the student")
    monkeypatch.chdir(tmp_path)
    with mk.Cluster(ranks=2, device="cpu") as cluster:
        found = cluster.run(lambda ctx: (os.environ["MINE"], os.environ.get("A_SECRET"), os.getcwd()))
        assert found == [("of the student", None, str(tmp_path))] * 2
        with pytest.raises(mk.errors.RankFailed, match="ZeroDivisionError"):
            cluster.run(lambda ctx: 1 / ctx.rank)
        assert cluster.fork_server_pid is not None
        helper = psutil.Process(cluster.fork_server_pid)
        assert helper.ppid() == warm.pid
        own = helper.memory_full_info().uss
        assert own < warm.memory_info().rss / 4, "nearly all of its memory is shared"
    assert not helper.is_running()


def test_a_helper_ends_with_the_process_that_asked_for_it(warm: psutil.Popen) -> None:
    script = (
        "import mpkit as mk, os, signal\n"
        "cluster = mk.Cluster(ranks=2, device='cpu')\n"
        "print(cluster.run(lambda ctx: ctx.rank), cluster.fork_server_pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "MPKIT_WARM": warm.socket}, capture_output=True, text=True,
        timeout=PROGRAM,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL and done.stdout.startswith("[0, 1] "), done.stderr
    pid = int(done.stdout.split()[-1])
    wait_for(lambda: not psutil.pid_exists(pid))


def test_a_cluster_whose_warm_process_is_gone_says_so_and_starts_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MPKIT_WARM", str(tmp_path / "none"))
    with (
        pytest.warns(UserWarning, match=r"MPKIT_WARM=.*No such file.*imports torch itself"),
        mk.Cluster(ranks=2, device="cpu") as cluster,
    ):
        assert cluster.run(lambda ctx: ctx.rank) == [0, 1]


def test_a_caller_with_another_torch_is_rejected(warm: psutil.Popen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IDENTITY, lambda: {**identity(), "torch": "/elsewhere/torch/__init__.py"})
    with pytest.raises(WarmProcessRejects, match=r"another torch.*elsewhere"):
        WarmFork(warm.socket, "os:getpid", (), {})


def ask_as(uid: int, socket: str, pipe: Connection) -> None:
    """Ask for a fork server as another user, and say what came."""
    known = identity()  # another user may not be able to read these files
    resource.setrlimit(resource.RLIMIT_NOFILE, (400, 500))
    if uid != os.geteuid():
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    try:
        with patch(IDENTITY, lambda: known):
            fork = WarmFork(socket, "mpkit.launch.process.fork_server:main", ("--warm",), {})
        assert json.loads(fork.stdout.readline())["event"] == "ready"
        pipe.send(fork.pid)
        pipe.recv()
        fork.stdin.close()
        fork.wait(EVENT)
    except WarmProcessRejects as reason:
        pipe.send(str(reason))


@pytest.mark.parametrize("uid", sorted({os.geteuid(), NOBODY} if os.geteuid() == 0 else {os.geteuid()}))
def test_what_is_forked_has_the_caller_s_user_groups_and_limits(warm: psutil.Popen, uid: int) -> None:
    here, there = multiprocessing.Pipe()
    asker = multiprocessing.get_context("fork").Process(
        target=ask_as, args=(uid, warm.socket, there), daemon=True
    )
    asker.start()
    assert here.poll(EVENT)
    pid = here.recv()
    assert isinstance(pid, int), pid
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    assert status["Uid"].split() == [str(uid)] * 4 and status["NoNewPrivs"] == "1"
    if uid == NOBODY:
        assert status["Gid"].split() == [str(NOBODY)] * 4 and int(status["CapEff"], 16) == 0
        assert status["Groups"].split() in ([], [str(NOBODY)])
        limits = Path(f"/proc/{pid}/limits").read_text()
        assert re.search(r"Max open files +400 +500 ", limits), limits
    here.send("done")
    asker.join(EVENT)
    assert asker.exitcode == 0 and not psutil.pid_exists(pid)


def execute(client: BlockingKernelClient, code: str) -> str:
    """Run a cell; return the plain text of its value, or the name of its error."""
    shown: list[str] = []

    def listen(message: dict[str, dict[str, dict[str, str]]]) -> None:
        shown.append(message["content"].get("data", {}).get("text/plain", ""))

    reply = client.execute_interactive(code, timeout=PROGRAM, output_hook=listen)["content"]
    return reply["ename"] if reply["status"] == "error" else "".join(shown)


def test_a_kernel_is_forked_answers_is_interrupted_and_ends(
    warm: psutil.Popen, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place = tmp_path / "kernels" / "warm"
    place.mkdir(parents=True)
    argv = [sys.executable, "-m", "mpkit.launch.notebook.warm_kernel", "-f", "{connection_file}"]
    (place / "kernel.json").write_text(
        json.dumps({"argv": argv, "display_name": "mpkit", "language": "python"})
    )
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    monkeypatch.setenv("MPKIT_WARM", warm.socket)
    kernel = KernelManager(kernel_name="warm")
    kernel.start_kernel(cwd=str(tmp_path))
    client = kernel.blocking_client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=PROGRAM)
        code = "import os, sys\nos.getpid(), os.getppid(), os.getcwd(), sys.path[0], 'torch' in sys.modules"
        pid, parent, *rest = eval(execute(client, code))
        assert parent == warm.pid and rest == [str(tmp_path), "", True]
        (tmp_path / "beside.py").write_text("value = 7\n")
        assert execute(client, "import beside\nbeside.value") == "7"
        client.execute("open('begun', 'w').close()\nimport time\nwhile True: time.sleep(0.01)")
        wait_for(lambda: (tmp_path / "begun").exists())
        kernel.interrupt_kernel()
        assert client.get_shell_msg(timeout=EVENT)["content"]["ename"] == "KeyboardInterrupt"
        assert execute(client, "1 + 1") == "2"
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)
    wait_for(lambda: not psutil.pid_exists(pid))
