"""What lies in a folder of checkpoints and is not this training's: found before a rank starts."""

from __future__ import annotations

from pathlib import Path

from mpkit.strategies.checkpoint.files import (
    PARTIAL,
    REPLACED,
    CheckpointSaving,
    Resume,
    candidates,
    is_own,
    is_unfinished,
    step_of,
)
from mpkit.strategies.checkpoint.head import DamagedCheckpoint, read_told
from mpkit.strategies.checkpoint.lock import FolderLock
from mpkit.strategies.checkpoint.publish import may_replace

__all__ = ["lock_folder"]


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
