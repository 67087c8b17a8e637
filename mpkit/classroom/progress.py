"""A student's progress: one file in the course's folder, and nowhere else."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

__all__ = ["FILE", "Done", "Progress"]

FILE = "mpkit-progress.json"
VERSION = 1


@dataclass(frozen=True)
class Done:
    """A student's progress in one exercise.

    Attributes:
        tries: how often the exercise was checked.
        failures: how often in a row it failed since it was last solved.
        passed: whether it was ever solved.
    """

    tries: int = 0
    failures: int = 0
    passed: bool = False


@dataclass(frozen=True)
class Progress:
    """A student's progress in all exercises.

    Attributes:
        path: the path of the file.
        done: the progress in each exercise, by name.
    """

    path: Path
    done: Mapping[str, Done]

    @classmethod
    def read(cls, folder: Path | None = None) -> Progress:
        """Read the progress file of a folder; None: of the current one, which is the notebook's.

        A file that cannot be read is renamed, and progress begins anew.
        """
        path = (folder if folder is not None else Path.cwd()) / FILE
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
            if told["version"] != VERSION:
                raise ValueError(f"version {told['version']}")
            return cls(path, {name: Done(**one) for name, one in told["exercises"].items()})
        except FileNotFoundError:
            return cls(path, {})
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            return cls(_put_aside(path, error), {})

    def after(self, name: str, passed: bool) -> Progress:
        """Return the progress after one more check of an exercise."""
        before = self.done.get(name, Done())
        failures = 0 if passed else before.failures + 1
        now = replace(before, tries=before.tries + 1, failures=failures, passed=before.passed or passed)
        return replace(self, done={**self.done, name: now})

    def write(self) -> None:
        """Write the file atomically; warn if it cannot be written."""
        told = {"version": VERSION, "exercises": {name: vars(one) for name, one in sorted(self.done.items())}}
        partial = self.path.with_suffix(f".{os.getpid()}.partial")
        try:
            partial.write_text(json.dumps(told, indent=1), encoding="utf-8")
            partial.replace(self.path)
        except OSError as error:
            warnings.warn(
                f"your progress is not kept, since {self.path} cannot be written: {error}", stacklevel=3
            )


def _put_aside(path: Path, error: Exception) -> Path:
    aside = path.with_suffix(".broken.json")
    try:
        path.replace(aside)
    except OSError:
        aside = path
    warnings.warn(
        f"{path.name} could not be read ({error}); it lies in {aside.name} now, and progress begins anew",
        stacklevel=4,
    )
    return path
