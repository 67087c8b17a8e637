"""The process that has imported torch and from which ranks are forked.

Importing torch takes far longer than forking a process that has imported it. So one process, started with the Cluster,
imports torch and waits; each launch forks fresh ranks from it, and no state of a failed run carries over into the next.
The notebook's own process is never forked: it may have used CUDA, and it has threads.

It serves one launch at a time, and receives commands and sends events as JSON lines, over its standard input and
output:

    {"do": "launch", "folder": "...", "ranks": 4, "modules": [...]}   ->  {"event": "started", "pids": [...]}
                                                                          {"event": "exit", "rank": 2, "status": -9}
                                                                          {"event": "over"}
    {"do": "kill"}                  every rank, at once
    {"do": "close"}                 an orderly end follows
    end of file                     kill all ranks and exit; without a "close" before, the parent is gone: remove the
                                    launches' folder too

Nobody asks for minutes: it exits by itself, since it holds torch in memory (about 230 MB), and in a class of forty most
notebooks are being read at any moment.

The life of a rank, so that no peer sees a closed connection before its time:

    forked -> runs -> writes its result, says "done" (a byte in the done pipe) -> waits for the release pipe to close
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpkit.common.process_wide import make_undumpable
from mpkit.launch.process.fork_server_client import helper_command
from mpkit.launch.process.run_folder import remove_unheld


class ForkServer:
    """The server's loop: reads commands, writes events, forks and reaps ranks.

    Args:
        out: the descriptor that events are written to.
        fork: whether to fork ranks; False starts each as a fresh interpreter.
        idle: seconds without a launch after which it exits.
    """

    def __init__(self, out: int, fork: bool = True, idle: float | None = None) -> None:
        self._out, self._fork, self._idle = out, fork, idle
        self.selector: selectors.BaseSelector = selectors.DefaultSelector()
        self._orderly = False
        self._folder = ""  # of the latest launch
        self._ranks: dict[int, int] = {}  # by process id, for the living ranks
        self._group = 0  # process group of the ranks and of the processes that they start
        self._undone = 0  # ranks whose function has not returned
        self._done_read = (
            self._release_write
        ) = -1  # ranks write a byte to one, and exit when the other is closed

    def _say(self, event: str, **values: Any) -> None:
        line = json.dumps({"event": event, **values}).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):  # the reader is gone: end of file follows on the input
            while line:
                line = line[os.write(self._out, line) :]

    def serve(self, commands: int) -> None:
        """Serve commands until their pipe is closed, or nobody has asked for ranks for a while."""
        child_read, child_write = os.pipe()
        for end in (child_read, child_write):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(child_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler must exist for the wakeup to be written
        self.selector.register(commands, selectors.EVENT_READ, "commands")
        self.selector.register(child_read, selectors.EVENT_READ, "child")
        self._say("ready", pid=os.getpid())
        pending = b""
        while ready := self.selector.select(None if self._ranks else self._idle):
            for key, _ in ready:
                if key.data == "child":
                    with contextlib.suppress(BlockingIOError):
                        os.read(child_read, 4096)
                    self._reap()
                elif key.data == "done":
                    self._count_done()
                elif not (chunk := os.read(commands, 65536)):
                    return self._abandon()
                else:
                    *lines, pending = (pending + chunk).split(b"\n")
                    for command in map(json.loads, lines):
                        if command["do"] == "launch":
                            import_installed(command["modules"])
                            self._launch(command["folder"], command["ranks"])
                        elif command["do"] == "kill":
                            self._kill()
                        else:
                            self._orderly = True

    def _launch(self, folder: str, ranks: int) -> None:
        """Fork the ranks, which find each other through a file in the launch's folder."""
        self._done_read, done_write = os.pipe()
        release_read, self._release_write = os.pipe()
        self._folder, self._group, self._undone = folder, 0, ranks
        for rank in range(ranks):
            pid = self.start(rank, {"done": done_write, "release": release_read})
            self._group = self._group or pid
            # Parent and child both set it, so that it is set whichever runs first.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.setpgid(pid, self._group)
            self._ranks[pid] = rank
        os.close(done_write)
        os.close(release_read)
        self.selector.register(self._done_read, selectors.EVENT_READ, "done")
        self._say("started", pids=list(self._ranks))

    def start(self, rank: int, fds: dict[str, int]) -> int:
        """Start one rank: by fork where that is safe, otherwise as a fresh interpreter that imports torch again."""
        settings: dict[str, Any] = {
            "rank": rank,
            "group": self._group,
            "folder": self._folder,
            "fds": fds,
            "parent": os.getpid(),
        }
        if not self._fork:
            return subprocess.Popen(
                helper_command("mpkit.launch.process.rank:main", **settings),
                pass_fds=list(fds.values()), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            ).pid  # fmt: skip
        with warnings.catch_warnings():
            # Python warns that threads do not survive a fork. The existing ones belong to numpy's BLAS,
            # which re-creates them.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            try:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for fd in (self._out, self._done_read, self._release_write):
                    os.close(fd)
                self.selector.close()
                from mpkit.launch.process.rank import main as rank_main

                rank_main(**settings)
            finally:
                os._exit(70)  # never return to the fork server's loop
        return pid

    def _count_done(self) -> None:
        """Count ranks whose function has returned; release all ranks together once the last one has."""
        if self._done_read < 0:  # the launch ended during this round of events
            return
        said = os.read(self._done_read, 64)
        self._undone -= len(said)
        if self._undone <= 0:
            self._release()
        if not said:  # all ends are closed: every rank has exited
            self._close_done()

    def _reap(self) -> None:
        """Reap ranks that have exited. If one exits before all have finished, kill the others."""
        while self._ranks:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            if pid not in self._ranks:
                continue
            self._say("exit", rank=self._ranks.pop(pid), status=os.waitstatus_to_exitcode(status))
            if (
                self._release_write >= 0 or not self._ranks
            ):  # and what the last rank has started and left behind
                self._kill()
            if not self._ranks:
                self._release()
                self._close_done()
                self._say("over")

    def _kill(self) -> None:
        """Kill every living rank, and the processes that they started."""
        if self._group:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._group, signal.SIGKILL)
        for pid in self._ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _release(self) -> None:
        """Let the ranks exit."""
        if self._release_write >= 0:
            os.close(self._release_write)
            self._release_write = -1

    def _close_done(self) -> None:
        if self._done_read >= 0:
            self.selector.unregister(self._done_read)
            os.close(self._done_read)
            self._done_read = -1

    def _abandon(self) -> None:
        """Kill and reap all ranks because the parent is gone: no rank outlives it, not even as a zombie."""
        self._kill()
        for pid in self._ranks:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        if self._folder and not self._orderly:
            remove_unheld(Path(self._folder).parent, wait=True)


def warm_up() -> None:
    """Import everything that each rank would import, without computing: the threads of ops do not survive a fork."""
    import torch

    from mpkit.strategies.program_calls.communication import OPERATORS, place_of_group

    for name in (
        "cloudpickle",
        "torch.distributed",
        "mpkit.launch.process.rank",
        "mpkit.strategies.packing.packing",
        "mpkit.strategies.runtime.train",
    ):
        importlib.import_module(name)
    for name in OPERATORS:  # torch looks for an operator's schema and handle at their first use
        if hasattr(torch.ops.c10d, name):
            place_of_group(name)
            assert getattr(torch.ops.c10d, name).default._handle is not None
    # Creating the first optimizer imports many modules (torch._dynamo).
    torch.optim.SGD([torch.nn.Parameter(torch.empty(1))], lr=0.1)


def join_pages() -> None:
    """Let the system hold this process's memory in pages of 2 MiB (Linux 6.1 and later): a fork copies a table of them.

    A fork copies an entry per page, and a server that has imported torch has 60,000 small ones, which take 4 ms of each
    rank's start. A rank that writes to a large page gets a small copy of what it writes to. Where the system cannot or
    may not join pages, they stay small.
    """
    if sys.platform != "linux":
        return
    madvise, huge, collapse, size = ctypes.CDLL(None).madvise, 14, 25, 2 << 20
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, rights, _, _, file_number, *_ = line.split()
        first, last = (int(address, 16) for address in place.split("-"))
        first, last = -(-first // size) * size, last // size * size
        if rights.startswith("rw") and file_number == "0" and first < last:
            for advice in (huge, collapse):
                madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), advice)


def import_installed(modules: Sequence[str]) -> None:
    """Import what the next ranks will need, since every rank would spend seconds importing a large library.

    An import that fails here is left to the ranks: they fail as well, and report it, or each takes its time.
    """
    new = [name for name in modules if name not in sys.modules]
    for name in new:
        try:
            importlib.import_module(name)
        except Exception as error:
            print(
                f"mpkit: {name} is imported by each rank, since importing it once for all of them raised "
                f"{type(error).__name__}: {error}",
                file=sys.stderr,
            )
    if new:
        gc.collect()
        gc.freeze()


def main(fork: bool = True, closed: bool = False, idle: float | None = None) -> None:
    """Run the fork server in a process and session of its own, so that the terminal's Ctrl-C does not reach it.

    Args:
        fork: whether to fork ranks, or to start them as fresh interpreters.
        closed: whether to close this process's memory to its ranks.
        idle: seconds without a launch after which it exits.
    """
    if closed:
        make_undumpable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Ranks ignore this one too, until they have a handler: mpkit.launch.process.processes.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    # Events are written to a private copy of standard output, so that nothing printed by an import mixes with them.
    out = os.dup(1)
    os.dup2(2, 1)
    if fork:
        gc.disable()  # what imports create stays: looking for garbage in it takes a quarter of their time
        warm_up()
        gc.collect()
        gc.freeze()  # the collector would touch every object, and so copy every page that the ranks share
        gc.enable()
        join_pages()
    ForkServer(out, fork, idle).serve(0)


if __name__ == "__main__":
    main()
