"""One training per folder of checkpoints: two would delete what the other is writing.

The folder itself is locked (flock), so the lock ends with the processes that hold it, however they end. Both the
process that started the training and its rank 0 hold it, so either one keeps others out. Meanwhile a file in the
folder names the holder:

    in-use.partial      process 4711 on pluto
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import time
import warnings
from pathlib import Path

from mpkit.strategies.checkpoint.head import open_plain

__all__ = ["FolderLock"]

HOLDER = "in-use.partial"
ENDING = 10.0
"""Seconds to wait for the ranks of a training whose own process has ended: they end with it, within about 2."""

_WITHOUT_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF, errno.EINVAL}


class FolderLock:
    """A lock on a folder of checkpoints, held until `release` or the end of this process.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> lock = FolderLock(folder)
    >>> FolderLock(folder)
    Traceback (most recent call last):
        ...
    ValueError: checkpoint_dir='...' is in use by another training (process ... on ...): ...
    >>> lock.release()
    >>> FolderLock(folder).release()

    Args:
        folder: folder of checkpoints.
        joins: whether this is rank 0 of the training that already holds the lock.

    Raises:
        ValueError: another training holds it.
    """

    def __init__(self, folder: Path, *, joins: bool = False) -> None:
        self._folder, self._joins = folder, joins
        self._handle = os.open(folder, os.O_RDONLY)
        deadline = time.monotonic() + ENDING
        while not self._take():
            holder = _holder(folder)
            if (holder and _lives(holder)) or time.monotonic() > deadline:
                os.close(self._handle)
                raise ValueError(
                    f"checkpoint_dir={str(folder)!r} is in use by another training"
                    f"{f' ({holder})' if holder else ''}: each would throw away what the other is writing. Stop that "
                    f"one, or save elsewhere: checkpoint_dir={str(folder) + '-2'!r}. (resume_from may be a folder in "
                    "use.)"
                )
            time.sleep(0.05)  # the other training is over, and its ranks are ending
        self._holder = f"process {os.getpid()} on {socket.gethostname()}"
        if not joins:
            with contextlib.suppress(OSError):  # the file only informs whoever comes second
                if _holder(folder):  # of one that was killed
                    (folder / HOLDER).unlink()
                with (folder / HOLDER).open("x") as file:
                    file.write(self._holder)

    def _take(self) -> bool:
        """Return whether the lock could be taken: alone for a moment, then shared with our own rank 0."""
        try:
            import fcntl
        except ImportError:  # Windows
            return True
        try:
            if not self._joins:
                fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(self._handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                raise
            warnings.warn(
                f"{self._folder} is on a file system without locks ({error.strerror}): nothing keeps a second training "
                "from saving there, and either would throw away what the other is writing",
                stacklevel=4,
            )
        return True

    def release(self) -> None:
        """Release the lock, so that others can save there."""
        if self._handle < 0:
            return
        with contextlib.suppress(OSError):
            if _holder(self._folder) == self._holder:
                (self._folder / HOLDER).unlink()
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(self._handle, fcntl.LOCK_UN)  # also for children that inherited the handle
        os.close(self._handle)
        self._handle = -1


def _holder(folder: Path) -> str:
    """Return what the file says of the holder; "" if there is none, or none that a training wrote."""
    try:
        with open_plain(folder / HOLDER) as file:
            words = file.read(300).decode()
    except (OSError, ValueError):
        return ""
    return words if re.fullmatch(r"process [0-9]+ on \S+", words) else ""


def _lives(holder: str) -> bool:
    """Return whether the holder may still run; one on another machine always may."""
    _, process, _, machine = holder.split(" ")
    if machine != socket.gethostname():
        return True
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
