"""Answers that are right in the first case: one size in them is the number that it has there.

A size is `ctx.world_size`, `len(x)`, `x.shape[i]`, `x.size(i)`, `x.numel()`, or a number that the answer is given, such
as the micro-batches m. What it is in the first case is found by running the reference there.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator

from mpkit.course.catalogue import ExerciseEntry
from mpkit.course.framework.room import PackedAnswer, Room
from mpkit.course.framework.source import run_cell

__all__ = ["with_constants"]

SEEN = re.compile(r"SIZE (\d+) (-?\d+)$")


def with_constants(entry: ExerciseEntry, room: Room) -> Iterator[tuple[str, str]]:
    """Yield, for each size of the solution, what was put in its place, and the whole cell."""
    tree = ast.parse(entry.source.plain)
    places = [node for node in ast.walk(tree) if _is_size(node, tree)]
    if not places:
        return
    values = _values(entry, tree, places, room)
    known = set()
    for number, node in enumerate(places):
        found = values.get(number, set())
        if len(found) != 1:  # nothing, or more than one number
            continue
        (value,) = found
        what = f"{ast.unparse(node)} → {value}"
        if what not in known:
            known.add(what)
            yield what, _with(tree, places, ast.unparse(node), value)


def _is_size(node: ast.AST, tree: ast.Module) -> bool:
    match node:
        case ast.Attribute(ast.Name("ctx"), "world_size", ast.Load()):
            return True
        case ast.Call(ast.Name("len"), [_], []):
            return True
        case ast.Call(ast.Attribute(_, "numel"), [], []) | ast.Call(ast.Attribute(_, "size"), [_], []):
            return True
        case ast.Subscript(ast.Attribute(_, "shape"), ast.Constant(), ast.Load()):
            return True
        case ast.Name(name, ast.Load()):
            return name in _given_numbers(tree)
    return False


def _given_numbers(tree: ast.Module) -> set[str]:
    """Return the arguments that are whole numbers, but for ranks."""
    every = [each for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) for each in node.args.args]
    named = {
        each.arg for each in every if each.annotation is not None and ast.unparse(each.annotation) == "int"
    }
    return named - {"rank", "src", "dst", "start"}


class _Replace(ast.NodeTransformer):
    def __init__(self, made: dict[int, ast.expr]) -> None:
        self.made = made

    def visit(self, node: ast.AST) -> ast.AST:
        if (number := getattr(node, "size_number", None)) in self.made:
            return self.made[number]
        return self.generic_visit(node)


def _numbered(tree: ast.Module, places: list[ast.AST]) -> ast.Module:
    for number, node in enumerate(places):
        node.size_number = number  # type: ignore[attr-defined]
    return copy.deepcopy(tree)


def _values(entry: ExerciseEntry, tree: ast.Module, places: list[ast.AST], room: Room) -> dict[int, set[int]]:
    """Return the numbers that each size had in the first case."""
    made: dict[int, ast.expr] = {
        number: ast.Call(ast.Name("_size"), [ast.Constant(number), copy.deepcopy(node)], [])  # type: ignore[list-item]
        for number, node in enumerate(places)
    }
    code = ast.unparse(ast.fix_missing_locations(_Replace(made).visit(_numbered(tree, places))))
    code += (
        '\n\ndef _size(number, value):\n    print("SIZE", number, int(value), flush=True)\n    return value\n'
    )
    value = run_cell(code, entry.exercise.name_of_answer, "sizes", entry.given_code)
    seen = entry.exercise.try_answer(PackedAnswer.pack(value), room)
    found: dict[int, set[int]] = {}
    for line in seen.printed:
        if match := SEEN.search(line):
            found.setdefault(int(match[1]), set()).add(int(match[2]))
    return found


def _with(tree: ast.Module, places: list[ast.AST], text: str, value: int) -> str:
    """Return the code with a number in every place where this size is spelled so."""
    made: dict[int, ast.expr] = {
        number: ast.Constant(value) for number, node in enumerate(places) if ast.unparse(node) == text
    }
    return ast.unparse(ast.fix_missing_locations(_Replace(made).visit(_numbered(tree, places)))) + "\n"
