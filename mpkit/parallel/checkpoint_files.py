"""A folder of checkpoints, of which the last whole one can always be told from what was cut short.

    step-00000010.partial     being written; whoever finds it later throws it away
    step-00000010             whole: it got this name when every byte was on the disk
        mpkit.json            what it is: `Head`, with a digest of itself and of all other files
        .metadata, *.distcp   torch.distributed.checkpoint's own files
    step-00000010.replaced    only while a newer one of the same step takes its place

A rename is the one thing that a file system does wholly or not at all, so it is what makes a checkpoint one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from mpkit.parallel.checkpoint_head import Damaged, Head, read_told

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
        every: steps from one to the next.
        folder: where they go.
        keep: how many of them stay.
    """

    every: int
    folder: str
    keep: int


@dataclass(frozen=True)
class Resume:
    """Where a training goes on from: a whole checkpoint."""

    path: str
    head: Head


def read_head(folder: Path) -> Head:
    """Return what a checkpoint says about itself, if its files are what it says.

    Raises:
        Damaged: they are not, or it says nothing that a training could have written.
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
    """Bytes and SHA-256 of a file."""
    with path.open("rb") as file:
        return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()


def candidates(folder: Path, *, doubtful_first: bool = False) -> list[Path]:
    """What may be whole checkpoints, newest first; those that do not tell how new they are last, or first."""
    found = []
    for path in folder.iterdir():
        name = path.name.removesuffix(REPLACED)
        if _NAME.fullmatch(name) and path.is_dir() and (name == path.name or not (folder / name).exists()):
            found.append((_number(path), int(name.removeprefix("step-")), path))
    newest = sorted(found, reverse=True)
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
    """Throw away what earlier runs left unfinished."""
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
    """Where a checkpoint is written."""
    return folder / f"step-{step:08d}{PARTIAL}"


def next_number(folder: Path) -> int:
    """The number of the checkpoint that comes next."""
    return 1 + max(map(_number, candidates(folder)), default=0)


def publish(partial: Path, head: Head, keep: int) -> None:
    """Give a checkpoint that is written its name; of the older ones keep - 1 stay."""
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
    """Until the folder's own entries are on the disk, where the system can say so."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
