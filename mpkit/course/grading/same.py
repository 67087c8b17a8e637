"""Detecting whether a right answer is the kit's own solution. A remark beside the points says so; the points stay.

code      code is compared as Python's syntax tree, without docstrings, comments and annotations, with locals and
          arguments renamed in order of appearance; and as the bytecode in the packed answer
calls     a packed answer that names `mpkit.course` calls the solution there

Nothing is unpacked for this. Many students find a short solution by themselves, so the remark also gives its length.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Sequence
from types import CodeType
from typing import Any

from mpkit.course.catalogue import ExerciseEntry

__all__ = ["suspicion"]

CHANCE = 4
"""The number of statements up to which a solution may be found again by chance."""


def suspicion(entry: ExerciseEntry, packed: bytes, cells: Sequence[str]) -> str:
    """Return why an answer seems to be the solution itself; "" if it does not.

    Args:
        entry: the exercise.
        packed: the answer, packed by cloudpickle.
        cells: the sources of the notebook's code cells.
    """
    if b"mpkit.course" in packed:
        return "calls for the kit's own solution (mpkit.course)"
    solution = _definition(entry.source.plain, entry.exercise.name_of_answer)
    if solution is None:  # the answer is values, and right values are always those of the solution
        return ""
    own = _normal(solution)
    same = any(_normal(each) == own for source in cells for each in _definitions(source))
    codes = [code.co_code for code in _codes(entry.exercise.solution)]
    if not same and not (codes and all(code in packed for code in codes)):
        return ""
    many = sum(isinstance(node, ast.stmt) for node in ast.walk(solution)) - 1
    return "identical to the solution" + (
        f" (of {many} statements: perhaps by chance)" if many <= CHANCE else ""
    )


def _definitions(source: str) -> Iterator[ast.AST]:
    try:
        tree = ast.parse(source) if len(source) < 100_000 else ast.Module([], [])
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    yield from (node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef))


def _definition(source: str, name: str) -> ast.AST | None:
    return next((node for node in _definitions(source) if getattr(node, "name", "") == name), None)


def _normal(node: ast.AST) -> str:
    """Return a definition as text that does not depend on the names in it."""
    try:
        tree = ast.parse(ast.unparse(node))  # a copy
        return ast.dump(_Normal().visit(tree))
    except (RecursionError, MemoryError, ValueError, SyntaxError):
        return ""


class _Normal(ast.NodeTransformer):
    """Removes docstrings and annotations, and numbers arguments, locals and definitions."""

    def __init__(self) -> None:
        self._numbers: dict[str, str] = {}

    def visit_Module(self, node: ast.Module) -> ast.AST:
        for each in ast.walk(node):
            if isinstance(each, ast.arg):
                self._number(each.arg)
            elif isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
                self._number(each.id)
            elif isinstance(each, ast.FunctionDef | ast.ClassDef):
                self._number(each.name)
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self._number_definition(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return self._number_definition(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return ast.arg(self._numbers[node.arg])

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name(self._numbers.get(node.id, node.id), node.ctx)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        self.generic_visit(node)
        return ast.Assign([node.target], node.value) if node.value is not None else ast.Pass()

    def _number(self, name: str) -> None:
        self._numbers.setdefault(name, f"v{len(self._numbers)}")

    def _number_definition(self, node: Any) -> ast.AST:
        node.name = self._numbers[node.name]
        if ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        return self.generic_visit(node)


def _codes(solution: Any) -> Iterator[CodeType]:
    """Yield the code object of a function, or those of a class's methods."""
    functions = vars(solution).values() if isinstance(solution, type) else [solution]
    yield from (each.__code__ for each in functions if inspect.isfunction(each))
