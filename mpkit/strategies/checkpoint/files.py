"""A folder of checkpoints, in which the last complete one can always be told from one that was cut short.

    step-00000010.partial     being written; the next training in the folder deletes it
    step-00000010             complete: it got this name when every byte was on the disk
        mpkit.json            the `CheckpointHead`, with a digest of itself and of all other files
        .metadata, *.distcp   torch.distributed.checkpoint's own files
    step-00000010.replaced    only while a newer one of the same step takes its place

A file system does a rename entirely or not at all, so a rename is what makes a checkpoint complete.

The folder may hold other things too. A training renames and deletes checkpoints only whose head names it. Nothing is
deleted but the files that a save writes, one by one; a folder that holds anything else stays, and so does a link.
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

__all__ = [
    "PARTIAL",
    "REPLACED",
    "WRITTEN",
    "CheckpointSaving",
    "Resume",
    "candidates",
    "digest",
    "is_own",
    "is_unfinished",
    "number_of",
    "open_folder",
    "read_head",
    "regular_files",
    "step_of",
]

PARTIAL, REPLACED = ".partial", ".replaced"
_NAME = re.compile(rf"step-([0-9]{{8,}})({PARTIAL}|{REPLACED})?")
WRITTEN = re.compile(rf"__[0-9]+_[0-9]+\.distcp|\.metadata(\.tmp)?|{HEAD}")


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
