"""Run a command so that it can neither write outside its folder, nor read what is hidden from it, nor reach processes
outside, as far as Linux allows that without root.

    python -P enclose.py HOW FOLDER HIDDEN COMMAND...

    namespaces   the command has namespaces of its own: processes (it sees and signals only its own, and none outlives
                 it), users (without rights), and mounts (all is read-only except FOLDER and a /dev/shm of its own)
    landlock     for containers and systems that forbid namespaces: the command writes below FOLDER only, reads and
                 traces only its own processes, and, from Linux 6.12 on, signals only these
    none         for systems with neither: the only protection is that the command's parent is not the grader

HIDDEN are the folders that the command cannot read, as a JSON list; FOLDER may lie in one of them. Enclosures nest:
what an outer one forbids, an inner one cannot allow. Root gives up its rights.

This script imports nothing from mpkit: it is run by its path, before any code of a notebook.
"""

import ctypes
import json
import os
import signal
import struct
import subprocess
import sys

WAYS = ("namespaces", "landlock", "none")

_NEW_MOUNTS, _NEW_IPC, _NEW_USER, _NEW_PIDS = 0x00020000, 0x08000000, 0x10000000, 0x20000000
_BIND, _REC, _PRIVATE, _NOSUID, _NODEV = 0x1000, 0x4000, 0x40000, 0x2, 0x4
_MOUNT_SETATTR, _LANDLOCK = 442, 444
_RECURSIVELY, _READ_ONLY, _AT_FDCWD = 0x8000, 0x1, -100
_DIES_WITH_PARENT, _NO_NEW_PRIVILEGES, _HAS_RIGHT, _DROP_RIGHT, _SET_DUMPABLE = 1, 38, 23, 24, 4
_READ_FILE, _FILES_OF_OTHERS = 1 << 2, 1


def main(how: str, folder: str, hidden: list[str], command: list[str]) -> int:
    """Run the command, and return its exit code."""
    if sys.platform == "linux":
        _call("prctl", _DIES_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("500")  # where memory runs out, Linux ends the command, and not the grader
    if how == "namespaces":
        return _in_namespaces(folder, hidden, command)
    if sys.platform == "linux" and os.geteuid() == 0:
        _drop_rights()
    if how == "landlock":
        _landlock(folder, hidden)
    process = subprocess.Popen(command)
    _close_memory()
    return _code(process.wait())


def _call(name: str, *arguments: object) -> int:
    """Call a function of libc; raise OSError if it fails."""
    libc = ctypes.CDLL(None, use_errno=True)
    result = int(getattr(libc, name)(*arguments))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def _close_memory() -> None:
    """Close this process's memory and pipes, which are the command's too, to the command and what it starts."""
    if sys.platform == "linux":
        _call("prctl", _SET_DUMPABLE, 0, 0, 0, 0)


def _drop_rights() -> None:
    """Give up root's rights from the next exec on, of which some reach into other processes; all but that to files."""
    with open("/proc/sys/kernel/cap_last_cap") as file:
        last = int(file.read())
    for right in range(last + 1):
        if right != _FILES_OF_OTHERS and _call("prctl", _HAS_RIGHT, right, 0, 0, 0):
            _call("prctl", _DROP_RIGHT, right, 0, 0, 0)


def _code(status: int) -> int:
    return status if status >= 0 else 128 - status


# ---- namespaces ------------------------------------------------------------------------------------------------


def _in_namespaces(folder: str, hidden: list[str], command: list[str]) -> int:
    user, group = os.geteuid(), os.getegid()
    # ---- users: only the current user, without rights over others' namespaces
    _call("unshare", _NEW_USER | _NEW_MOUNTS | _NEW_IPC | _NEW_PIDS)
    inside = user or 65534  # root outside becomes nobody inside, so that its rights end with the next exec
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{inside} {user} 1"),
        ("gid_map", f"{inside} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    # ---- processes: the next child is the first of the namespace, and all others end with it
    child = os.fork()
    if child == 0:
        try:
            _call("prctl", _DIES_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
            _mounts(folder, hidden)
            os.chdir(os.getcwd())  # enter the folder of the new mounts, not the one below them
            code = _first_process(command)
        except BaseException as error:
            print(f"enclose: {error}", file=sys.stderr, flush=True)
            code = 126
        os._exit(code)
    _close_memory()
    return _code(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def _mounts(folder: str, hidden: list[str]) -> None:
    """Mount everything read-only except the folder, nothing over what is hidden, and /proc and /dev/shm anew."""

    def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
        _call("mount", source.encode(), target.encode(), kind.encode(), flags, data.encode())

    mount("none", "/", "", _REC | _PRIVATE)
    own = os.open(folder, os.O_PATH)
    for path in hidden:
        mount("tmpfs", path, "tmpfs", _NOSUID | _NODEV, "size=64k,mode=0755")
    os.makedirs(folder, exist_ok=True)  # it may have been in a folder that is hidden now
    mount(f"/proc/self/fd/{own}", folder, "", _BIND)
    os.close(own)
    _set_attributes(b"/", _RECURSIVELY, _READ_ONLY, 0)
    _set_attributes(folder.encode(), 0, 0, _READ_ONLY)
    for target, kind, data in (("/proc", "proc", ""), ("/dev/shm", "tmpfs", "size=1g,mode=1777")):
        try:
            mount(kind, target, kind, _NOSUID | _NODEV, data)
        except OSError:  # a container may hide parts of its /proc; those that it shows cannot be signalled
            continue


def _set_attributes(path: bytes, flags: int, on: int, off: int) -> None:
    attributes = struct.pack("=QQQQ", on, off, 0, 0)
    _call("syscall", _MOUNT_SETATTR, _AT_FDCWD, path, flags, attributes, ctypes.c_size_t(len(attributes)))


def _first_process(command: list[str]) -> int:
    """Run the command as a child, and reap orphans; no process inside can signal this one."""
    started = subprocess.Popen(command).pid
    _close_memory()
    while True:
        pid, status = os.wait()
        if pid == started:
            return _code(os.waitstatus_to_exitcode(status))


# ---- landlock --------------------------------------------------------------------------------------------------


def _landlock(folder: str, hidden: list[str]) -> None:
    """Allow this process and its children to write below the folder only, and to reach each other only."""
    version = _call("syscall", _LANDLOCK, None, ctypes.c_size_t(0), 1)
    # Write, remove and make files, folders, links, devices.
    writes = sum(1 << bit for bit in (1, *range(4, 13)))
    writes |= (1 << 13 if version >= 2 else 0) | (1 << 14 if version >= 3 else 0)  # refer, truncate
    reads = _READ_FILE if hidden else 0
    rules = struct.pack("=QQQ", writes | reads, 0, 0b11)[: 24 if version >= 6 else 16 if version >= 4 else 8]
    handle = _call("syscall", _LANDLOCK, rules, ctypes.c_size_t(len(rules)), 0)
    allowed = [
        (folder, writes | reads),
        ("/dev/shm", writes),
        ("/dev/null", writes & 0b10 | (writes & 1 << 14)),
    ]
    allowed += [(path, reads) for path in _visible_parts("/", hidden)] if hidden else []
    for path, access in allowed:
        try:
            place = os.open(path, os.O_PATH)
        except OSError:  # gone, or not ours to enter
            continue
        _call("syscall", _LANDLOCK + 1, handle, 1, struct.pack("=Qi", access, place), 0)
        os.close(place)
    _call("prctl", _NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    _call("syscall", _LANDLOCK + 2, handle, 0)
    os.close(handle)


def _visible_parts(folder: str, hidden: list[str]) -> list[str]:
    """Return a folder; if hidden folders lie in it, what lies beside them; nothing, if it is hidden.

    A link is left out: what it leads to is allowed or hidden by its own path.
    """
    if folder in hidden:
        return []
    if not any(path.startswith(folder.rstrip("/") + "/") for path in hidden):
        return [folder]
    try:
        inside = [each.path for each in os.scandir(folder) if not each.is_symlink()]
    except OSError:
        return []
    return [path for each in inside for path in _visible_parts(each, hidden)]


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), sys.argv[4:]))
    except OSError as problem:
        print(f"enclose: {problem}", file=sys.stderr, flush=True)
        sys.exit(126)
