"""The warm process of a machine: it has imported torch, and forks helpers and kernels that share its memory.

A fork server of one's own holds 230 MB, nearly all of it torch, and a kernel 280; those forked from here hold a tenth.
An instructor starts `mpkit warm /run/mpkit.sock` on the machine of a JupyterHub, and sets MPKIT_WARM=/run/mpkit.sock
for its users (docs/hub.md).

For each connection to the socket the process forks a child, which goes through these phases:

    confine   it takes the caller's limits, control group, groups and user; until then it reads nothing from the caller
    check     it rejects a caller with another Python, torch or mpkit, or in other namespaces (a container)
    become    it takes the caller's streams, environment and folder, and calls the function that the caller asks for

As root it serves all users, and else the user who started it. The warm process itself reads nothing from anybody.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import pwd
import resource
import signal
import socket
import struct
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

from mpkit.launch.process.boot import package_files
from mpkit.launch.process.fork_server import warm_up

__all__ = ["MESSAGE", "identity", "main"]

MESSAGE = 1 << 20
"""The most bytes of a caller's message."""

PATIENCE = 10.0
"""Seconds that a caller has to send its message."""

IMPORTED = (
    "ipykernel.kernelapp", "ipywidgets", "anywidget", "plotly.graph_objects", "sympy", "torch.distributed.tensor",
    "torch._dynamo", "mpkit.strategies.prepare.prepare", "mpkit.launch.session.run", "mpkit.models", "mpkit.data",
)  # fmt: skip
"""What kernels import, where it is installed; `warm_up` imports what ranks do."""

LIMITS = {
    "Max cpu time": resource.RLIMIT_CPU,
    "Max file size": resource.RLIMIT_FSIZE,
    "Max data size": resource.RLIMIT_DATA,
    "Max stack size": resource.RLIMIT_STACK,
    "Max core file size": resource.RLIMIT_CORE,
    "Max processes": resource.RLIMIT_NPROC,
    "Max open files": resource.RLIMIT_NOFILE,
    "Max locked memory": resource.RLIMIT_MEMLOCK,
    "Max address space": resource.RLIMIT_AS,
}
"""Limits by their names in /proc/PID/limits."""

NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user")
PR_SET_NO_NEW_PRIVS = 38


class CallerRejection(Exception):
    """Why a caller gets no process; it reads this."""


def identity() -> dict[str, Any]:
    """Return what caller and warm process must have in common, so that one can stand in for the other's child."""
    files = {name: os.path.realpath(file) for name, file in package_files().items()}
    return {"environment": os.path.realpath(sys.prefix), "version": sys.version, **files}


def main(path: str) -> NoReturn:
    """Serve at a socket until a signal ends it; the children go on.

    Raises:
        OSError: the socket cannot be made there.
    """
    gc.disable()
    warm_up()
    for name in IMPORTED:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the collector would touch every object, and so copy every page that the children share
    gc.enable()
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    os.chmod(path, 0o666)  # whoever connects gets a process of its own user, and nothing else
    listener.listen(64)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps the children
    print(f"mpkit: forks helpers and kernels for {_whom()}: export MPKIT_WARM={path}", flush=True)
    while True:
        caller, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _serve(caller)
        caller.close()


def _whom() -> str:
    return "every user of this machine" if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name


def _serve(caller: socket.socket) -> NoReturn:
    """Become the process that a caller asks for; a caller that is rejected reads why."""
    status = 70
    try:
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        # ---- confine
        _confine(caller)
        # ---- check
        asked, streams = _receive(caller)
        _check(asked)
        caller.sendall(json.dumps({"pid": os.getpid()}).encode())
        caller.close()
        # ---- become
        _become(asked, streams)
        module, function = asked["entry"].split(":")
        getattr(importlib.import_module(module), function)(*asked["arguments"])
        status = 0
    except CallerRejection as reason:
        with contextlib.suppress(OSError):
            caller.sendall(json.dumps({"rejected": str(reason)}).encode())
    except Exception as error:
        traceback.print_exception(error)  # on the caller's stream for errors, once it has been taken
    finally:
        os._exit(status)


def _confine(caller: socket.socket) -> None:
    """Give this process the limits, the control group, the groups and the user of its caller.

    Raises:
        CallerRejection: this process may not become that user, or the caller is in namespaces of its own.
    """
    pid, uid, gid = struct.unpack("3i", caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    try:
        if os.stat(f"/proc/{pid}").st_uid != uid and os.geteuid() == 0:
            raise CallerRejection("the process that asks has ended, or hides itself from /proc")
        others = [name for name in NAMESPACES if _namespace(pid, name) != _namespace("self", name)]
        if others:
            raise CallerRejection(
                f"its caller is in a container, or sees other folders (namespaces: {', '.join(others)})"
            )
        if os.geteuid() != 0:
            if uid != os.geteuid():
                raise CallerRejection(f"it serves {_whom()} only; started by root, it serves every user")
        else:
            _take_limits(pid)
            _join_control_group(pid)
            user = _user_name(uid)
            os.setgroups(os.getgrouplist(user, gid) if user else [gid])
            os.setgid(gid)
            os.setuid(uid)
    except OSError as error:
        raise CallerRejection(f"it cannot take the caller's place: {error}") from None
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def _namespace(pid: int | str, name: str) -> str:
    return os.readlink(f"/proc/{pid}/ns/{name}")


def _user_name(uid: int) -> str | None:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return None


def _take_limits(pid: int) -> None:
    """Take the caller's limits (`ulimit`); one that this process cannot raise to the caller's stays lower."""
    for line in Path(f"/proc/{pid}/limits").read_text().splitlines()[1:]:
        words, soft, hard = line[:26].strip(), *line[26:].split()[:2]
        if words in LIMITS:
            low, high = (
                resource.RLIM_INFINITY if each == "unlimited" else int(each) for each in (soft, hard)
            )
            with contextlib.suppress(ValueError):
                resource.setrlimit(LIMITS[words], (low, high))


def _join_control_group(pid: int) -> None:
    """Join the caller's control group, so that this process counts against its limits of memory and time."""
    mine, theirs = (set(Path(f"/proc/{each}/cgroup").read_text().splitlines()) for each in ("self", pid))
    for line in theirs - mine:
        if not line.startswith("0::"):
            raise CallerRejection(f"it cannot join the caller's control group, which is of version 1: {line}")
        Path(f"/sys/fs/cgroup{line[3:]}/cgroup.procs").write_text(str(os.getpid()))


def _receive(caller: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return the caller's message, and its three streams."""
    caller.settimeout(PATIENCE)
    try:
        content, streams, _, _ = socket.recv_fds(caller, MESSAGE, 3)
        while not content.endswith(b"\n") and len(content) < MESSAGE and (more := caller.recv(MESSAGE)):
            content += more
        asked = json.loads(content)
    except (OSError, ValueError) as error:
        raise CallerRejection(f"it cannot read what is asked: {error}") from None
    if len(streams) != 3:
        raise CallerRejection(f"{len(streams)} streams came, and 3 are needed: input, output, errors")
    return asked, streams


def _check(asked: dict[str, Any]) -> None:
    """Reject a caller whose own child would be another program than this one."""
    mine = identity()
    for name, value in mine.items():
        if asked["identity"].get(name) != value:
            raise CallerRejection(
                f"it has another {name}: {value!r}, and the caller {asked['identity'].get(name)!r}"
            )


def _become(asked: dict[str, Any], streams: list[int]) -> None:
    """Take the caller's streams, environment, folder and module search path."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    for stream in streams:
        if stream > 2:
            os.close(stream)
    os.environ.clear()
    os.environ.update(asked["environment"])
    with contextlib.suppress(OSError):  # as for a child, if the folder is gone
        os.chdir(asked["folder"])
    sys.path[:] = asked["path"]
