"""The folder of one launch: what the ranks read, and room for what they will write.

The process that launches holds a lock on the file `lock` in it for as long as it wants the folder. The system frees the
lock when that process ends, however it ends; so each new launch removes the folders of this user that nobody holds.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from mpkit.common.disk import name_full_disk
from mpkit.common.launch_folder import RESERVED, Settings, reserve
from mpkit.common.private import NO_LINK, create

__all__ = ["RunFolder", "new_folder", "remove_unheld"]

PREFIX, LOCK = "mpkit-run-", "lock"


class RunFolder:
    """A folder that this process holds, and removes at the end.

    Args:
        path: a folder that another process has made; None makes one, of mode 0700.

    Attributes:
        path: the folder.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._made = path is None
        if path is None:
            _sweep()
            new = Path(tempfile.mkdtemp(prefix="mpkit-new-"))
            os.close(create(new / LOCK))
            self._lock = _hold(new)
            path = new.rename(new.with_name(new.name.replace("mpkit-new-", PREFIX)))  # held from the start
        else:
            self._lock = _hold(path)
        self.path = path

    def keep(self) -> None:
        """Let the folder outlive this process: nobody removes it."""
        self._made = False
        (self.path / LOCK).unlink(missing_ok=True)

    def remove(self) -> None:
        """Let go of the folder, and remove it if this process made it."""
        if self._made:
            shutil.rmtree(self.path, ignore_errors=True)  # which follows no links
        os.close(self._lock)


def new_folder(settings: Settings, meta: Mapping[str, Any], payload: bytes) -> RunFolder:
    """Create a folder with all files that the ranks read.

    Args:
        settings, meta, payload: the contents of these files.

    Raises:
        OSError: the disk has no space for the files that the ranks need.
    """
    files = {
        "settings.json": settings.dumps(),
        "meta.json": json.dumps(meta).encode(),
        "payload.pkl": payload,
    }
    needed = sum(map(len, files.values())) + settings.ranks * sum(RESERVED.values())
    with name_full_disk(tempfile.gettempdir(), needed):
        folder = RunFolder()
        try:
            for name, content in files.items():
                (folder.path / name).write_bytes(content)
            reserve(folder.path, settings.ranks)
        except BaseException:
            folder.remove()
            raise
    return folder


def remove_unheld(path: str | Path, wait: bool = False) -> None:
    """Remove a folder unless a process holds it; or `wait` until none does, since its last process is just ending."""
    with suppress(
        OSError
    ):  # another process was first, holds it, or it belongs to another user, or is to stay
        handle = os.open(Path(path) / LOCK, os.O_RDONLY | NO_LINK)
        try:
            if os.fstat(handle).st_uid == os.geteuid():
                fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(handle)


def _sweep() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        remove_unheld(folder)


def _hold(path: Path) -> int:
    handle = os.open(path / LOCK, os.O_RDONLY | NO_LINK)
    fcntl.flock(handle, fcntl.LOCK_SH)
    return handle
