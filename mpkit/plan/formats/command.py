"""Command lines and batch scripts: options in bash arrays, so that each has its comment; and any such line, read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, takewhile
from typing import Any

from mpkit.plan.formats.shell import Shell
from mpkit.plan.formats.syntax import Page, Syntax
from mpkit.plan.formats.word import Word, agree

__all__ = ["command", "options"]

_DIRECTIVE = re.compile(r"^[ \t]*#SBATCH[ \t]+(?=-)", re.MULTILINE)
_SHORT = re.compile(r"-([NnG])[ =]?(.*)", re.DOTALL)
_LONG = {"N": "--nodes", "n": "--ntasks", "G": "--gpus"}
"""SLURM's options of one letter."""
_SLURM = re.compile(r"(.*/)?(srun|sbatch|salloc)")
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
        for words, is_within in Shell(_read_allocation(text)).read(_DIRECTIVE.sub("srun ", text)):
            for name, value in _options(words, flags, several):
                note = f"{name} is within an `if` or a loop: read as if it came to that" if is_within else ""
                agree(found, name, Word(value, reason=value.reason, note=note))
        if not any(name.startswith("--") for name in found):
            raise ValueError("there is no option that begins with --")
        return found

    return Syntax("a command line", dump, load, dump)


def _read_allocation(text: str) -> dict[str, str]:
    """Return the variables that SLURM sets by what a batch script asks for at its head."""
    said: dict[str, str] = {}
    for short, name, value in re.findall(
        r"^[ \t]*#SBATCH[ \t]+(?:-([NnG])|--([a-z-]+))[ =]*(\S+)", text, re.MULTILINE
    ):
        said.setdefault(_LONG.get(short, f"--{name}"), value)
    each = said.get("--gpus-per-node", said.get("--gres", "")).partition("(")[0].rpartition(":")[2]
    given = {
        "SLURM_NNODES": said.get("--nodes"), "SLURM_JOB_NUM_NODES": said.get("--nodes"), "SLURM_GPUS_ON_NODE": each,
        "SLURM_GPUS_PER_NODE": each, "SLURM_NTASKS_PER_NODE": said.get("--ntasks-per-node"),
        "SLURM_NTASKS": said.get("--ntasks"),
    }  # fmt: skip
    return {name: value for name, value in given.items() if value and value.isdecimal()}


def _expand_short(words: Sequence[Word]) -> Iterator[Word]:
    """Yield the words with SLURM's options of one letter by their long names."""
    for word in words:
        short = _SHORT.fullmatch(word) if not word.reason else None
        yield from (Word(_LONG[short[1]]), *([Word(short[2])] if short[2] else [])) if short else (word,)


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
    if words[:2] == ["ray", "start"]:
        return  # its --num-gpus are a machine's
    if words and _SLURM.fullmatch(words[0]):
        words = [*_expand_short(words)]
    if any(word.endswith("accelerate") and after == "launch" for word, after in pairwise(words)):
        yield "accelerate launch", Word("true")
    if any(
        word == "megatron" and after in ("sft", "pt", "rlhf", "export") for word, after in pairwise(words)
    ):
        yield "megatron sft", Word("true")
        for name in ("NPROC_PER_NODE", "NNODES"):
            yield from ((f"--{name.lower().replace('_', '-')}", Word(word.partition("=")[2], reason=word.reason))
                        for word in words if word.startswith(f"{name}="))  # fmt: skip
    starts, is_value = any(map(_STARTS.fullmatch, words)), False
    for number, (word, after) in enumerate(zip(words, [*words[1:], Word("--")], strict=False)):
        if is_value or not re.match(r"--[a-zA-Z]", word):
            if word.reason and starts and not is_value and word not in ("$@", "$*"):
                yield word, word
            is_value = False
            continue
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        if name in flags and (value if equals else after).lower() == "false":
            continue  # as programs say it that take Megatron's arguments in their own way
        is_value = not equals and name not in flags and not after.startswith("--")
        text = after if is_value else value if equals else "true"
        if is_value and name in several:
            text = " ".join(takewhile(lambda each: not each.startswith("--"), words[number + 1 :]))
        yield name, Word(text, reason=after.reason if is_value else word.reason)
