"""Python: configuration objects, and constants at the head of a script. Files are parsed, never run."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mpkit.formats.syntax import Page, Syntax

__all__ = ["assignments", "python_code"]


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
            tree = ast.parse(text)
        except SyntaxError as error:
            raise ValueError(f"this is no Python: {error}") from None
        found = dict(_values(tree, sections))
        if not found:
            raise ValueError("there is no assignment of a constant or of a configuration")
        return found

    return Syntax(dump, load, dump)


def _values(tree: ast.Module, sections: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """Yield constants that are assigned in the module, and the constant arguments of configuration objects."""
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            found = _constant(statement.targets[0].id, statement.value)
            yield from ((name, value) for name, value in found if not _is_section(value, sections))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            for keyword in node.keywords if name in sections else ():
                if keyword.arg is not None:
                    yield from _constant(f"{sections[name]}.{keyword.arg}", keyword.value)


def _is_section(value: Any, sections: Mapping[str, str]) -> bool:
    return isinstance(value, str) and value.rpartition(".")[2] in sections


def _constant(name: str, value: ast.expr) -> Iterator[tuple[str, Any]]:
    try:
        yield name, ast.literal_eval(value)
    except ValueError:  # an expression
        if isinstance(value, ast.Call):
            yield name, ast.unparse(value.func)


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
