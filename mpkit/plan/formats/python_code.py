"""Python: constants at the head of a module, and the arguments of configuration objects. It is parsed, never run."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping
from typing import Any

from mpkit.plan.formats.syntax import Page, Syntax, Word, agree

__all__ = ["assignments", "python_code"]


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
    r"""Return what a module assigns at its top, and the arguments of its configuration objects.

    A name has one value in a module, or none can be told.

    >>> text = "TP = 2\nRANKS: int = 8\nif x: RANKS = 3\nc = Config(tp=TP, pp=degree())"
    >>> found = _values(ast.parse(text), {"Config": "c"})
    >>> found["TP"], found["c.tp"], found["RANKS"].reason
    (2, 2, 'the text says both 8 and 3: write one of them')
    >>> found["c.pp"], found["c.pp"].reason
    ('degree', 'degree() is not calculated: write the value, such as 2')

    Raises:
        ValueError: configuration objects of the same class differ.
    """
    known: dict[str, Any] = {}
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    if isinstance(target, ast.Name):
                        agree(known, target.id, _value(node.value, known))
            elif isinstance(node, ast.AugAssign | ast.For) and isinstance(node.target, ast.Name):
                agree(
                    known, node.target.id, Word("", reason=f"line {node.lineno} changes it: write the value")
                )
    found = {name: value for name, value in known.items() if str(value).rpartition(".")[2] not in sections}
    made: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (name := ast.unparse(node.func).rpartition(".")[2]) in sections:
            if made.setdefault(name, ast.unparse(node)) != ast.unparse(node):
                raise ValueError(f"its {name}s differ: Plan.read of the text of the one that is meant")
            for argument in node.args:  # which that is, only the class knows
                found[f"{name}({ast.unparse(argument):.60})"] = None
            for keyword in node.keywords:
                key = (
                    f"{sections[name]}.{keyword.arg}"
                    if keyword.arg
                    else f"{name}(**{ast.unparse(keyword.value):.60})"
                )
                found[key] = _value(keyword.value, known) if keyword.arg else None
    return found


def _value(node: ast.expr, known: Mapping[str, Any]) -> Any:
    """Return the value of an expression; of a call the name of what is called."""
    if isinstance(node, ast.Name) and node.id in known:
        return known[node.id]
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        text = f"{ast.unparse(node):.60}"
        name = ast.unparse(node.func) if isinstance(node, ast.Call) else text
        return Word(name, reason=f"{text} is not calculated: write the value, such as 2")


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
        text = json.dumps(value) if isinstance(value, str) else repr(value)
        text = f"{value}()" if text.endswith('.Config"') else text
        line = f"    {key}={text}," if section else f"{name} = {text}"
        lines.append(f"{line:48} # {page.comments[name]}")
    return "\n".join([*lines, *([")"] if inside else [])])
