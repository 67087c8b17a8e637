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

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from mpkit.course.framework.exercise import Mistake

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


def read_text(path: Path, module: ModuleType, solution: str) -> ExerciseText:
    """Read an exercise's text file.

    Args:
        path: the file.
        module: the exercise's module, which has the constants that the text names.
        solution: the right answer, without markers, to which the mistakes' diffs are applied.

    Raises:
        ValueError: The file has another form; the message begins with its name and the section.
    """
    (title, first), *sections = _sections(path.read_text(encoding="utf-8"))
    head, _, task = _fill(first, module, path).strip().partition("\n\n")
    parts: dict[str, Any] = dict(re.findall(r"^- (after|place|result|predict): (.+)$", head, re.M))
    if (
        not title.startswith("# ")
        or len(parts) != len(head.split("\n"))
        or not {"after", "place"} <= parts.keys()
    ):
        raise ValueError(
            f"{path}: it begins with # Its title, and below that - after: 04-zero, - place: 20, and, if it has them, "
            "- result: what is compared, - predict: a question; then an empty line"
        )
    parts["place"] = float(parts["place"])
    mistakes: list[Mistake] = []
    for heading, body in sections:
        where = f"{path}, {heading}"
        if heading == "## Start":
            parts["start"] = " ".join(_fill(body, module, path).split())
        elif heading == "## Otherwise":
            parts["otherwise"] = _hints(body, module, where)
        elif name := re.fullmatch(r"## Mistake: ([a-z0-9-]+)", heading):
            mistakes.append(_mistake(name[1], body, module, solution, where))
        else:
            raise ValueError(
                f"{where}: there is no such section: write ## Start, ## Mistake: its-name or ## Otherwise"
            )
    return ExerciseText(path, title.removeprefix("# "), task, {**parts, "mistakes": tuple(mistakes)})


def _sections(text: str) -> Iterator[tuple[str, str]]:
    """Yield the title with the task, then each "##" heading with what is below it; code blocks have no headings."""
    lines = text.split("\n")
    starts, fenced = [0], False
    for i, line in enumerate(lines):
        fenced ^= line.startswith("```")
        if line.startswith("## ") and not fenced:
            starts.append(i)
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        yield lines[start].rstrip(), "\n".join(lines[start + 1 : end])


def _mistake(name: str, body: str, module: ModuleType, solution: str, where: str) -> Mistake:
    before, *blocks = re.split(r"^```(\w*)\n(.*?)^```$", body, flags=re.M | re.S)
    if len(blocks) != 3 or blocks[0] not in ("diff", "python"):
        raise ValueError(f"{where}: it has one wrong answer: a block ```diff of the solution, or ```python")
    kind, code, after = blocks
    wrong = code if kind == "python" else _apply(code, solution, where)
    return Mistake(name, _hints(before + after, module, where), wrong)


def _hints(body: str, module: ModuleType, where: str) -> tuple[str, ...]:
    """Return the items of a numbered list, each in one line."""
    before, *items = re.split(r"^\d+\. +", _fill(body, module, where), flags=re.M)
    if before.strip() or any(re.search(r"\n(?!   )[^\n]", item) for item in items):
        why = "a hint begins with its number, 1. and so on, and goes on in lines that three blanks indent"
        raise ValueError(f"{where}: {why}")
    return tuple(re.sub(r"\s*\n\s*", " ", item.strip()) for item in items)


def _fill(text: str, module: ModuleType, where: object) -> str:
    """Return the text with the module's constants in place of their names in braces; a tuple's values with commas."""

    def value(match: re.Match[str]) -> str:
        if not hasattr(module, match[1]):
            raise ValueError(
                f"{where}: {match[0]} is a constant that the Python file beside it does not define"
            )
        constant = getattr(module, match[1])
        if isinstance(constant, tuple):
            return ", ".join(map(str, constant))
        return f"{constant:{(match[2] or ':')[1:]}}"

    return re.sub(PLACEHOLDER, value, text)


def _apply(diff: str, solution: str, where: str) -> str:
    """Return the solution with a diff applied to it."""
    lines = solution.rstrip("\n").split("\n")
    edits = []
    for hunk in re.split(r"^@@.*\n", diff, flags=re.M):
        # Editors take blanks at a line's end away.
        changes = [line or " " for line in hunk.rstrip("\n").split("\n")]
        old = [line[1:] for line in changes if line[0] != "+"]
        places = [i for i in range(len(lines)) if old and lines[i : i + len(old)] == old]
        if any(line[0] not in " -+" for line in changes) or len(places) != 1:
            raise ValueError(
                f"{where}: a line of a diff begins with a blank, a minus or a plus, and the lines without a plus stand "
                f"in the solution together and once, not {len(places)} times:\n{hunk}"
            )
        edits.append((places[0], len(old), [line[1:] for line in changes if line[0] != "-"]))
    for place, length, new in sorted(edits, reverse=True):
        lines[place : place + length] = new
    return "\n".join(lines).rstrip("\n") + "\n"
