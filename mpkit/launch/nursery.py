"""The warm process that ranks are forked from.

Importing torch takes seconds, forking a process that has imported it takes milliseconds. So one process, started
with the Cluster, imports torch and waits; each launch forks fresh ranks from it, and nothing of a failed run
carries over into the next. The notebook's own process is never forked: it may have touched CUDA, and it has threads.

It is spoken to in JSON lines, over its standard input and output:

    {"do": "import", "modules": ["transformers.models.gpt2.modeling_gpt2"]}      once, for all ranks to come
    {"do": "launch", "id": 7, "folder": "...", "ranks": 4}   ->  {"event": "started", "id": 7, "pids": [...]}
                                                                 {"event": "exit", "id": 7, "rank": 2, "status": -9}
                                                                 {"event": "over", "id": 7}
    {"do": "kill", "id": 7}         every rank of that launch, at once
    {"do": "folder", "folder": "..."}               of a launch to come
    {"do": "close"}                 an orderly end is next
    end of file                     whoever started us is gone: kill all ranks and leave; without a "close" before,
                                    remove the launches' folders too, which nobody else will do

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
import shutil
import signal
import sys
import warnings
from dataclasses import dataclass, field
from typing import Any

__all__ = ["main"]


@dataclass
class Brood:
    """The ranks of one launch, as the nursery sees them."""

    id: int
    pids: dict[int, int]  # pid -> rank, of the living
    group: int  # process group of all of them and of the processes they start
    done_read: int  # ranks write a byte when their function has returned
    release_write: int  # closing it lets the ranks leave; -1 once closed
    ranks: int
    done: int = 0
    killed: bool = False

    def release(self) -> None:
        """All have finished: let them go."""
        if self.release_write >= 0:
            os.close(self.release_write)
            self.release_write = -1

    def signal(self, number: int) -> None:
        """To every living rank and whatever processes they started."""
        if number == signal.SIGKILL:
            self.killed = True
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.group, number)
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


@dataclass
class Nursery:
    """The loop: commands in, events out, ranks forked and reaped."""

    out: int
    fork: bool
    broods: dict[int, Brood] = field(default_factory=dict)
    folders: set[str] = field(default_factory=set)
    orderly: bool = False
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def say(self, event: str, **values: Any) -> None:
        line = json.dumps({"event": event, **values}).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):  # the reader is gone: end of file follows on our input
            while line:
                line = line[os.write(self.out, line) :]

    def serve(self, commands: int) -> None:
        """Until the commands end."""
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
                elif key.data.done_read >= 0:  # else it ended while we went through this round's events
                    self.count_done(key.data)

    def obey(self, command: dict[str, Any]) -> None:
        if command["do"] == "launch":
            self.launch(command["id"], command["folder"], command["ranks"])
        elif command["do"] == "folder":
            self.folders.add(command["folder"])
        elif command["do"] == "close":
            self.orderly = True
        elif command["do"] == "import":
            import_installed(command["modules"])
        elif command["id"] in self.broods:
            self.broods[command["id"]].signal(signal.SIGKILL)

    def launch(self, number: int, folder: str, ranks: int) -> None:
        """Fork the ranks. They meet in a file of the launch's folder."""
        done_read, done_write = os.pipe()
        release_read, release_write = os.pipe()
        inherited = {"done": done_write, "release": release_read}
        mine = [done_read, release_write, self.out]
        pids: dict[int, int] = {}
        group = 0
        for rank in range(ranks):
            pid = self.start(rank, group, folder, inherited, mine)
            group = group or pid
            # Parent and child both set it, so that it holds for whichever comes first.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.setpgid(pid, group)
            pids[pid] = rank
        os.close(done_write)
        os.close(release_read)
        brood = Brood(number, pids, group, done_read, release_write, ranks)
        self.broods[number] = brood
        self.selector.register(done_read, selectors.EVENT_READ, brood)
        self.say("started", id=number, pids=list(pids))

    def start(self, rank: int, group: int, folder: str, fds: dict[str, int], mine: list[int]) -> int:
        """One rank, by fork where that is safe, else as a fresh interpreter that imports torch again."""
        parent = os.getpid()
        if not self.fork:
            import subprocess

            from mpkit.launch.boot import boot_command

            config = json.dumps([rank, group, folder, fds, parent])
            return subprocess.Popen(
                boot_command("mpkit.launch.rank:spawned", config),
                pass_fds=list(fds.values()),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            ).pid
        with warnings.catch_warnings():
            # Python warns that threads do not survive a fork. Those there are belong to numpy's BLAS,
            # which re-creates them.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            try:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for fd in mine:
                    os.close(fd)
                for brood in self.broods.values():
                    for fd in (brood.done_read, brood.release_write):
                        if fd >= 0:
                            os.close(fd)
                self.selector.close()
                from mpkit.launch.rank import main as rank_main

                rank_main(rank, group, folder, fds, parent)
            finally:
                os._exit(70)  # never back into the nursery's loop
        return pid

    def count_done(self, brood: Brood) -> None:
        """A rank's function has returned. Ranks leave together, when the last one's has."""
        said = os.read(brood.done_read, 64)
        brood.done += len(said)
        if brood.done >= brood.ranks:
            brood.release()
        if not said:  # all ends closed: every rank is gone
            self.selector.unregister(brood.done_read)
            os.close(brood.done_read)
            brood.done_read = -1
            self.forget_if_over(brood)

    def reap(self) -> None:
        """Collect the dead. The first that died before all had finished takes the others with it."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for brood in list(self.broods.values()):
                if pid in brood.pids:
                    rank = brood.pids.pop(pid)
                    code = os.waitstatus_to_exitcode(status)
                    self.say("exit", id=brood.id, rank=rank, status=code, killed=brood.killed)
                    if brood.release_write >= 0 and not brood.killed:
                        brood.signal(signal.SIGKILL)
                    self.forget_if_over(brood)

    def forget_if_over(self, brood: Brood) -> None:
        if not brood.pids and brood.id in self.broods:
            brood.signal(signal.SIGKILL)  # processes that the ranks started and left behind
            brood.release()
            if brood.done_read >= 0:
                self.selector.unregister(brood.done_read)
                os.close(brood.done_read)
                brood.done_read = -1
            del self.broods[brood.id]
            self.say("over", id=brood.id)

    def abandon(self) -> None:
        """Whoever started us is gone: nobody outlives it, not even as a zombie."""
        for brood in self.broods.values():
            brood.signal(signal.SIGKILL)
            for pid in brood.pids:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)
        for folder in [] if self.orderly else self.folders:
            shutil.rmtree(folder, ignore_errors=True)


def warm_up() -> None:
    """Import, once, what every rank would import. No op that computes: its threads would not survive a fork."""
    import torch

    for name in (
        "cloudpickle",
        "torch.distributed",
        "mpkit.launch.rank",
        "mpkit.launch.packing",
        "mpkit.parallel.train",
    ):
        importlib.import_module(name)
    # The first optimizer that is made imports a second's worth of modules (torch._dynamo).
    torch.optim.SGD([torch.nn.Parameter(torch.empty(1))], lr=0.1)


def import_installed(modules: list[str]) -> None:
    """Import what the next ranks will need: of a large library each would take seconds for itself.

    What fails here fails in the ranks too, where it is told.
    """
    for name in modules:
        if name not in sys.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    gc.collect()
    gc.freeze()


def main(*options: str) -> None:
    """Run by a Cluster in a process and session of its own, so that no Ctrl-C of the terminal reaches it.

    Args:
        options: "--spawn" for ranks that are fresh interpreters and not forked.
    """
    fork = "--spawn" not in options
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Events leave by a private copy of standard output: nothing printed by an import may come between them.
    out = os.dup(1)
    os.dup2(2, 1)
    if fork:
        warm_up()
        gc.collect()
        gc.freeze()  # the collector would touch every object, and so copy every page the ranks share
    Nursery(out, fork).serve(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
