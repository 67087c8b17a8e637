"""A rank's files while they grow: records in memory-mapped files, names in lines.

Data in a mapped file belongs to the kernel, not to the process: it survives SIGKILL, and other processes can read it
while the file grows. Writing to a mapped page for which the disk has no room raises SIGBUS, which would kill the rank.
So space is allocated beforehand (`posix_fallocate`); a full disk is then an OSError, and only later records are lost.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import struct
import warnings
import weakref
import zlib
from collections.abc import Callable
from pathlib import Path

from mpkit.common.disk import create, name_full_disk
from mpkit.trace import HEADER, MAGIC

_WORD = struct.Struct("<Q")
_CHECKS = struct.Struct("<QQ")
_AT_COUNT, _AT_STATE, _AT_CHECK = 8, 16, 24  # offsets of `count`, `state`, and `check` and `names`, in HEADER


class RecordFile:
    """A HEADER followed by `capacity` records of `size` bytes, of which the first `count` are complete.

    Records are packed into `map`, at `HEADER.itemsize + size * index`; `grow` replaces it. The writer sets `count`, in
    the header too, after each record. The capacity is 0 once the file is closed.
    """

    def __init__(self, path: Path, part: str, size: int, capacity: int = 4096) -> None:
        self.path, self.size, self.capacity, self.count = path, size, capacity, 0
        self._closed = False
        self._fd = create(path)
        bytes_ = HEADER.itemsize + size * capacity
        with name_full_disk(path.parent, bytes_):
            claim(self._fd, bytes_)
        self.map = mmap.mmap(self._fd, bytes_)
        self.map[: len(MAGIC[part])] = MAGIC[part]
        os.register_at_fork(after_in_child=_Forget(self))

    def append(self, record: bytes) -> bool:
        """Write a record; return False if there is no room for it (a full disk, a closed file)."""
        if self.count >= self.capacity and not self.grow():
            return False
        place = HEADER.itemsize + self.size * self.count
        self.map[place : place + self.size] = record
        self.publish(self.count + 1)
        return True

    def publish(self, count: int) -> None:
        """Mark the first `count` records as complete."""
        self.count = count
        _WORD.pack_into(self.map, _AT_COUNT, count)

    def mark(self, state: int) -> None:
        """Write a state, and go on."""
        if not self._closed:
            _WORD.pack_into(self.map, _AT_STATE, state)

    def grow(self) -> bool:
        """Double the capacity; return False if that is impossible (a full disk, a closed file)."""
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
        if self._fd < 0:  # not a view of the same file, but scratch memory
            grown[: len(self.map)] = self.map[:]
        self.map.close()
        self.map, self.capacity = grown, capacity
        return True

    def close(self, state: int, names: int = 0) -> None:
        """Write how the rank ended, and the checks of the records and of the names, and accept no more."""
        if not self._closed:
            _WORD.pack_into(self.map, _AT_STATE, state)
            if self._fd >= 0:
                self._seal(names)
        self._closed = True
        self.stop()

    def _seal(self, names: int) -> None:
        """Write the CRC-32s; later writes into the map stay out of the file."""
        length = HEADER.itemsize + self.size * self.count
        with memoryview(self.map) as view, view[HEADER.itemsize : length] as records:
            check = zlib.crc32(records)
        _CHECKS.pack_into(self.map, _AT_CHECK, 2**32 + check, names)
        self.map = mmap.mmap(self._fd, len(self.map), access=mmap.ACCESS_COPY)

    def stop(self) -> None:
        """Accept no more records, and release unused space."""
        self.capacity = 0
        if self._fd >= 0:
            os.ftruncate(self._fd, HEADER.itemsize + self.size * self.count)
            os.close(self._fd)
            self._fd = -1

    def forget(self) -> None:
        """Write into scratch memory from here on: in a forked child, since the file belongs to the parent."""
        if self.capacity and self._fd >= 0:
            scratch = mmap.mmap(-1, len(self.map))
            scratch[: HEADER.itemsize] = self.map[: HEADER.itemsize]
            os.close(self._fd)
            self.map, self._fd = scratch, -1


def warn_of_end(count: int, reason: str) -> None:
    """Warn that nothing more is recorded."""
    warnings.warn(
        f"recording stops after {count:,} records, the run goes on: {reason}; make room there or record less",
        RuntimeWarning,
        stacklevel=4,
    )


class _Forget:
    """A callback that calls `forget` without keeping the file alive, since callbacks at fork cannot be unregistered."""

    def __init__(self, file: RecordFile | NameFile) -> None:
        self._file = weakref.ref(file)

    def __call__(self) -> None:
        if (file := self._file()) is not None:
            file.forget()


class NameFile(dict[str, int]):
    """Strings by line number: `names["forward"]` writes a new string and returns its line number.

    `on_full` is called with the reason if a string cannot be written; later strings are not written either.
    """

    def __init__(self, path: Path, on_full: Callable[[OSError], None]) -> None:
        super().__init__()
        self._on_full = on_full
        self._length = self._crc = 0  # of the written data
        self.lines: list[str] = []
        self._fd = create(path, os.O_WRONLY | os.O_APPEND)
        self[""]
        os.register_at_fork(after_in_child=_Forget(self))

    def __missing__(self, name: str) -> int:
        line = len(self)
        self[name] = line
        self.lines.append(name)
        data = json.dumps(name).encode() + b"\n" if self._fd >= 0 else b""
        try:
            self._length, self._crc = self._length + len(data), zlib.crc32(data, self._crc)
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as error:  # an incomplete line is not read
            self.close()
            self._on_full(error)
        return line

    @property
    def check(self) -> int:
        """Length and CRC-32 of the written data, for the header of the records."""
        return self._length % 2**32 << 32 | self._crc

    def close(self) -> None:
        """Stop writing: later names are numbered but not written."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    forget = close  # in a forked child


def claim(fd: int, size: int) -> None:
    """Allocate `size` bytes for the file on the disk, or at least set its size."""
    try:
        os.posix_fallocate(fd, 0, size)
    except AttributeError:  # macOS does not have this call
        os.ftruncate(fd, size)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        os.ftruncate(fd, size)  # a file system that cannot allocate beforehand
