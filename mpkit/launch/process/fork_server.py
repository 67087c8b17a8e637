"""The process that has imported torch and from which ranks are forked.

Importing torch takes far longer than forking a process that has imported it. So one process, started with the Cluster,
imports torch and waits; each launch forks fresh ranks from it, and no state of a failed run carries over into the next.
The notebook's own process is never forked: it may have used CUDA, and it has threads.

It serves one launch at a time. Commands arrive as JSON lines on its standard input, events leave on its output:

    {"do": "launch", "folder": "...", "ranks": 4, "modules": [...]}   ->  {"event": "started", "pids": [...]}
                                                                          {"event": "exit", "rank": 2, "status": -9}
                                                                          {"event": "over"}
    {"do": "kill"}                  every rank, at once
    {"do": "close"}                 an orderly end follows
    end of file                     kill all ranks and exit; without a "close" before, the parent is gone: remove the
                                    launches' folder too

Since it holds torch in memory (about 230 MB), it exits by itself after minutes without a launch: in a class of forty,
most notebooks are being read at any moment.

The life of a rank, so that no peer sees a closed connection before its time:

    forked -> runs -> writes its result, says "done" (a byte in the done pipe) -> waits for the release pipe to close

The parent's handle is `ForkServerClient`. Python looks for modules in the current folder or the script's folder before
its own. A learner's random.py there, or a file that someone else put into a shared folder, would be imported in place
of the real module. So helper processes start with `python -P` and get this process's sys.path without these folders
(`helper_command`). Ranks set the whole sys.path afterwards, once all of mpkit has been imported, for the user's own
modules.
"""

import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import site
import subprocess
import sys
import sysconfig
import threading
import time
import warnings
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mpkit.common.exceptions import one_line
from mpkit.common.process_wide import make_undumpable
from mpkit.launch.process.run_folder import remove_unheld

START_TIMEOUT = 120.0  # seconds that importing torch may take, on a cold and busy disk
STOPPED_FOR = 2.0  # seconds that the fork server may be stopped before it is given up
IDLE, IDLE_MARGIN = 300.0, 30.0
"""Seconds without a launch after which a fork server counts as ended, and how much later it exits by itself."""

FROM = "the process that ranks are started from"
DIED = f"{FROM} has died"
TRY = f"does `{sys.executable} -P -m mpkit.launch.process.fork_server </dev/null` work in a terminal?"
STOPPED = (
    f"{FROM} (pid {{pid}}) was stopped (SIGSTOP: a debugger, a paused container); it and its ranks have been "
    "ended, and the next run starts a new one"
)


class ForkServerClient:
    """A fork server process. Starting it does not block: it imports torch while the parent continues.

    `fork` False starts a fresh interpreter per rank, which is slower but equivalent. `within` is the beginning of a
    command that runs the fork server enclosed, with its memory closed to its ranks.
    """

    def __init__(self, fork: bool = True, within: Sequence[str] = ()) -> None:
        # Without PYTHONPATH: it receives its sys.path separately.
        self._environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        start = helper_command(
            "mpkit.launch.process.fork_server:main", fork=fork, closed=bool(within), idle=IDLE + IDLE_MARGIN
        )
        # A session of its own shields it from the terminal's Ctrl-C, which goes to whole process groups.
        self._process = subprocess.Popen(
            [*within, *start], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=self._environment,
            stderr=subprocess.DEVNULL if sys.stderr is None else None, start_new_session=True,
        )  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None
        self._commands, self._events = self._process.stdin, self._process.stdout
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._events, selectors.EVENT_READ)
        self._pending = b""
        self._lock = threading.Lock()  # held while a command is written
        self._reading = threading.RLock()  # held while events are read
        self._used = time.monotonic()
        self._busy = False
        self.own_pid = 0  # the fork server's process id as itself sees it; 0 until it has imported torch
        self._closer = weakref.finalize(self, _end, self._process, self._selector, self._reading)

    @property
    def alive(self) -> bool:
        """Whether the fork server can still be used."""
        ends_soon = not self._busy and time.monotonic() - self._used > IDLE
        return self._closer.alive and not ends_soon and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The process id of the fork server, or of what encloses it."""
        return self._process.pid

    def environment_since(self) -> dict[str, str | None]:
        """Return the variables of os.environ that differ from the fork server's, with None for removed ones."""
        gone: dict[str, str | None] = dict.fromkeys(self._environment.keys() - os.environ.keys())
        return gone | {k: v for k, v in os.environ.items() if self._environment.get(k) != v}

    def tell(self, do: str, **command: Any) -> None:
        """Send a command, such as "launch"; it is lost if the fork server is gone, which `events` reports."""
        if do == "launch":
            self._busy, self._used = True, time.monotonic()
        with self._lock, suppress(BrokenPipeError, ValueError):
            self._commands.write(json.dumps({"do": do, **command}).encode() + b"\n")
            self._commands.flush()

    def events(self, timeout: float) -> list[dict[str, Any]]:
        """Return the events that arrive within `timeout` seconds; {"event": "gone", "why": ...} if it is gone."""
        with self._reading:
            if not self._closer.alive:
                return [_gone(DIED)]
            if not self._selector.select(timeout):
                late = not self.own_pid and time.monotonic() - self._used > START_TIMEOUT
                return [_gone(f"{FROM} took over two minutes to import torch; {TRY}")] if late else []
            chunk = os.read(self._events.fileno(), 65536)
            if not chunk:
                self.close()  # its pipe is closed before the system reports it as dead
                ended = f"{FROM} ended with code {self._process.returncode}; {TRY}"
                return [_gone(DIED if self.own_pid else ended)]
            *lines, self._pending = (self._pending + chunk).split(b"\n")
            events: list[dict[str, Any]] = [json.loads(line) for line in lines]
            for event in events:
                if event["event"] == "ready":
                    self.own_pid = event["pid"]
                elif event["event"] == "over":
                    self._busy, self._used = False, time.monotonic()
            return events

    def close(self) -> None:
        """End the fork server, and with it every rank."""
        self._closer()

    def kill(self) -> None:
        """Kill a fork server that does not answer; on Linux the system then kills its ranks."""
        self._process.kill()
        self._closer()


def _gone(why: str) -> dict[str, Any]:
    return {"event": "gone", "why": why}


def _end(process: subprocess.Popen[bytes], selector: selectors.BaseSelector, reading: Any) -> None:
    """End the fork server by closing its input: it then kills its ranks and exits."""
    with reading:  # the lock: no thread reads from a file that is being closed
        selector.close()
        assert process.stdin is not None and process.stdout is not None
        with suppress(OSError, ValueError):
            os.write(process.stdin.fileno(), b'{"do": "close"}\n')
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):
                pipe.close()
    try:
        process.wait(2.0)
    except subprocess.TimeoutExpired:
        process.kill()  # still importing torch, stopped or stuck; its ranks die with it
        process.wait()


START = """
import json, sys
path, module, function, arguments = json.loads(sys.argv[1])
sys.path[:] = path
getattr(__import__(module, fromlist=[function]), function)(**arguments)
"""


def helper_command(function: str, **arguments: Any) -> list[str]:
    """Return the command of a process that calls a function ("module:name") with arguments of JSON types."""
    module, _, name = function.partition(":")
    return [sys.executable, "-P", "-c", START, json.dumps([safe_path(), module, name, arguments])]


def safe_path() -> list[str]:
    """Return sys.path without the current folder and the script's, unless Python's own packages are there.

    mpkit may lie in one of these, as in a checkout that is not installed; its folder then comes last.
    """
    own = {os.path.realpath(path) for path in (*sysconfig.get_paths().values(), site.getusersitepackages())}
    script = getattr(sys.modules.get("__main__"), "__file__", None) or ""
    unsafe = {os.path.realpath(os.path.dirname(script))} if os.path.isabs(script) else set()
    if os.path.isdir(os.curdir):  # otherwise it has been deleted
        unsafe.add(os.path.realpath(os.curdir))
    safe = [path for path in sys.path if os.path.isabs(path) and os.path.realpath(path) not in unsafe - own]
    home = str(Path(__file__).parents[3])
    return safe if home in safe else [*safe, home]


class ForkServer:
    """The server's loop: reads commands, writes events, forks and reaps ranks.

    `out` is the descriptor for events; `fork` False starts each rank as a fresh interpreter; after `idle` seconds
    without a launch, the server exits.
    """

    def __init__(self, out: int, fork: bool = True, idle: float | None = None) -> None:
        self._out, self._fork, self._idle = out, fork, idle
        self.selector: selectors.BaseSelector = selectors.DefaultSelector()
        self._orderly, self._joins = False, fork
        self._folder = ""  # of the latest launch
        self._ranks: dict[int, int] = {}  # by process id, for the living ranks
        self._group = 0  # process group of the ranks and of the processes that they start
        self._undone = 0  # ranks whose function has not returned
        # Ranks write a byte to one, and exit when the other is closed; -1: there is none.
        self._done_read = self._release_write = -1

    def _say(self, event: str, **values: Any) -> None:
        line = json.dumps({"event": event, **values}).encode() + b"\n"
        with suppress(BrokenPipeError):  # the reader is gone: end of file follows on the input
            while line:
                line = line[os.write(self._out, line) :]

    def serve(self, commands: int) -> None:
        """Serve commands until their pipe is closed, or no launch has come for `idle` seconds."""
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
                    with suppress(BlockingIOError):
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
            with suppress(ProcessLookupError, PermissionError):
                os.setpgid(pid, self._group)
            self._ranks[pid] = rank
        os.close(done_write)
        os.close(release_read)
        self.selector.register(self._done_read, selectors.EVENT_READ, "done")
        self._say("started", pids=list(self._ranks))

    def start(self, rank: int, fds: dict[str, int]) -> int:
        """Start one rank: by fork where that is safe, otherwise as a fresh interpreter that imports torch again."""
        settings: dict[str, Any] = {
            "rank": rank, "group": self._group, "folder": self._folder, "fds": fds, "parent": os.getpid(),
        }  # fmt: skip
        if not self._fork:
            return subprocess.Popen(
                helper_command("mpkit.launch.process.rank:main", **settings),
                pass_fds=list(fds.values()), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            ).pid  # fmt: skip
        with warnings.catch_warnings():
            # Python warns that threads do not survive a fork. numpy's BLAS, which has them, re-creates its own.
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
            if self._release_write >= 0 or not self._ranks:  # also what the last rank left behind
                self._kill()
            if not self._ranks:
                self._release()
                self._close_done()
                self._say("over")
                if self._joins:  # now that nobody waits for the first launch
                    self._joins = False
                    join_pages()

    def _kill(self) -> None:
        """Kill every living rank, and the processes that they started."""
        if self._group:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._group, signal.SIGKILL)
        for pid in self._ranks:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _release(self) -> None:
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
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
        if self._folder and not self._orderly:
            remove_unheld(Path(self._folder).parent, wait=True)


def warm_up() -> None:
    """Import everything that each rank would import, without computing: the threads of ops do not survive a fork."""
    import torch

    from mpkit.strategies.program_calls.communication import OPERATORS, place_of_group

    mine = ("launch.process.rank", "strategies.packing.packing", "strategies.runtime.train")
    theirs = ("cloudpickle", "torch.distributed", "torch.utils.serialization")
    for name in (*theirs, *(f"mpkit.{each}" for each in mine)):
        importlib.import_module(name)
    for name in OPERATORS:  # torch looks for an operator's schema and handle at their first use
        if hasattr(torch.ops.c10d, name):
            place_of_group(name)
            assert getattr(torch.ops.c10d, name).default._handle is not None
    # Creating the first optimizer imports many modules (torch._dynamo).
    torch.optim.SGD([torch.nn.Parameter(torch.empty(1))], lr=0.1)


def join_pages() -> None:
    """Let the system hold this process's memory in pages of 2 MiB (Linux 6.1 and later), where it can.

    A fork copies an entry per page, and a server that has imported torch has 60,000 small ones, which take 4 ms of each
    rank's start. A rank that writes to a large page gets a small copy of what it writes to.
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
            each = f"mpkit: {name} is imported by each rank, since importing it once for all of them raised"
            print(f"{each} {one_line(error)}", file=sys.stderr)
    if new:
        gc.collect()
        gc.freeze()


def main(fork: bool = True, closed: bool = False, idle: float | None = None) -> None:
    """Run the fork server in a process and session of its own, so that the terminal's Ctrl-C does not reach it.

    `closed`: close this process's memory to its ranks. The other arguments are those of `ForkServer`.
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
        gc.freeze()  # the collector would touch every object, and so copy every page that the ranks share
        gc.enable()
    ForkServer(out, fork, idle).serve(0)


if __name__ == "__main__":
    main()
