"""Files: none reached through a link, none half written; a full disk is reported in a sentence with what was needed."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NO_LINK = getattr(os, "O_NOFOLLOW", 0)  # Windows has no such flag

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The error numbers of a full device, an exceeded quota, and a limit on the size of files."""


def create(path: Path, flags: int = os.O_RDWR, mode: int = 0o600) -> int:
    """Create a file that no other user has prepared, a link perhaps, and return its descriptor."""
    return os.open(path, flags | os.O_CREAT | os.O_EXCL | NO_LINK, mode)


def full_disk(error: OSError, folder: str | os.PathLike[str], needed: int | None = None) -> OSError:
    """Return an error with the same number that says where there is no space, and how many bytes were needed."""
    free = "unknown"
    with suppress(OSError):
        free = _megabytes(shutil.disk_usage(folder).free)
    words = f"needed {_megabytes(needed)}, free {free}" if needed is not None else f"free {free}"
    limit = {errno.EDQUOT: "; your quota is used up", errno.EFBIG: "; files are limited in size: `ulimit -f`"}
    return OSError(error.errno, f"no space left in {folder} ({words}{limit.get(error.errno or 0, '')})")


@contextmanager
def name_full_disk(folder: str | os.PathLike[str], needed: int | None = None) -> Iterator[None]:
    """Raise `full_disk` in place of the system's error for a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise full_disk(error, folder, needed) from None


def write_whole(path: Path, *data: bytes | memoryview) -> None:
    """Write a file completely or not at all: a full disk leaves neither a part of it nor an empty file."""
    if path.exists() and not path.is_file():  # such as a terminal or a pipe
        path.write_bytes(b"".join(data))
        return
    path = Path(os.path.realpath(path))
    partial = path.with_name(path.name + ".partial")
    try:
        with name_full_disk(path.parent, sum(map(len, data))):
            partial.unlink(missing_ok=True)  # of a process that was killed, or a link
            with os.fdopen(create(partial, os.O_WRONLY, 0o666), "wb") as file:
                file.writelines(data)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _megabytes(count: int) -> str:
    return f"{count:,} bytes" if count < 100_000 else f"{count / 1e6:,.1f} MB"
