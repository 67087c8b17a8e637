"""The folders of launches: what the ranks read, and room for what they will write.

They lie in one folder per process, mpkit-run-*, whose file `lock` the process holds a lock on for as long as it lives.
The system frees the lock when the process ends, however it ends; so the first launch of each process removes the
folders of this user that nobody holds.
"""

import atexit
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from mpkit.common.disk import NO_LINK, create, name_full_disk
from mpkit.common.launch_folder import RESERVED, Settings, reserve

PREFIX, LOCK = "mpkit-run-", "lock"


def empty_folder() -> Path:
    """Return a new folder, of mode 0700, which stays while this process lives."""
    place = os.getpid(), tempfile.gettempdir()
    if not _folder_of_process(*place).is_dir():  # something cleans up temporary files
        _folder_of_process.cache_clear()
    return Path(tempfile.mkdtemp(prefix="launch-", dir=_folder_of_process(*place)))


@cache
def _folder_of_process(process: int, temporary: str) -> Path:
    """Make the folder of this process, and hold it until the process ends."""
    for path in Path(temporary).glob(f"{PREFIX}*"):
        remove_unheld(path)
    new = Path(tempfile.mkdtemp(prefix="mpkit-new-", dir=temporary))
    os.close(create(new / LOCK))
    _lock(new)
    path = new.rename(new.with_name(new.name.replace("mpkit-new-", PREFIX)))  # held from the start
    atexit.register(_remove_own, path, process)
    return path


def _remove_own(path: Path, process: int) -> None:
    if os.getpid() == process:  # and not a child that it has forked
        shutil.rmtree(path, ignore_errors=True)  # which follows no links


def new_folder(settings: Settings, meta: Mapping[str, Any], payload: bytes) -> Path:
    """Create a folder with all files that the ranks read; raise an OSError if the disk has no space for these."""
    texts = {"settings.json": settings.dumps(), "meta.json": json.dumps(meta).encode()}
    files = {**texts, "payload.pkl": payload}
    needed = sum(map(len, files.values())) + settings.ranks * sum(RESERVED.values())
    with name_full_disk(tempfile.gettempdir(), needed):
        folder = empty_folder()
        try:
            for name, content in files.items():
                (folder / name).write_bytes(content)
            reserve(folder, settings.ranks)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    return folder


def hold(folder: Path) -> int:
    """Hold the folder of a launch that another process has made, until the returned descriptor is closed."""
    return _lock(folder.parent)


def keep(folder: Path) -> Path:
    """Let the folder of a launch outlive its process: nothing removes it at its new path, which is returned."""
    return folder.rename(f"{folder.parent}-{folder.name}")


def remove_unheld(path: Path, wait: bool = False) -> None:
    """Remove a process's folder unless a process holds it; or `wait` until none does: its last is just ending."""
    with suppress(OSError):  # another process was first, holds it, or it is another user's, or is to stay
        handle = os.open(path / LOCK, os.O_RDONLY | NO_LINK)
        try:
            if os.fstat(handle).st_uid == os.geteuid():
                fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(handle)


def _lock(path: Path) -> int:
    handle = os.open(path / LOCK, os.O_RDONLY | NO_LINK)
    fcntl.flock(handle, fcntl.LOCK_SH)
    return handle
