"""The text file of an exercise: what a student reads, and what students get wrong.

    # Pass a token round a ring

    - after: 00-start-here
    - place: 20
    - result: the token

    The task, in Markdown, below attributes of `Exercise`. {M} stands for the constant M of the Python file beside it;
    {SHARE:.0%} formats one.

    ## Start

    The hint for a student who has not written anything yet.

    ## Mistake: everybody-sends-first

    1. The first hint: a question.
    2. The next one, more specific.

    ```diff
    -    ctx.comm.recv(token, left)
    +    ctx.comm.send(token, left)
    ```

    ## Otherwise

    1. The hints if no mistake shows.

A wrong answer is a `diff` of the solution, or a whole answer in a block of `python`. A diff's lines that begin with a
blank or a minus stand in the solution, together and once; the line `@@` separates several places.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any

from mpkit.course.framework.exercise import Mistake

__all__ = ["PLACEHOLDER", "ExerciseText", "read_text"]

PLACEHOLDER = r"\{([A-Z][A-Z_]*)(:[^{}]*)?\}"
"""A constant's name and its format, in a text."""


@dataclass(frozen=True)
class ExerciseText:
    """An exercise's text file, with the constants' values in place of their names.

    Attributes:
        path: the file.
        title: its first line.
        task: the text that the student reads.
        parts: attributes of `Exercise`: the lines below the title, hints and mistakes.
    """

    path: Path
    title: str
    task: str
    parts: Mapping[str, Any]


@dataclass(frozen=True)
class _Section:
    """A heading and the lines below it; `number` is the heading's line in the file."""

    path: Path
    number: int
    lines: tuple[str, ...]

    @property
    def heading(self) -> str:
        return self.lines[0].lstrip("# ").rstrip()

    @property
    def body(self) -> list[tuple[int, str]]:
        """The lines below the heading, with their numbers in the file."""
        return list(enumerate(self.lines[1:], self.number + 1))

    def text(self, module: ModuleType) -> str:
        """Return what is below the heading, with the module's constants."""
        return _fill("\n".join(self.lines[1:]), module, self.path, self.number + 1).strip()


def read_text(path: Path, module: ModuleType, solution: str) -> ExerciseText:
    """Read an exercise's text file.

    Args:
        path: the file.
        module: the exercise's module, which has the constants that the text names.
        solution: the right answer, without markers, to which the mistakes' diffs are applied.

    Raises:
        ValueError: The file has another form; the message begins with its name and the line.
    """
    first, *sections = _sections(path)
    if not re.fullmatch(r"# \S.*", first.lines[0]):
        raise _error(path, 1, "the first line is the title: # Pass a token round a ring")
    head, _, task = first.text(module).partition("\n\n")
    values: dict[str, Any] = dict(re.findall(r"^- (after|place|result|predict): (.+)$", head, re.M))
    if len(values) != len(head.split("\n")) or not {"after", "place"} <= values.keys():
        raise _error(path, 3, "below the title come - after: 04-zero, - place: 20, and, if it has them, - result: "
                     "what is compared, - predict: a question; then an empty line")  # fmt: skip
    values["place"] = float(values["place"])
    mistakes: list[Mistake] = []
    for section in sections:
        if section.heading == "Start":
            values["start"] = " ".join(section.text(module).split("\n"))
        elif section.heading == "Otherwise":
            values["otherwise"] = _hints(section, section.body, module)
        elif name := re.fullmatch(r"Mistake: ([a-z0-9-]+)", section.heading):
            mistakes.append(_mistake(name[1], section, module, solution))
        else:
            raise _error(
                path, section.number, f"there is no section {section.heading!r}: write ## Start, "
                "## Mistake: its-name or ## Otherwise",
            )  # fmt: skip
    return ExerciseText(path, first.heading, task, {**values, "mistakes": mistakes})


def _sections(path: Path) -> Iterator[_Section]:
    """Yield the title with the task, then each "##" heading with what is below it; code blocks have no headings."""
    lines = path.read_text(encoding="utf-8").split("\n")
    starts, fenced = [0], False
    for i, line in enumerate(lines):
        fenced ^= line.startswith("```")
        if line.startswith("## ") and not fenced:
            starts.append(i)
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        yield _Section(path, start + 1, tuple(lines[start:end]))


def _mistake(name: str, section: _Section, module: ModuleType, solution: str) -> Mistake:
    body = section.body
    fences = [i for i, (_, line) in enumerate(body) if line.startswith("```")]
    kind = body[fences[0]][1] if fences else ""
    if len(fences) != 2 or kind not in ("```diff", "```python"):
        why = (
            f"{name!r} has no wrong answer, or several: write one block, ```diff of the solution or ```python"
        )
        raise _error(section.path, body[fences[0]][0] if fences else section.number, why)
    begin, end = fences
    hints = _hints(section, body[:begin] + body[end + 1 :], module)
    code = body[begin + 1 : end]
    if kind == "```diff":
        return Mistake(name, hints, _apply(code, solution, section.path))
    return Mistake(name, hints, "\n".join(line for _, line in code) + "\n")


def _hints(section: _Section, body: Sequence[tuple[int, str]], module: ModuleType) -> tuple[str, ...]:
    """Return the items of a numbered list, each in one line."""
    hints: list[tuple[int, str]] = []
    for number, line in body:
        if item := re.match(r"\d+\. +(.*)", line):
            hints.append((number, item[1].strip()))
        elif line.startswith("   ") and hints:
            hints[-1] = hints[-1][0], f"{hints[-1][1]} {line.strip()}"
        elif line.strip():
            why = "a hint begins with its number, 1. and so on, and goes on in lines that three blanks indent"
            raise _error(section.path, number, why)
    return tuple(_fill(hint, module, section.path, number) for number, hint in hints)


def _fill(text: str, module: ModuleType, path: Path, number: int) -> str:
    """Return the text with the module's constants in place of their names in braces; a tuple's values with commas."""

    def value(match: re.Match[str]) -> str:
        if not hasattr(module, match[1]):
            line = number + text[: match.start()].count("\n")
            raise _error(path, line, f"{match[0]} is a constant of {path.stem}.py, which does not define it")
        constant = getattr(module, match[1])
        return (
            ", ".join(map(str, constant))
            if isinstance(constant, tuple)
            else f"{constant:{(match[2] or ':')[1:]}}"
        )

    return re.sub(PLACEHOLDER, value, text)


def _apply(diff: Sequence[tuple[int, str]], solution: str, path: Path) -> str:
    """Return the solution with a diff applied to it."""
    lines = solution.rstrip("\n").split("\n")
    edits = []
    for separates, group in groupby(diff, key=lambda each: each[1].startswith("@@")):
        if separates:
            continue
        hunk = [(number, line or " ") for number, line in group]  # editors take blanks at a line's end away
        for number, line in hunk:
            if line[0] not in " -+":
                raise _error(path, number, "a line of a diff begins with a blank, a minus or a plus")
        old = [line[1:] for _, line in hunk if line[0] != "+"]
        places = [i for i in range(len(lines)) if old and lines[i : i + len(old)] == old]
        if len(places) != 1:
            times = f"stand {len(places)} times in the solution; add a line around them" if places else (
                "are not in the solution" if old else "are missing: which line of the solution comes before?"
            )  # fmt: skip
            raise _error(path, hunk[0][0], f"this diff's lines without a plus {times}")
        edits.append((places[0], len(old), [line[1:] for _, line in hunk if line[0] != "-"]))
    for place, length, new in sorted(edits, reverse=True):
        lines[place : place + length] = new
    return "\n".join(lines).rstrip("\n") + "\n"


def _error(path: Path, number: int, why: str) -> ValueError:
    return ValueError(f"{path}:{number}: {why}")
