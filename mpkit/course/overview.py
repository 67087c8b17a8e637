"""All exercises, and which of them a student has solved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpkit.common.safe_text import escape
from mpkit.course.catalogue import ExerciseEntry
from mpkit.course.progress import ExerciseProgress

__all__ = ["Overview"]


@dataclass(frozen=True, repr=False)
class Overview:
    """All exercises, printed and shown as a list.

    Attributes:
        families: the title and the exercises of each family.
        done: the student's progress, by exercise.
    """

    families: tuple[tuple[str, tuple[ExerciseEntry, ...]], ...]
    done: Mapping[str, ExerciseProgress]

    def __str__(self) -> str:
        return "\n\n".join(
            "\n".join([self._head(title, entries), *(f"  {self._mark(e)} {e.name}" for e in entries)])
            for title, entries in self.families
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        parts = []
        for title, entries in self.families:
            names = "".join(
                f"<li>{self._mark(e)} <code>{e.name}</code> {escape(e.text.title)}</li>" for e in entries
            )
            parts.append(
                f"<details open><summary><b>{escape(self._head(title, entries))}</b></summary>"
                f'<ul style="list-style:none;padding-left:1em;margin:4px 0 12px">{names}</ul></details>'
            )
        return "".join(parts)

    def _head(self, title: str, entries: tuple[ExerciseEntry, ...]) -> str:
        solved = sum(self._progress_of(entry).passed for entry in entries)
        return f"{title}: {solved} of {len(entries)}"

    def _mark(self, entry: ExerciseEntry) -> str:
        one = self._progress_of(entry)
        return "✔" if one.passed else "✗" if one.tries else "·"

    def _progress_of(self, entry: ExerciseEntry) -> Any:
        return self.done.get(entry.name, ExerciseProgress())
