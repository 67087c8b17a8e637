"""Command lines and batch scripts: options in bash arrays, so that each has its comment; and any such line, read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import Any

from mpkit.plan.formats.shell import Shell
from mpkit.plan.formats.syntax import Page, Syntax
from mpkit.plan.formats.word import Word, agree

__all__ = ["command", "options"]

_DIRECTIVE = re.compile(r"^[ \t]*#SBATCH[ \t]+(?=--)", re.MULTILINE)
_STARTS = re.compile(r"(.*/)?(torchrun|deepspeed|accelerate|srun|mpirun|mpiexec|python[0-9.]*)")


def command(
    template: Callable[[Page], str], flags: Sequence[str] = (), several: Sequence[str] = ()
) -> Syntax:
    """Return the syntax of a script that this template makes.

    Args:
        template: makes the lines after the head of the file.
        flags: options without a value.
        several: options with several values, as one word after another.
    """

    def dump(page: Page) -> str:
        head = ["#!/usr/bin/env bash", *(f"# {line}".rstrip() for line in page.header)]
        return "\n".join([*head, template(page)]) + "\n"

    def load(text: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for words, is_within in Shell().read(_DIRECTIVE.sub("", text)):
            for name, value in _options(words, flags, several):
                note = f"{name} is within an `if` or a loop: read as if it came to that" if is_within else ""
                agree(found, name, Word(value, reason=value.reason, note=note))
        if not any(name.startswith("--") for name in found):
            raise ValueError("there is no option that begins with --")
        return found

    return Syntax("a command line", dump, load, dump)


def options(page: Page, array: str, names: Sequence[str]) -> str:
    """Return a bash array of those options that are on the page.

    >>> from mpkit.plan.formats.request import ExportRequest
    >>> from mpkit.plan.plan import Plan
    >>> page = Page(ExportRequest.from_plan(Plan(), "torchrun", {}), {"--nnodes": 1}, {"--nnodes": "machines"}, [])
    >>> print(options(page, "LAUNCH", ["--nnodes", "--rdzv-id"]))
    LAUNCH=(
      --nnodes=1                                  # machines
    )
    """
    lines = []
    for name in names:
        if name in page.values:
            value = page.values[name]
            word = name if value is True else f"{name}{' ' if ' ' in str(value) else '='}{value}"
            lines.append(f"  {word:43} # {page.comments[name]}")
    return "\n".join([f"{array}=(", *lines, ")"])


def _options(
    words: Sequence[Word], flags: Sequence[str], several: Sequence[str]
) -> Iterator[tuple[str, Word]]:
    """Yield the options, `--name=value`, `--name value`, `--flag`, and variables that may hold more of them."""
    starts, is_value = any(map(_STARTS.fullmatch, words)), False
    for number, (word, after) in enumerate(zip(words, [*words[1:], Word("--")], strict=True)):
        if is_value or not re.match(r"--[a-zA-Z]", word):
            if word.reason and starts and not is_value and word not in ("$@", "$*"):
                yield word, word
            is_value = False
            continue
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        is_value = not equals and name not in flags and not after.startswith("--")
        text = after if is_value else value if equals else "true"
        if is_value and name in several:
            text = " ".join(takewhile(lambda each: not each.startswith("--"), words[number + 1 :]))
        yield name, Word(text, reason=after.reason if is_value else word.reason)
