"""Folders and files that no other user has a hand in: never reached through a link, never there before.

make_private    a new folder that only this user can enter
is_private      whether a folder that another process of this user should have made is one
create          a new file in it
NO_LINK         the flag with which files that exist are opened
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

__all__ = ["NO_LINK", "create", "is_private", "make_private"]

NO_LINK = getattr(os, "O_NOFOLLOW", 0)  # Windows has no such flag


def make_private(folder: Path) -> Path:
    """Make a folder of mode 0700, and return it.

    Raises:
        FileExistsError: something has this name already, a link perhaps.
    """
    folder.mkdir(0o700)
    return folder


def is_private(folder: Path) -> bool:
    """Return whether this is a folder, and no link to one, that belongs to this user and lets nobody else in.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as name:
    ...     inside = make_private(Path(name) / "inside")
    ...     (Path(name) / "link").symlink_to(inside)
    ...     is_private(inside), is_private(Path(name) / "link"), is_private(Path(name) / "nothing")
    (True, False, False)
    """
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def create(path: Path, flags: int = os.O_RDWR, mode: int = 0o600) -> int:
    """Create a file, and return its descriptor.

    Raises:
        FileExistsError: something has this name already, a link perhaps.
    """
    return os.open(path, flags | os.O_CREAT | os.O_EXCL | NO_LINK, mode)
