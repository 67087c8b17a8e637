"""A folder of checkpoints, in which a complete one always differs from one that was cut short.

    step-00000010.partial     being written; the next training in the folder deletes it
    step-00000010             complete: it got this name when every byte was on the disk
        mpkit.json            the `CheckpointHead`, with a digest of itself and of all other files
        rank-0.pt, ...        what each rank holds (`parts`)
    step-00000020.older-...   set aside by a training that went on from an earlier step

A rename, which a file system does entirely or not at all, makes a checkpoint complete.

A folder belongs to one training, which begins in a folder without checkpoints, or goes on from one of them and sets
later ones aside. A training deletes only its own checkpoints and those that were cut short, and of these only the files
that a save writes, one by one; a folder that holds anything else stays, and so does a link.

Two trainings in a folder would delete what the other is writing, so a training locks it (flock). The lock ends with the
processes that hold it, however they end: the one that started the training, and its rank 0. Either keeps others out.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

from mpkit.strategies.checkpoint.head import HEAD, CheckpointHead, DamagedCheckpoint, open_plain, read_told

ENDING = 4.0  # seconds to wait for the ranks of a training that was ended; they end within about 2
_WITHOUT_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF, errno.EINVAL}


class FolderLock:
    """A lock on a folder of checkpoints, held until `release` or the end of this process.

    `joins` is for rank 0 of the training that already holds the lock. A ValueError says that another one does.
    """

    def __init__(self, folder: Path, *, joins: bool = False) -> None:
        self._folder, self._joins = folder, joins
        self._handle = os.open(folder, os.O_RDONLY)
        deadline = time.monotonic() + ENDING
        while not self._take():
            if time.monotonic() > deadline:
                os.close(self._handle)
                raise ValueError(
                    f"checkpoint_dir={str(folder)!r} is in use by another training: each would throw away what the "
                    f"other is writing. Stop that one, or save elsewhere: checkpoint_dir={str(folder) + '-2'!r}. "
                    "(resume_from may be a folder in use.)"
                )
            time.sleep(0.05)  # perhaps the other training is over, and its ranks are ending

    def _take(self) -> bool:
        """Take the lock, alone for a moment, then shared with our own rank 0; return whether that was possible."""
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
        """Release the lock."""
        if self._handle >= 0:
            with contextlib.suppress(OSError):
                fcntl.flock(self._handle, fcntl.LOCK_UN)  # also for children that inherited the handle
            os.close(self._handle)
            self._handle = -1


PARTIAL = ".partial"
_NAME = re.compile(rf"step-([0-9]{{8,}})({PARTIAL})?")
WRITTEN = re.compile(rf"rank-[0-9]+\.pt|{HEAD}")


@dataclass(frozen=True)
class CheckpointSaving:
    """When and where a training saves checkpoints."""

    every: int
    folder: str
    keep: int
    training: str = ""  # its name, which its checkpoints bear, also after it has been resumed in its folder
    resumes: bool = False  # whether it goes on from a checkpoint of this folder


@dataclass(frozen=True)
class Resume:
    """The complete checkpoint from which a training resumes."""

    path: str
    head: CheckpointHead


def read_head(folder: Path) -> CheckpointHead:
    """Return a checkpoint's head after checking its files against it; raise DamagedCheckpoint if any differs."""
    head = read_told(folder)
    for name, (nbytes, sha) in head.files.items():
        path = folder / name
        try:
            size, there = digest(path, nbytes)
        except OSError as error:
            raise DamagedCheckpoint(f"{name} is missing ({error.strerror})") from None
        if size != nbytes:
            raise DamagedCheckpoint(f"{name} has {size} bytes, and had {nbytes} when it was written")
        if there != sha:
            raise DamagedCheckpoint(f"{name} is not what was written: its SHA-256 differs")
    return head


def digest(path: Path, wanted: int | None = None) -> tuple[int, str]:
    """Return the size in bytes and the SHA-256 of a file, or "" in its place if the size is not the wanted one."""
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        return size, "" if wanted not in (None, size) else hashlib.file_digest(file, "sha256").hexdigest()


def step_of(path: Path, ending: str = "") -> int | None:
    """Return the step in a name such as step-00000010 with this ending; None for any other name."""
    name = _NAME.fullmatch(path.name)
    return int(name[1]) if name and (name[2] or "") == ending else None


def candidates(folder: Path) -> list[Path]:
    """Return possible checkpoints, newest first."""
    steps = [(step, path) for path in folder.iterdir() if (step := step_of(path)) is not None]
    return [path for _, path in sorted(steps, reverse=True) if path.is_dir() and not path.is_symlink()]


def is_own(path: Path, training: str) -> bool:
    """Return whether this training wrote the checkpoint."""
    try:
        return read_told(path).training == training != ""
    except DamagedCheckpoint:
        return False


def holds_only_written(path: Path) -> bool:
    """Return whether this is a folder with nothing but files that a save writes."""
    try:
        return not path.is_symlink() and all(
            WRITTEN.fullmatch(each.name) and each.is_file() and not each.is_symlink()
            for each in path.iterdir()
        )
    except OSError:
        return False


def clean(folder: Path, first: int) -> None:
    """Delete unfinished checkpoints of earlier runs, and set aside those after step `first`."""
    for path in list(folder.iterdir()):
        if step_of(path, PARTIAL) is not None:
            _delete(path)
        elif (step := step_of(path)) is not None and step > first:
            path.rename(path.with_name(f"{path.name}.older-{time.time_ns():x}"))


def partial_of(folder: Path, step: int) -> Path:
    """Return the folder in which a step's checkpoint is written."""
    return folder / f"step-{step:08d}{PARTIAL}"


def publish(partial: Path, head: CheckpointHead, saving: CheckpointSaving) -> None:
    """Give a completely written checkpoint its name, and keep only the newest ones of this training."""
    # ---- all of it on the disk
    head.write(partial)
    sync(partial)
    # ---- the name
    whole = partial.with_suffix("")
    if os.path.lexists(whole):
        raise FileExistsError(f"{whole.name} is there by now, and this training did not write it")
    partial.rename(whole)
    sync(whole.parent)
    # ---- the older ones
    own = [path for path in candidates(whole.parent) if is_own(path, saving.training)]
    for old in filter(holds_only_written, own[saving.keep :]):
        with contextlib.suppress(OSError):
            _delete(old.rename(old.with_suffix(PARTIAL)))  # first the name: half of one never looks complete


def _delete(path: Path) -> None:
    """Delete a folder that holds nothing but files that a save writes."""
    if holds_only_written(path):
        with contextlib.suppress(OSError):
            for each in path.iterdir():
                each.unlink()
            path.rmdir()


def sync(folder: Path) -> None:
    """Flush the folder's own entries to the disk, where the system can do that."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def lock_folder(saving: CheckpointSaving) -> FolderLock:
    """Lock the folder where a training saves, after checking that no other training uses it."""
    lock = FolderLock(Path(saving.folder))
    try:
        _check_others(saving)
    except BaseException:
        lock.release()
        raise
    return lock


def _check_others(saving: CheckpointSaving) -> None:
    paths = sorted(Path(saving.folder).iterdir())
    asked, elsewhere = f"checkpoint_dir={saving.folder!r}", f"checkpoint_dir={saving.folder + '-2'!r}"
    others = [path.name for path in paths if step_of(path) is not None and not saving.resumes]
    if others:
        more = f" and {len(others) - 2} more" if len(others) > 2 else ""
        raise ValueError(
            f"{asked} holds checkpoints of another training: {', '.join(others[:2])}{more}. Two trainings in a folder "
            f"could not be told apart. What works: resume_from={saving.folder!r} goes on from the newest one; "
            f"{elsewhere} begins anew"
        )
    for path in paths:
        if step_of(path, PARTIAL) is not None and not holds_only_written(path):
            raise ValueError(
                f"{asked} holds {path.name}, which no training wrote, and checkpoints that are being written have such "
                f"names. Move it away, or save elsewhere: {elsewhere}"
            )
