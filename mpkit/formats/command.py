"""Command lines and batch scripts: options in bash arrays, so that each has its comment; and any such line, read."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mpkit.formats.syntax import Page, Syntax

__all__ = ["command", "options"]

_DIRECTIVE = re.compile(r"^#SBATCH\s+(--.*)$")


def command(template: Callable[[Page], str], flags: Sequence[str] = ()) -> Syntax:
    """Return the syntax of a script that this template makes.

    Args:
        template: makes the lines after the head of the file.
        flags: options without a value.
    """

    def dump(page: Page) -> str:
        head = ["#!/usr/bin/env bash", *(f"# {line}".rstrip() for line in page.header)]
        return "\n".join([*head, template(page)]) + "\n"

    def load(text: str) -> dict[str, Any]:
        found = dict(_options(_words(text), flags))
        if not found:
            raise ValueError("there is no option that begins with --")
        return found

    return Syntax(dump, load, dump)


def options(page: Page, array: str, names: Sequence[str]) -> str:
    """Return a bash array of those options that are on the page.

    >>> from mpkit.formats.asked import Asked
    >>> from mpkit.plan.plan import Plan
    >>> page = Page(Asked.of(Plan(), "torchrun", {}), {"--nnodes": 1}, {"--nnodes": "machines"}, [])
    >>> print(options(page, "LAUNCH", ["--nnodes", "--rdzv-id"]))
    LAUNCH=(
      --nnodes=1                                  # machines
    )
    """
    lines = []
    for name in names:
        if name in page.values:
            value = page.values[name]
            word = name if value is True else f"{name}={value}"
            lines.append(f"  {word:43} # {page.comments[name]}")
    return "\n".join([f"{array}=(", *lines, ")"])


def _words(text: str) -> list[str]:
    """Return the words of a script without its comments; of a batch script those of its directives too."""
    lines = []
    for line in text.replace("\\\n", " ").splitlines():
        directive = _DIRECTIVE.match(line.strip())
        lines.append(directive[1] if directive else line)
    try:
        return shlex.split("\n".join(lines), comments=True)
    except ValueError as error:  # an open quote
        raise ValueError(f"this is no command line: {error}") from None


def _options(words: list[str], flags: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the options: `--name=value`, `--name value`, `--flag`. Values that are variables are left out."""
    for word, after in zip(words, [*words[1:], "--"], strict=True):
        if not re.match(r"--[a-zA-Z]", word):
            continue
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        if name in flags:
            yield name, value if equals else True
            continue
        if not equals:
            value = after
            if after.startswith(("--", "#")) or after in (")", "("):
                yield name, True
                continue
        if not value.startswith("$"):
            yield name, value
