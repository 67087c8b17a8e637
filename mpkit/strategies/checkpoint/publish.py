"""What the rank that saves does in the folder of checkpoints: clean, publish, delete the older ones."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from mpkit.strategies.checkpoint.files import (
    PARTIAL,
    REPLACED,
    WRITTEN,
    CheckpointSaving,
    candidates,
    is_own,
    is_unfinished,
    number_of,
    open_folder,
    regular_files,
    step_of,
)
from mpkit.strategies.checkpoint.head import HEAD, CheckpointHead

__all__ = ["clean", "may_replace", "next_number", "partial_of", "publish"]


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
