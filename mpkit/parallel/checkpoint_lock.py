"""One training a folder of checkpoints: two would throw away what the other is writing.

The folder itself is locked (flock), so the lock ends with the processes that hold it, however they end. Both the
process that started the training and its rank 0 hold it: whichever lives on keeps others out. A file in the folder says
who that is, while it is so:

    in-use.partial      process 4711 on pluto
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
import warnings
from pathlib import Path

__all__ = ["FolderLock"]

HOLDER = "in-use.partial"
ENDING = 10.0
"""Seconds that are waited for the ranks of a training whose own process has ended: they end with it, within about 2."""

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
        folder: that checkpoints go to.
        joins: this is rank 0 of the training that holds it already.

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
            time.sleep(0.05)  # that training is over, and its ranks are ending
        if not joins:
            with contextlib.suppress(OSError):  # it helps who comes second, and nothing depends on it
                (folder / HOLDER).write_text(f"process {os.getpid()} on {socket.gethostname()}")

    def _take(self) -> bool:
        """Whether the lock is ours: nobody else's for a moment, and then shared with our own rank 0."""
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
        """Let others save there."""
        if self._handle < 0:
            return
        with contextlib.suppress(OSError):
            (self._folder / HOLDER).unlink()
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(self._handle, fcntl.LOCK_UN)  # for children that have inherited the handle too
        os.close(self._handle)
        self._handle = -1


def _holder(folder: Path) -> str:
    try:
        return (folder / HOLDER).read_text()[:200]
    except (OSError, ValueError):
        return ""


def _lives(holder: str) -> bool:
    """Whether that process may still be there: on another machine nobody knows."""
    words = holder.split(" ")
    if len(words) != 4 or not words[1].isdigit() or words[3] != socket.gethostname():
        return True
    try:
        os.kill(int(words[1]), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
