"""A rank's files while they grow: records in memory-mapped files, names in lines.

What is written into a mapped file belongs to the kernel, not to the process: it survives SIGKILL, and others
read it while it grows. The space is asked for before it is written to (`posix_fallocate`), since a write into
a mapped page for which the disk has no room is a SIGBUS, which would kill the rank; asked for beforehand, a
full disk is an OSError, and costs the rest of the trace and not the run.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import struct
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path

from mpkit.disk import name_full_disk
from mpkit.trace import HEADER, MAGIC

__all__ = ["NameFile", "RecordFile", "claim", "warn_of_end"]

_WORD = struct.Struct("<Q")
_AT_COUNT, _AT_STATE = 8, 16  # offsets of `count` and `state` in HEADER


class RecordFile:
    """A HEADER and then `capacity` records of `size` bytes, of which the first `count` are whole.

    Attributes:
        map: what records are packed into, at `HEADER.itemsize + size * index`; another one after `grow`.
        capacity: records that fit into it; 0 once the file is closed.
        count: records that are whole. The writer sets it, and `map`'s header, after each record.
    """

    def __init__(self, path: Path, part: str, size: int, capacity: int = 4096) -> None:
        self.path, self.size, self.capacity, self.count = path, size, capacity, 0
        self._closed = False
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        bytes_ = HEADER.itemsize + size * capacity
        with name_full_disk(path.parent, bytes_):
            claim(self._fd, bytes_)
        self.map = mmap.mmap(self._fd, bytes_)
        self.map[: len(MAGIC[part])] = MAGIC[part]
        os.register_at_fork(after_in_child=_Forget(self))

    def publish(self, count: int) -> None:
        """Say that the first `count` records are whole."""
        self.count = count
        _WORD.pack_into(self.map, _AT_COUNT, count)

    def grow(self) -> bool:
        """Make room for twice as many; False where there is none (a full disk, a closed file)."""
        if not self.capacity:
            return False
        capacity = 2 * self.capacity
        bytes_ = HEADER.itemsize + self.size * capacity
        try:
            if self._fd >= 0:
                claim(self._fd, bytes_)
            grown = mmap.mmap(self._fd, bytes_)
        except OSError as error:
            self.stop()
            warn_of_end(self.count, f"{self.path} cannot grow to {bytes_:,} bytes ({error.strerror})")
            return False
        if self._fd < 0:  # not a view of the same file, but scratch
            grown[: len(self.map)] = self.map[:]
        self.map.close()
        self.map, self.capacity = grown, capacity
        return True

    def close(self, state: int) -> None:
        """Write `state` and take no more records."""
        if not self._closed:
            _WORD.pack_into(self.map, _AT_STATE, state)
        self._closed = True
        self.stop()

    def stop(self) -> None:
        """Take no more records, and give back the room that was not needed."""
        self.capacity = 0
        if self._fd >= 0:
            os.ftruncate(self._fd, HEADER.itemsize + self.size * self.count)
            os.close(self._fd)
            self._fd = -1

    def forget(self) -> None:
        """In a forked child: write into scratch from here on, the file belongs to the parent."""
        if self.capacity and self._fd >= 0:
            scratch = mmap.mmap(-1, len(self.map))
            scratch[: HEADER.itemsize] = self.map[: HEADER.itemsize]
            os.close(self._fd)
            self.map, self._fd = scratch, -1


def warn_of_end(count: int, reason: str) -> None:
    """Say that nothing more is recorded."""
    warnings.warn(
        f"recording stops after {count:,} records, the run goes on: {reason}; make room there or record less",
        RuntimeWarning,
        stacklevel=4,
    )


class _Forget:
    """Calls `forget` without keeping the file alive: what is registered at fork stays registered."""

    def __init__(self, file: RecordFile | NameFile) -> None:
        self._file = weakref.ref(file)

    def __call__(self) -> None:
        file = self._file()
        if file is not None:
            file.forget()


class NameFile(dict[str, int]):
    """Strings by line number: `names["forward"]` writes a string that is new and answers its line.

    Args:
        path: of the file.
        on_full: told why a string could not be written; none is from then on.
    """

    def __init__(self, path: Path, on_full: Callable[[OSError], None]) -> None:
        super().__init__()
        self._on_full = on_full
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        self[""]
        os.register_at_fork(after_in_child=_Forget(self))

    def __missing__(self, name: str) -> int:
        line = len(self)
        self[name] = line
        data = json.dumps(name).encode() + b"\n" if self._fd >= 0 else b""
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as error:  # a line that is not whole is not read
            self.close()
            self._on_full(error)
        return line

    def close(self) -> None:
        """Names asked for later are numbered and not written."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    forget = close  # in a forked child


def claim(fd: int, size: int) -> None:
    """Let the file have `size` bytes on the disk, or at least in name."""
    try:
        os.posix_fallocate(fd, 0, size)
    except AttributeError:  # macOS has no such call
        os.ftruncate(fd, size)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        os.ftruncate(fd, size)  # a file system that cannot say beforehand
