"""Python: configuration objects, and constants at the head of a script. Files are parsed, never run."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Callable, Mapping
from typing import Any

from mpkit.plan.formats.syntax import Page, Syntax, flat
from mpkit.plan.formats.text.constants import constants
from mpkit.plan.formats.text.word import agree

__all__ = ["assignments", "python_code"]

_SECTION = re.compile(r"^[ \t]*\[[a-z_.]+\][ \t]*(?:#.*)?$", re.MULTILINE)
"""The line with which a section of TOML begins."""


def python_code(body: Callable[[Page], str], sections: Mapping[str, str]) -> Syntax:
    """Return the syntax of Python code that this function makes.

    Args:
        body: makes the lines after the docstring.
        sections: by the name of a class, what keys of it begin with, as in {"TrainingConfig": "training"}.
    """

    def dump(page: Page) -> str:
        title, *rest = page.header
        head = "\n".join([title, "", *rest]).rstrip().replace("\\", "\\\\").replace('"""', "'''")
        return f'"""{head}\n"""\n\n{body(page)}\n'

    def load(text: str) -> dict[str, Any]:
        try:
            found: dict[str, Any] = {}
            if sections and _SECTION.search(text):  # as torchtitan was configured before 0.3
                return flat(tomllib.loads(text))
            for name, value in constants(ast.parse(text), sections):
                agree(found, name, value)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ValueError(
                f"this is no Python that can be read: {str(error) or 'it is nested too deeply'}"
            ) from None
        if not found:
            raise ValueError("there is no assignment of a constant or of a configuration")
        return found

    return Syntax("Python", dump, load, dump)


def assignments(page: Page, classes: Mapping[str, str]) -> str:
    """Return constants with their comments, and a call for each section.

    Args:
        page: what is written; values that end in ".Config" are names of classes.
        classes: the class of each section.
    """
    lines: list[str] = []
    inside = ""
    for name, value in page.values.items():
        section, _, key = name.rpartition(".")
        if inside and section != inside:
            lines.append(")")
        if section and section != inside:
            lines.append(f"{section} = {classes[section]}(")
        inside = section
        called = isinstance(value, str) and value.endswith(".Config")
        text = f"{value}()" if called else _literal(value)
        line = f"    {key}={text}," if section else f"{name} = {text}"
        lines.append(f"{line:48} # {page.comments[name]}")
    return "\n".join([*lines, *([")"] if inside else [])])


def _literal(value: Any) -> str:
    text = repr(value)
    return f'"{value}"' if isinstance(value, str) and '"' not in text and "\\" not in text else text
