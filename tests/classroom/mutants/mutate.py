"""Mutants of a solution: the same program with one small fault each.

    replace    an operator, a comparison, a constant, a name, a method, by one that is easily taken for it
    shift      an index, a bound or an argument by one
    drop       a statement, an argument, a condition, a bound of a slice
    double     a statement that calls something, such as a communication
    swap       two arguments, two statements, the two branches of a choice

Only what stands between the markers of the solution is changed. Equal mutants are made once. `chosen` draws some of
them, from a seed, of every operator as many as of the others as far as there are so many.
"""

from __future__ import annotations

import ast
import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import zip_longest

from mpkit.course.framework.source import BEGIN, END, ExerciseSource

__all__ = ["Mutant", "chosen", "mutants"]


@dataclass(frozen=True)
class Mutant:
    """A solution with one fault.

    Attributes:
        operator: what was done, such as "compare".
        change: the statement before and after, such as "held >= size → held > size".
        code: the whole cell.
    """

    operator: str
    change: str
    code: str


BINARY: dict[type[ast.operator], tuple[type[ast.operator], ...]] = {
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.FloorDiv, ast.Add),
    ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Mult, ast.Mod),
    ast.Mod: (ast.FloorDiv,),
    ast.Pow: (ast.Mult,),
    ast.BitOr: (ast.BitAnd,),
    ast.BitAnd: (ast.BitOr,),
}
COMPARE: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
ATTRIBUTES = {
    "rank": ("world_size",), "world_size": ("rank",), "pp": ("dp",), "dp": ("tp",), "tp": ("pp",),
    "all_reduce": ("broadcast", "reduce"), "reduce_scatter": ("all_reduce",), "all_gather": ("all_reduce",),
    "reduce": ("all_reduce",), "broadcast": ("all_reduce",), "scatter": ("broadcast",), "gather": ("all_gather",),
    "send": ("recv", "isend"), "recv": ("send", "irecv"), "isend": ("send",), "irecv": ("recv",),
    "sum": ("mean",), "mean": ("sum",), "add_": ("sub_",), "sub_": ("add_",), "mul_": ("div_",),
    "div_": ("mul_",), "zeros_like": ("ones_like",), "ones_like": ("zeros_like",), "zeros": ("ones",),
    "empty_like": ("zeros_like",), "numel": ("dim",), "nbytes": ("numel",), "append": ("extend",),
    "amax": ("amin",), "max": ("min",), "min": ("max",), "exp": ("log",), "log": ("exp",), "sqrt": ("square",),
    "square": ("abs",), "t": ("detach",), "grad": ("data",), "item": ("clone",), "pop": ("get",),
}  # fmt: skip
CALLS = {
    "min": "max",
    "max": "min",
    "sum": "max",
    "any": "all",
    "all": "any",
    "sorted": "list",
    "reversed": "list",
}
TEXTS = {"mean": "sum", "sum": "mean", "max": "min", "min": "max", "pp": "dp", "dp": "tp", "tp": "pp"}
SYMMETRIC = ("mse_loss", "min", "max")
"""Functions whose arguments may be swapped."""

ACTS = {
    "all_reduce", "all_gather", "reduce_scatter", "reduce", "broadcast", "scatter", "gather", "all_to_all", "barrier",
    "send", "recv", "isend", "irecv", "step", "backward", "append", "extend", "put", "get", "pop", "average",
    "add_", "sub_", "mul_", "div_",
}  # fmt: skip
"""What does more if it is done twice."""

IDENTITIES = (
    "detach",
    "clone",
    "contiguous",
    "flatten",
    "requires_grad_",
    "wait",
    "square",
    "sqrt",
    "exp",
    "log",
    "t",
)


def mutants(source: ExerciseSource) -> list[Mutant]:
    """Return all mutants of an exercise's solution, equal ones once."""
    tree, lines = ast.parse(source.plain), _written(source)
    whole = ast.unparse(tree)
    known, made = {whole}, []
    unread = {id(part) for node in ast.walk(tree) for part in _unread(node)}
    nodes = [
        node for node in ast.walk(tree) if getattr(node, "lineno", 0) in lines and id(node) not in unread
    ]
    places = [_place(tree, node) for node in nodes]
    for place in places:
        for operator, changed in _changes(_at(tree, place)):
            other = _replaced(tree, place, changed)
            code = ast.unparse(ast.fix_missing_locations(other))
            if code not in known and _compiles(code):
                known.add(code)
                made.append(Mutant(operator, _difference(whole, code), code + "\n"))
    return made


def chosen(source: ExerciseSource, most: int, seed: str) -> list[Mutant]:
    """Draw some mutants; the same for the same seed."""
    by_operator: dict[str, list[Mutant]] = {}
    for mutant in mutants(source):
        by_operator.setdefault(mutant.operator, []).append(mutant)
    draw = random.Random(seed)
    for group in by_operator.values():
        draw.shuffle(group)
    in_turn = [each for some in zip_longest(*by_operator.values()) for each in some if each is not None]
    return in_turn[:most]


# ---- one node, changed


def _changes(node: ast.AST) -> Iterator[tuple[str, ast.AST | list[ast.stmt]]]:
    """Yield what is done to a node, and what it becomes: a node, or statements in place of one."""
    if isinstance(node, ast.expr):
        yield from _of_expression(node)
    if isinstance(node, ast.stmt) and not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Pass):
        yield from _of_statement(node)


def _of_expression(node: ast.expr) -> Iterator[tuple[str, ast.AST]]:
    match node:
        case ast.BinOp(left, op, right):
            for other in BINARY.get(type(op), ()):
                yield "operator", ast.BinOp(left, other(), right)
            yield "operand", left
            yield "operand", right
        case ast.Compare(left, [op], [right]):
            for compared in COMPARE[type(op)]:
                yield "compare", ast.Compare(left, [compared()], [right])
        case ast.BoolOp(op, values):
            yield "logic", ast.BoolOp(ast.And() if isinstance(op, ast.Or) else ast.Or(), values)
            for value in values:
                yield "logic", value
        case ast.UnaryOp(_, operand):
            yield "logic", operand
        case ast.IfExp(test, body, orelse):
            yield "branches", ast.IfExp(test, orelse, body)
        case ast.Constant(bool() as value):
            yield "constant", ast.Constant(not value)
        case ast.Constant(int() | float() as value):
            for near in (value + 1, value - 1) if isinstance(value, int) else (2 * value, value / 2):
                yield (
                    "constant",
                    ast.Constant(near) if near >= 0 else ast.UnaryOp(ast.USub(), ast.Constant(-near)),
                )
        case ast.Constant(str() as value) if value in TEXTS:
            yield "constant", ast.Constant(TEXTS[value])
        case ast.Attribute(value, name, ctx) if isinstance(ctx, ast.Load):
            for attribute in ATTRIBUTES.get(name, ()):
                yield "method", ast.Attribute(value, attribute, ctx)
            if name in ("rank", "world_size"):
                yield "off by one", ast.BinOp(node, ast.Add(), ast.Constant(1))
                yield "off by one", ast.BinOp(node, ast.Sub(), ast.Constant(1))
        case ast.Subscript(value, ast.Slice(lower, upper, step), ctx):
            for part in (
                ast.Slice(None, upper, step),
                ast.Slice(lower, None, step),
                ast.Slice(lower, upper, None),
            ):
                yield "slice", ast.Subscript(value, part, ctx)
        case ast.Subscript(value, index, ast.Load() as ctx) if not isinstance(
            index, ast.Tuple | ast.Constant
        ):
            yield "off by one", ast.Subscript(value, ast.BinOp(index, ast.Sub(), ast.Constant(1)), ctx)
        case ast.Call():
            yield from _of_call(node)


def _of_call(node: ast.Call) -> Iterator[tuple[str, ast.AST]]:
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    if name in CALLS:
        yield "method", ast.Call(ast.Name(CALLS[name]), node.args, node.keywords)
    if isinstance(node.func, ast.Attribute) and node.func.attr in IDENTITIES:
        yield "dropped call", node.func.value
    called = node.func.attr if isinstance(node.func, ast.Attribute) else name
    if (
        len(node.args) >= 2
        and called not in SYMMETRIC
        and not any(isinstance(each, ast.Starred) for each in node.args)
    ):
        yield "arguments", ast.Call(node.func, [node.args[1], node.args[0], *node.args[2:]], node.keywords)
        yield "arguments", ast.Call(node.func, node.args[:-1], node.keywords)
    for i in [i for i, keyword in enumerate(node.keywords) if keyword.arg != "strict"]:
        yield "arguments", ast.Call(node.func, node.args, node.keywords[:i] + node.keywords[i + 1 :])
    for i, given in enumerate(node.args):
        if name == "range" or _names_a_rank(given):
            for sign in (ast.Add(), ast.Sub()):
                shifted = [*node.args[:i], ast.BinOp(given, sign, ast.Constant(1)), *node.args[i + 1 :]]
                yield "off by one", ast.Call(node.func, shifted, node.keywords)


def _acts(node: ast.stmt) -> bool:
    calls = [each.func for each in ast.walk(node) if isinstance(each, ast.Call)]
    return any(
        (each.attr if isinstance(each, ast.Attribute) else getattr(each, "id", "")) in ACTS for each in calls
    )


def _unread(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what is never evaluated, or says how strict a loop is: annotations, messages of errors, `strict=True`."""
    if isinstance(node, ast.AnnAssign):
        yield from ast.walk(node.annotation)
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        yield from (each for part in node.exc.args for each in ast.walk(part))
    if isinstance(node, ast.Assert):
        yield from ast.walk(node)
    if isinstance(node, ast.keyword) and node.arg == "strict":
        yield node.value


def _names_a_rank(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in (
        "before",
        "after",
        "rank",
        "src",
        "dst",
        "peer",
        "place",
    )


def _of_statement(node: ast.stmt) -> Iterator[tuple[str, ast.AST | list[ast.stmt]]]:
    if isinstance(node, ast.Return) and node.value is not None:
        yield "return", ast.Return(None)
    else:
        yield "dropped statement", ast.Pass()
    if isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr | ast.Assign) and _acts(node)):
        yield "doubled", [node, copy.deepcopy(node)]
    match node:
        case ast.AugAssign(target, op, value):
            for other in BINARY.get(type(op), ()):
                yield "operator", ast.AugAssign(target, other(), value)
            yield "assignment", ast.Assign([target], value)
        case ast.If(test, body, orelse):
            yield "condition", [*body]
            yield "condition", [*(orelse or [ast.Pass()])]
            yield "condition", ast.If(ast.UnaryOp(ast.Not(), test), body, orelse)
        case ast.For(target, each, body, orelse):
            yield "loop", ast.For(target, each, [*body, ast.Break()], orelse)
            if isinstance(each, ast.Call) and isinstance(each.func, ast.Name) and each.func.id == "range":
                yield "loop", ast.For(target, ast.Call(ast.Name("reversed"), [each], []), body, orelse)
        case ast.With(_, body):
            yield "context", [*body]
    body = getattr(node, "body", [])
    for i in range(len(body) - 1):
        other = copy.deepcopy(node)
        other.body[i], other.body[i + 1] = other.body[i + 1], other.body[i]
        yield "order", other


# ---- the tree around it


def _written(source: ExerciseSource) -> set[int]:
    """Return the lines of the plain solution that the student writes."""
    lines, number, inside = set(), 0, False
    for line in source.solution.splitlines():
        text = line.strip()
        if text in (BEGIN, END):
            inside = text == BEGIN
        elif not text.startswith("# instead:"):
            number += 1
            if inside:
                lines.add(number)
    return lines


Place = tuple[tuple[str, int | None], ...]


def _place(tree: ast.AST, wanted: ast.AST) -> Place:
    """Return the way from the root to a node: fields, and places in lists."""

    def search(node: ast.AST, way: Place) -> Place | None:
        if node is wanted:
            return way
        for field, value in ast.iter_fields(node):
            children = enumerate(value) if isinstance(value, list) else [(None, value)]
            for i, child in children:
                if isinstance(child, ast.AST) and (found := search(child, (*way, (field, i)))) is not None:
                    return found
        return None

    way = search(tree, ())
    assert way is not None
    return way


def _at(tree: ast.AST, place: Place) -> ast.AST:
    node = tree
    for field, i in place:
        node = getattr(node, field) if i is None else getattr(node, field)[i]
    return node


def _replaced(tree: ast.AST, place: Place, changed: ast.AST | list[ast.stmt]) -> ast.AST:
    other = copy.deepcopy(tree)
    *way, (field, i) = place
    parent = _at(other, tuple(way))
    changed = copy.deepcopy(changed)
    if i is None:
        setattr(parent, field, changed)
    else:
        getattr(parent, field)[i : i + 1] = changed if isinstance(changed, list) else [changed]
    return other


def _difference(before: str, after: str) -> str:
    """Return the lines that changed, before and after, in one line."""
    was, now = before.splitlines(), after.splitlines()
    blocks = [
        each for each in SequenceMatcher(None, was, now, autojunk=False).get_opcodes() if each[0] != "equal"
    ]
    first, last = blocks[0], blocks[-1]
    old, new = was[first[1] : last[2]], now[first[3] : last[4]]
    return f"{first[1] + 1}: {_in_one_line(old)} → {_in_one_line(new)}"


def _in_one_line(lines: list[str]) -> str:
    return " ⏎ ".join(line.strip() for line in lines) or "(nothing)"


def _compiles(code: str) -> bool:
    try:
        compile(code, "<mutant>", "exec")
    except (SyntaxError, ValueError):
        return False
    return True
