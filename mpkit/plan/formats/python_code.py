"""Python: constants at the head of a module, and the arguments of configuration objects. It is parsed, never run."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping
from typing import Any

from mpkit.plan.formats.syntax import Page, Syntax, agree


def python_code(body: Callable[[Page], str], classes: Mapping[str, str]) -> Syntax:
    """Return the syntax of Python code that this function makes.

    Args:
        body: makes the lines after the docstring.
        classes: by section, which keys begin with, the name of its class, as in {"training": "TrainingConfig"}.
    """

    def dump(page: Page) -> str:
        title, *rest = page.header
        head = "\n".join([title, "", *rest]).rstrip().replace("\\", "\\\\").replace('"""', "'''")
        return f'"""{head}\n"""\n\n{body(page)}\n'

    def load(text: str) -> dict[str, Any]:
        try:
            found = _values(ast.parse(text), {name: section for section, name in classes.items()})
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            why = str(error) or "it is nested too deeply"
            raise ValueError(f"this is no Python that can be read: {why}") from None
        if not found:
            raise ValueError("there is no assignment of a constant or of a configuration")
        return found

    return Syntax("Python", dump, load, dump)


def _values(tree: ast.Module, sections: Mapping[str, str]) -> dict[str, Any]:
    r"""Return what a module assigns outside of functions, and the arguments of its configuration objects.

    Nothing is calculated: in place of another expression is its text, which no key takes.

    >>> text = "TP = 2\nRANKS: int = 8\nif x: RANKS = 3\nc = Config(tp=TP, pp=degree(4))"
    >>> _values(ast.parse(text), {"Config": "c"})
    {'TP': 2, 'RANKS': "8 and also 'what line 3 makes of it'", 'c.tp': 2, 'c.pp': 'degree()'}

    Raises:
        ValueError: configuration objects of the same class differ, or their arguments have no names.
    """
    known: dict[str, Any] = {}
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        plain = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                value = _value(plain, known) if plain else f"what line {node.lineno} makes of it"
                agree(known, node.id, value)
    found = {name: value for name, value in known.items() if _class_of(value) not in sections}
    made: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (name := _class_of(_value(node, {}))) in sections:
            if made.setdefault(name, ast.unparse(node)) != ast.unparse(node):
                raise ValueError(f"its {name}s differ: Plan.read of the text of the one that is meant")
            if node.args or not all(keyword.arg for keyword in node.keywords):
                raise ValueError(f"write the arguments of {name} by name")
            found |= {f"{sections[name]}.{each.arg}": _value(each.value, known) for each in node.keywords}
    return found


def _class_of(value: Any) -> str:
    return str(value).removesuffix("()").rpartition(".")[2]


def _value(node: ast.expr, known: Mapping[str, Any]) -> Any:
    """Return the value of an expression or, if it has to be calculated, its text; of a call without arguments."""
    if isinstance(node, ast.Name) and node.id in known:
        return known[node.id]
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return f"{ast.unparse(node.func)}()" if isinstance(node, ast.Call) else f"{ast.unparse(node):.60}"


def assignments(page: Page, classes: Mapping[str, str]) -> str:
    """Return constants with their comments, and a call for each section.

    Args:
        page: what is written; values that end in ".Config()" are calls.
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
        text = json.dumps(value) if isinstance(value, str) else repr(value)
        text = value if text.endswith('.Config()"') else text
        line = f"    {key}={text}," if section else f"{name} = {text}"
        lines.append(f"{line:48} # {page.comments[name]}")
    return "\n".join([*lines, *([")"] if inside else [])])
