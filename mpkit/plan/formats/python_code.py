"""Python: configuration objects, and constants at the head of a script. Files are parsed, never run.

A value that nobody can tell without running the module is a `Word` with a reason.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mpkit.plan.formats.syntax import Page, Syntax, Word, agree, flat

__all__ = ["assignments", "constants", "keep_recipe", "python_code"]

_SECTION = re.compile(r"^[ \t]*\[[a-z_.]+\][ \t]*(?:#.*)?$", re.MULTILINE)
"""The line with which a section of TOML begins."""


def python_code(
    body: Callable[[Page], str],
    sections: Mapping[str, str],
    older: Callable[[dict[str, Any]], dict[str, Any]] = lambda values: values,
) -> Syntax:
    """Return the syntax of Python code that this function makes.

    Args:
        body: makes the lines after the docstring.
        sections: by the name of a class, what keys of it begin with, as in {"TrainingConfig": "training"}.
        older: returns the values of older versions, which were written in TOML, by the keys of today.
    """

    def dump(page: Page) -> str:
        title, *rest = page.header
        head = "\n".join([title, "", *rest]).rstrip().replace("\\", "\\\\").replace('"""', "'''")
        return f'"""{head}\n"""\n\n{body(page)}\n'

    def load(text: str) -> dict[str, Any]:
        try:
            found: dict[str, Any] = {}
            if sections and _SECTION.search(text):  # as torchtitan was configured before 0.3
                return older(flat(tomllib.loads(text)))
            tree = ast.parse(text)
            recipes = _recipes(tree, sections)
            for name, value in constants(tree, sections):
                agree(found, name, value)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ValueError(
                f"this is no Python that can be read: {str(error) or 'it is nested too deeply'}"
            ) from None
        if len(recipes) > 1:
            for name, value in found.items():
                if isinstance(value, Word) and value.reason:
                    again = f"the recipes {', '.join(recipes)} differ: say one of them, recipe={recipes[0]!r}"
                    found[name] = Word(value, reason=again)
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


def keep_recipe(text: str, recipe: str) -> str:
    r"""Return a module's text without the other functions that make configurations.

    Raises:
        ValueError: the module is not Python, or has no function of that name.

    >>> print(keep_recipe("TP = 2\ndef small(): return f(TP)\ndef large(): return f(8)", "small"))
    TP = 2
    def small():
        return f(TP)
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(
            f"recipe={recipe!r}: the text is not Python, in which recipes are functions: {error}"
        ) from None
    names = [each.name for each in tree.body if isinstance(each, ast.FunctionDef)]
    if recipe not in names:
        raise ValueError(f"recipe={recipe!r}: the module has {', '.join(map(repr, names)) or 'no functions'}")
    tree.body = [each for each in tree.body if not isinstance(each, ast.FunctionDef) or each.name == recipe]
    return ast.unparse(tree).replace("\n\n", "\n")


def _recipes(tree: ast.Module, sections: Mapping[str, str]) -> list[str]:
    """Return the names of the functions that make configurations."""
    functions = [each for each in tree.body if isinstance(each, ast.FunctionDef)]
    return [
        each.name
        for each in functions
        if any(
            isinstance(node, ast.Call) and _name(node.func).rpartition(".")[2] in sections
            for node in ast.walk(each)
        )
    ]


def constants(tree: ast.Module, sections: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    r"""Yield constants that are assigned in the module, and the arguments of configuration objects.

    Args:
        tree: the module.
        sections: by the name of a class, what keys of it begin with, as in {"TrainingConfig": "training"}.

    >>> text = "TP = 2\nRANKS: int = 4 * TP\nif x: RANKS = 3\nc = Config(tp=TP, pp=degree())"
    >>> list(constants(ast.parse(text), {"Config": "c"}))
    [('TP', 2), ('RANKS', 'RANKS'), ('c.tp', 2), ('c.pp', 'degree')]
    """
    known: dict[str, Any] = {}
    for statement in tree.body:
        _assign(statement, known)
    for name, value in known.items():
        if not (isinstance(value, str) and value.rpartition(".")[2] in sections):
            yield name, value
    calls: dict[str, list[ast.Call]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (name := _name(node.func).rpartition(".")[2]) in sections:
            calls.setdefault(name, []).append(node)
    for name, those in calls.items():
        for node in those:
            for argument in node.args:
                yield f"{name}({_shorten(argument)})", None  # which argument that is, only the class knows
            left_out = {keyword.arg for other in those for keyword in other.keywords if keyword.arg}
            for keyword in node.keywords:
                if keyword.arg is None:
                    yield f"{name}(**{_shorten(keyword.value)})", None
                else:
                    yield f"{sections[name]}.{keyword.arg}", _value(keyword.value, known)
                    left_out.discard(keyword.arg)
            for missing in sorted(left_out):  # one of several recipes has it
                yield f"{sections[name]}.{missing}", f"nothing, in another {name}"


def _assign(statement: ast.stmt, known: dict[str, Any]) -> None:
    """Add what a statement at the top of a module assigns."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return
    if isinstance(statement, ast.Assign):
        for target in statement.targets:
            for name, value in _pairs(target, statement.value):
                known[name] = _value(value, known)
    elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        if statement.value is not None:
            known[statement.target.id] = _value(statement.value, known)
    elif isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
        name = statement.target.id
        known[name] = _value(ast.BinOp(ast.Name(name), statement.op, statement.value), known)
    else:  # an if, a loop, a with
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                known[node.id] = Word(
                    node.id, reason=f"line {node.lineno} sets it within a block; write the value at the top"
                )


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple | ast.List) and isinstance(value, ast.Tuple | ast.List):
        for one, its in zip(target.elts, value.elts, strict=False):
            yield from _pairs(one, its)
    elif isinstance(target, ast.Tuple | ast.List):
        for one in target.elts:
            yield from _pairs(one, value)


def _value(node: ast.expr, known: Mapping[str, Any]) -> Any:
    """Return the value of an expression; of a call the name of what is called."""
    if isinstance(node, ast.Name) and node.id in known:
        return known[node.id]
    if isinstance(node, ast.Call):
        return Word(_name(node.func), reason=f"{_shorten(node)} is not called: write the value, such as 2")
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, known), _value(node.right, known)
        if all(type(one) is int and abs(one) < 2**53 for one in (left, right)):
            if isinstance(node.op, ast.Add | ast.Sub):
                return left + (right if isinstance(node.op, ast.Add) else -right)
            if isinstance(node.op, ast.Mult):
                return left * right
            if isinstance(node.op, ast.FloorDiv) and right:
                return left // right
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return Word(_shorten(node), reason="it is not calculated: write the value, such as 2")


def _name(node: ast.expr) -> str:
    """Return a name with dots; "" if the expression is something else."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(names)]) if isinstance(node, ast.Name) else ""


def _shorten(node: ast.expr) -> str:
    try:
        text = ast.unparse(node)
    except ValueError:  # a number of thousands of digits
        return "..."
    return text if len(text) <= 60 else f"{text[:60]}..."
