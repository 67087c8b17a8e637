"""A folder of checkpoints, in which the last complete one can always be told from one that was cut short.

    step-00000010.partial     being written; the next training in the folder deletes it
    step-00000010             complete: it got this name when every byte was on the disk
        mpkit.json            the `CheckpointHead`, with a digest of itself and of all other files
        rank-0.pt, ...        what each rank holds (`parts`)
    step-00000010.replaced    only while a newer one of the same step takes its place

A file system does a rename entirely or not at all, so a rename is what makes a checkpoint complete.

The folder may hold other things too. A training renames and deletes checkpoints only whose head names it. Nothing is
deleted but the files that a save writes, one by one; a folder that holds anything else stays, and so does a link.

What the rank that saves does in the folder of checkpoints: clean, publish, delete the older ones.

What lies in a folder of checkpoints and is not this training's: found before a rank starts.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mpkit.strategies.checkpoint.head import HEAD, CheckpointHead, DamagedCheckpoint, open_plain, read_told
from mpkit.strategies.checkpoint.lock import FolderLock

__all__ = [
    "PARTIAL",
    "REPLACED",
    "WRITTEN",
    "CheckpointSaving",
    "Resume",
    "candidates",
    "clean",
    "digest",
    "is_own",
    "is_unfinished",
    "lock_folder",
    "may_replace",
    "next_number",
    "number_of",
    "open_folder",
    "partial_of",
    "publish",
    "read_head",
    "regular_files",
    "step_of",
]


PARTIAL, REPLACED = ".partial", ".replaced"
_NAME = re.compile(rf"step-([0-9]{{8,}})({PARTIAL}|{REPLACED})?")
WRITTEN = re.compile(rf"rank-[0-9]+\.pt|{HEAD}")


@dataclass(frozen=True)
class CheckpointSaving:
    """When and where a training saves checkpoints.

    Attributes:
        every: number of steps between checkpoints.
        folder: where checkpoints are saved.
        keep: how many of them are kept.
        training: the name of this training, which its checkpoints bear; one that is resumed in its folder keeps it.
        resumes: whether it goes on from a checkpoint of this folder.
    """

    every: int
    folder: str
    keep: int
    training: str = ""
    resumes: bool = False


@dataclass(frozen=True)
class Resume:
    """The complete checkpoint from which a training resumes."""

    path: str
    head: CheckpointHead


def read_head(folder: Path) -> CheckpointHead:
    """Return a checkpoint's head after checking its files against it.

    Raises:
        DamagedCheckpoint: a file differs, or the head holds something that no training could have written.
    """
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
    """Return the size in bytes and the SHA-256 of a file; "" in place of it if the size is not the wanted one."""
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        return size, "" if wanted not in (None, size) else hashlib.file_digest(file, "sha256").hexdigest()


def step_of(path: Path, *endings: str) -> int | None:
    """Return the step that a name such as step-00000010 tells, with one of these endings; None if it tells none."""
    name = _NAME.fullmatch(path.name)
    return int(name[1]) if name and (name[2] or "") in endings else None


def candidates(folder: Path, *, doubtful_first: bool = False) -> list[Path]:
    """Return possible checkpoints, newest first; those with an unreadable head come last, or first if asked."""
    checkpoints = []
    for path in folder.iterdir():
        step = step_of(path, "", REPLACED)
        if step is None or path.is_symlink() or not path.is_dir():
            continue
        if path.suffix != REPLACED or not path.with_suffix("").exists():
            checkpoints.append((number_of(path), step, path))
    newest = sorted(checkpoints, reverse=True)
    if doubtful_first:
        newest.sort(key=lambda one: one[0] >= 0)
    return [path for *_, path in newest]


def number_of(path: Path) -> int:
    """Return a checkpoint's number in its folder; -1 if its head cannot be read."""
    try:
        return read_told(path).number
    except DamagedCheckpoint:
        return -1


def is_own(path: Path, training: str) -> bool:
    """Return whether this training wrote the checkpoint."""
    try:
        return not path.is_symlink() and read_told(path).training == training != ""
    except DamagedCheckpoint:
        return False


def is_unfinished(path: Path) -> bool:
    """Return whether a folder holds nothing but files that a save writes."""
    try:
        with open_folder(path) as handle:
            return all(map(WRITTEN.fullmatch, regular_files(handle)))
    except OSError:
        return False


@contextlib.contextmanager
def open_folder(folder: Path) -> Iterator[int]:
    """Open a folder that is no link."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield handle
    finally:
        os.close(handle)


def regular_files(handle: int) -> list[str]:
    """Return the names in a folder, each of something else than a file with a "/" at its end."""
    names = os.listdir(handle)
    modes = [os.stat(name, dir_fd=handle, follow_symlinks=False).st_mode for name in names]
    return [name if stat.S_ISREG(mode) else f"{name}/" for name, mode in zip(names, modes, strict=True)]


def clean(folder: Path, training: str) -> None:
    """Delete what earlier runs left unfinished."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in list(folder.iterdir()):
        if step_of(path, PARTIAL) is not None:
            _delete(path)
    for path in list(folder.iterdir()):
        if step_of(path, REPLACED) is not None and is_own(path, training):
            whole = path.with_suffix("")
            if os.path.lexists(whole):
                _discard(path)
            else:
                path.rename(whole)


def partial_of(folder: Path, step: int) -> Path:
    """Return the folder in which a step's checkpoint is written."""
    return folder / f"step-{step:08d}{PARTIAL}"


def next_number(folder: Path) -> int:
    """Return the number of the next checkpoint."""
    return 1 + max(map(number_of, candidates(folder)), default=0)


def publish(partial: Path, head: CheckpointHead, saving: CheckpointSaving) -> None:
    """Give a completely written checkpoint its name, and keep only the newest ones of this training."""
    # ---- all of it on the disk
    head.write(partial)
    sync(partial)
    # ---- the name
    whole = partial.with_suffix("")
    replaced = whole.with_name(whole.name + REPLACED)
    if os.path.lexists(whole):
        if not may_replace(whole, saving):
            raise FileExistsError(f"{whole.name} is there by now, and this training did not write it")
        whole.rename(replaced)
    partial.rename(whole)
    sync(whole.parent)
    if os.path.lexists(replaced):
        _discard(replaced)
    # ---- the older ones
    own = [path for path in candidates(whole.parent) if is_own(path, saving.training)]
    for old in own[saving.keep :]:
        if is_unfinished(old):  # nobody has put anything into it
            _discard(old)


def may_replace(path: Path, saving: CheckpointSaving) -> bool:
    """Return whether a new checkpoint may take this one's place: this training's, or a damaged one where it goes on."""
    if is_own(path, saving.training):
        return True
    if not saving.resumes or path.is_symlink() or not (path / HEAD).is_file():
        return False
    return number_of(path) < 0 and is_unfinished(path)


def _discard(path: Path) -> None:
    """Delete a checkpoint; it loses its name first, so that half of one is never taken for a whole."""
    gone = path.with_suffix(PARTIAL)
    with contextlib.suppress(OSError):
        path.rename(gone)
        _delete(gone)


def _delete(path: Path) -> None:
    """Delete a folder of files that a save writes; one that holds anything else, or is none, stays as it is."""
    with contextlib.suppress(OSError), open_folder(path) as handle:
        names = regular_files(handle)
        if all(map(WRITTEN.fullmatch, names)):
            for name in names:
                os.unlink(name, dir_fd=handle)
            path.rmdir()


def sync(folder: Path) -> None:
    """Flush the folder's own entries to the disk, where the system can do that."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def lock_folder(saving: CheckpointSaving, resume: Resume | None, steps: int) -> FolderLock:
    """Lock the folder where a training saves.

    Raises:
        ValueError: another training holds it or has checkpoints there, or something is in the place of one to come.
    """
    lock = FolderLock(Path(saving.folder))
    try:
        _check_others(saving, resume.head.step if resume else 0, steps)
    except BaseException:
        lock.release()
        raise
    return lock


def _check_others(saving: CheckpointSaving, first: int, last: int) -> None:
    folder = Path(saving.folder)
    asked, elsewhere = f"checkpoint_dir={saving.folder!r}", f"checkpoint_dir={saving.folder + '-2'!r}"
    others = [] if saving.resumes else [path.name for path in candidates(folder) if _is_whole(path)]
    if others:
        more = f" and {len(others) - 2} more" if len(others) > 2 else ""
        raise ValueError(
            f"{asked} holds checkpoints of another training: {', '.join(others[:2])}{more}. Two trainings in a folder "
            f"could not be told apart. What works: resume_from={saving.folder!r} goes on from the newest one; "
            f"{elsewhere} begins anew"
        )
    for path in folder.iterdir():
        step = step_of(path, "", PARTIAL, REPLACED)
        if step is None or step % saving.every or not first < step <= last:
            continue
        if not (is_unfinished(path) if path.suffix == PARTIAL else _gives_way(path, saving)):
            raise ValueError(
                f"{asked} holds {path.name}, which this training did not write, and the checkpoint of step {step:,} "
                f"takes that name. Move it away, or save elsewhere: {elsewhere}"
            )


def _gives_way(path: Path, saving: CheckpointSaving) -> bool:
    return may_replace(path, saving) if path.suffix != REPLACED else is_own(path, saving.training)


def _is_whole(path: Path) -> bool:
    try:
        return bool(read_told(path))
    except DamagedCheckpoint:
        return False
