"""A folder of checkpoints, in which the last complete one can always be told from one that was cut short.

    step-00000010.partial     being written; whoever finds it later deletes it
    step-00000010             complete: it got this name when every byte was on the disk
        mpkit.json            the `Head`, with a digest of itself and of all other files
        .metadata, *.distcp   torch.distributed.checkpoint's own files
    step-00000010.replaced    only while a newer one of the same step takes its place

A file system does a rename entirely or not at all, so a rename is what makes a checkpoint complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from mpkit.parallel.checkpoint.head import Damaged, Head, read_told

__all__ = [
    "Resume",
    "Saving",
    "candidates",
    "clean",
    "digest",
    "next_number",
    "partial_of",
    "publish",
    "read_head",
]

PARTIAL, REPLACED = ".partial", ".replaced"
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Saving:
    """When and where a training saves checkpoints.

    Attributes:
        every: number of steps between checkpoints.
        folder: where checkpoints are saved.
        keep: how many of them are kept.
    """

    every: int
    folder: str
    keep: int


@dataclass(frozen=True)
class Resume:
    """The complete checkpoint from which a training resumes."""

    path: str
    head: Head


def read_head(folder: Path) -> Head:
    """Return a checkpoint's head after checking its files against it.

    Raises:
        Damaged: a file differs, or the head holds something that no training could have written.
    """
    head = read_told(folder)
    for name, (nbytes, sha) in head.files.items():
        path = folder / name
        if not path.is_file():
            raise Damaged(f"{name} is missing")
        if path.stat().st_size != nbytes:
            raise Damaged(f"{name} has {path.stat().st_size} bytes, and had {nbytes} when it was written")
        if digest(path)[1] != sha:
            raise Damaged(f"{name} is not what was written: its SHA-256 differs")
    return head


def digest(path: Path) -> tuple[int, str]:
    """Return the size in bytes and the SHA-256 of a file."""
    with path.open("rb") as file:
        return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()


def candidates(folder: Path, *, doubtful_first: bool = False) -> list[Path]:
    """Return possible checkpoints, newest first; those with an unreadable head come last, or first if asked."""
    checkpoints = []
    for path in folder.iterdir():
        name = path.name.removesuffix(REPLACED)
        if _NAME.fullmatch(name) and path.is_dir() and (name == path.name or not (folder / name).exists()):
            checkpoints.append((_number(path), int(name.removeprefix("step-")), path))
    newest = sorted(checkpoints, reverse=True)
    if doubtful_first:
        newest.sort(key=lambda one: one[0] >= 0)
    return [path for *_, path in newest]


def _number(path: Path) -> int:
    try:
        return read_told(path).number
    except Damaged:
        return -1


# ---- what the rank that saves does ---------------------------------------------------------------------------


def clean(folder: Path) -> None:
    """Delete what earlier runs left unfinished."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in list(folder.iterdir()):
        if path.name.endswith(PARTIAL):
            shutil.rmtree(path, ignore_errors=True)
        elif path.name.endswith(REPLACED):
            whole = path.with_name(path.name.removesuffix(REPLACED))
            if whole.exists():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.rename(whole)


def partial_of(folder: Path, step: int) -> Path:
    """Return the folder in which a step's checkpoint is written."""
    return folder / f"step-{step:08d}{PARTIAL}"


def next_number(folder: Path) -> int:
    """Return the number of the next checkpoint."""
    return 1 + max(map(_number, candidates(folder)), default=0)


def publish(partial: Path, head: Head, keep: int) -> None:
    """Give a completely written checkpoint its name, and keep only the `keep` newest ones."""
    # ---- all of it on the disk
    head.write(partial)
    sync(partial)
    # ---- the name
    whole = partial.with_name(partial.name.removesuffix(PARTIAL))
    replaced = whole.with_name(whole.name + REPLACED)
    if whole.exists():
        whole.rename(replaced)
    partial.rename(whole)
    sync(whole.parent)
    shutil.rmtree(replaced, ignore_errors=True)
    # ---- the older ones; each loses its name first, so that half of one is never taken for a whole
    for old in candidates(whole.parent)[keep:]:
        gone = old.with_name(old.name + PARTIAL)
        old.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def sync(folder: Path) -> None:
    """Flush the folder's own entries to the disk, where the system can do that."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
