"""The process that has imported torch and from which ranks are forked.

Importing torch takes far longer than forking a process that has imported it. So one process, started with
 the Cluster, imports torch and waits; each launch forks fresh ranks from it, and no state of a failed run
carries over into the next. The notebook's own process is never forked: it may have used CUDA, and it has threads.

It receives commands and sends events as JSON lines, over its standard input and output:

    {"do": "import", "modules": ["transformers.models.gpt2.modeling_gpt2"]}      once, for all later ranks
    {"do": "launch", "id": 7, "folder": "...", "ranks": 4}   ->  {"event": "started", "id": 7, "pids": [...]}
                                                                 {"event": "exit", "id": 7, "rank": 2, "status": -9}
                                                                 {"event": "over", "id": 7}
    {"do": "kill", "id": 7}         every rank of that launch, at once
    {"do": "close"}                 an orderly end follows
    end of file                     kill all ranks and exit; without a "close" before, the parent is gone: remove the
                                    launches' folders too

The life of a rank, so that no peer sees a closed connection before its time:

    forked -> runs -> writes its result, says "done" (a byte in the done pipe) -> waits for the release pipe to close
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import sys
import warnings
from dataclasses import dataclass, field
from typing import Any

from mpkit.common.this_process import make_undumpable
from mpkit.launch.process.run_folder import remove_unheld

__all__ = ["main"]


@dataclass
class RankGroup:
    """The ranks of one launch as the fork server sees them."""

    id: int
    pids: dict[int, int]  # pid -> rank, for the living ranks
    group: int  # process group of the ranks and of the processes that they start
    done_read: int  # ranks write a byte when their function has returned
    release_write: int  # closing it lets the ranks exit; -1 once closed
    ranks: int
    done: int = 0
    killed: bool = False

    def release(self) -> None:
        """Let the ranks exit, once all of them have finished."""
        if self.release_write >= 0:
            os.close(self.release_write)
            self.release_write = -1

    def signal(self, number: int) -> None:
        """Send a signal to every living rank; SIGKILL also goes to the processes that they started."""
        if number == signal.SIGKILL:
            self.killed = True
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.group, number)
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


@dataclass
class ForkServer:
    """The server's loop: reads commands, writes events, forks and reaps ranks."""

    out: int
    fork: bool
    rank_groups: dict[int, RankGroup] = field(default_factory=dict)
    folders: set[str] = field(default_factory=set)
    orderly: bool = False
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def say(self, event: str, **values: Any) -> None:
        line = json.dumps({"event": event, **values}).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):  # the reader is gone: end of file follows on the input
            while line:
                line = line[os.write(self.out, line) :]

    def serve(self, commands: int) -> None:
        """Serve commands until their pipe is closed."""
        child_read, child_write = os.pipe()
        for end in (child_read, child_write):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(child_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler must exist for the wakeup to be written
        self.selector.register(commands, selectors.EVENT_READ, "commands")
        self.selector.register(child_read, selectors.EVENT_READ, "child")
        self.say("ready", pid=os.getpid())
        pending = b""
        while True:
            for key, _ in self.selector.select():
                if key.data == "commands":
                    chunk = os.read(commands, 65536)
                    if not chunk:
                        return self.abandon()
                    *lines, pending = (pending + chunk).split(b"\n")
                    for line in lines:
                        self.obey(json.loads(line))
                elif key.data == "child":
                    with contextlib.suppress(BlockingIOError):
                        os.read(child_read, 4096)
                    self.reap()
                elif key.data.done_read >= 0:  # otherwise it ended during this round of events
                    self.count_done(key.data)

    def obey(self, command: dict[str, Any]) -> None:
        if command["do"] == "launch":
            self.launch(command["id"], command["folder"], command["ranks"])
        elif command["do"] == "close":
            self.orderly = True
        elif command["do"] == "import":
            import_installed(command["modules"])
        elif command["id"] in self.rank_groups:
            self.rank_groups[command["id"]].signal(signal.SIGKILL)

    def launch(self, number: int, folder: str, ranks: int) -> None:
        """Fork the ranks, which find each other through a file in the launch's folder."""
        self.folders.add(folder)
        done_read, done_write = os.pipe()
        release_read, release_write = os.pipe()
        inherited = {"done": done_write, "release": release_read}
        mine = [done_read, release_write, self.out]
        pids: dict[int, int] = {}
        group = 0
        for rank in range(ranks):
            pid = self.start(rank, group, folder, inherited, mine)
            group = group or pid
            # Parent and child both set it, so that it is set whichever runs first.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.setpgid(pid, group)
            pids[pid] = rank
        os.close(done_write)
        os.close(release_read)
        rank_group = RankGroup(number, pids, group, done_read, release_write, ranks)
        self.rank_groups[number] = rank_group
        self.selector.register(done_read, selectors.EVENT_READ, rank_group)
        self.say("started", id=number, pids=list(pids))

    def start(self, rank: int, group: int, folder: str, fds: dict[str, int], mine: list[int]) -> int:
        """Start one rank: by fork where that is safe, otherwise as a fresh interpreter that imports torch again."""
        parent = os.getpid()
        if not self.fork:
            import subprocess

            from mpkit.launch.process.boot import boot_command

            config = json.dumps([rank, group, folder, fds, parent])
            return subprocess.Popen(
                boot_command("mpkit.launch.process.rank:run_spawned", config),
                pass_fds=list(fds.values()),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            ).pid
        with warnings.catch_warnings():
            # Python warns that threads do not survive a fork. The existing ones belong to numpy's BLAS,
            # which re-creates them.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            try:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for fd in mine:
                    os.close(fd)
                for rank_group in self.rank_groups.values():
                    for fd in (rank_group.done_read, rank_group.release_write):
                        if fd >= 0:
                            os.close(fd)
                self.selector.close()
                from mpkit.launch.process.rank import main as rank_main

                rank_main(rank, group, folder, fds, parent)
            finally:
                os._exit(70)  # never return to the fork server's loop
        return pid

    def count_done(self, rank_group: RankGroup) -> None:
        """Count a rank whose function has returned; release all ranks together once the last one has."""
        said = os.read(rank_group.done_read, 64)
        rank_group.done += len(said)
        if rank_group.done >= rank_group.ranks:
            rank_group.release()
        if not said:  # all ends are closed: every rank has exited
            self.selector.unregister(rank_group.done_read)
            os.close(rank_group.done_read)
            rank_group.done_read = -1
            self.forget_if_over(rank_group)

    def reap(self) -> None:
        """Reap ranks that have exited. If one exits before all have finished, kill the others."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for rank_group in list(self.rank_groups.values()):
                if pid in rank_group.pids:
                    rank = rank_group.pids.pop(pid)
                    code = os.waitstatus_to_exitcode(status)
                    self.say("exit", id=rank_group.id, rank=rank, status=code, killed=rank_group.killed)
                    if rank_group.release_write >= 0 and not rank_group.killed:
                        rank_group.signal(signal.SIGKILL)
                    self.forget_if_over(rank_group)

    def forget_if_over(self, rank_group: RankGroup) -> None:
        if not rank_group.pids and rank_group.id in self.rank_groups:
            rank_group.signal(signal.SIGKILL)  # kill processes that the ranks started and left behind
            rank_group.release()
            if rank_group.done_read >= 0:
                self.selector.unregister(rank_group.done_read)
                os.close(rank_group.done_read)
                rank_group.done_read = -1
            del self.rank_groups[rank_group.id]
            self.say("over", id=rank_group.id)

    def abandon(self) -> None:
        """Kill and reap all ranks because the parent is gone: no rank outlives it, not even as a zombie."""
        for rank_group in self.rank_groups.values():
            rank_group.signal(signal.SIGKILL)
            for pid in rank_group.pids:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)
        for folder in [] if self.orderly else self.folders:
            remove_unheld(folder, wait=True)


def warm_up() -> None:
    """Import everything that each rank would import, without computing: the threads of ops do not survive a fork."""
    import torch

    for name in (
        "cloudpickle",
        "torch.distributed",
        "mpkit.launch.process.rank",
        "mpkit.strategies.packing.packing",
        "mpkit.strategies.runtime.train",
        "mpkit.strategies.program_calls.comparison",
    ):
        importlib.import_module(name)
    # Creating the first optimizer imports many modules (torch._dynamo).
    torch.optim.SGD([torch.nn.Parameter(torch.empty(1))], lr=0.1)


def import_installed(modules: list[str]) -> None:
    """Import what the next ranks will need, since every rank would spend seconds importing a large library.

    An import that fails here is left to the ranks: they fail as well, and report it, or each takes its time.
    """
    for name in modules:
        if name not in sys.modules:
            try:
                importlib.import_module(name)
            except Exception as error:
                print(
                    f"mpkit: {name} is imported by each rank, since importing it once for all of them raised "
                    f"{type(error).__name__}: {error}",
                    file=sys.stderr,
                )
    gc.collect()
    gc.freeze()


def main(*options: str) -> None:
    """Run the fork server in a process and session of its own, so that the terminal's Ctrl-C does not reach it.

    Args:
        options: "--spawn" starts ranks as fresh interpreters instead of forking them; "--closed" closes this
            process's memory to its ranks.
    """
    fork = "--spawn" not in options
    if "--closed" in options:
        make_undumpable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(
        signal.SIGUSR1, signal.SIG_IGN
    )  # in ranks too, until they have a handler: mpkit.launch.process.stacks
    # Events are written to a private copy of standard output, so that nothing printed by an import mixes with them.
    out = os.dup(1)
    os.dup2(2, 1)
    if fork:
        gc.disable()  # what imports create stays: looking for garbage in it takes a quarter of their time
        warm_up()
        gc.collect()
        gc.freeze()  # the collector would touch every object, and so copy every page that the ranks share
        gc.enable()
    ForkServer(out, fork).serve(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
