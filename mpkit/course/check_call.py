"""Calls of `mk.check` that give it no answer: what is wrong with them, in a sentence.

check_arguments     a name that is no text; a text, a result or an instance in place of the function or class
explain_undefined   a name that no cell has defined: Python looks it up before it calls `mk.check`, which therefore
                    never hears of it. IPython tells its listeners when a cell has ended, and by which error.
"""

from __future__ import annotations

import ast
import difflib
import sys
import textwrap
from collections.abc import Mapping
from typing import Any

from mpkit.course.catalogue import ExerciseEntry, find

__all__ = ["check_arguments", "explain_undefined", "listen_to_cells"]


def check_arguments(entry: ExerciseEntry, answer: object) -> None:
    """Reject what cannot be an answer to an exercise that asks for a function or a class.

    >>> check_arguments(find("pass-the-token"), "pass_the_token")
    Traceback (most recent call last):
        ...
    ValueError: mk.check('pass-the-token', 'pass_the_token'): the answer is the function pass_the_token itself, not of \
the type str; write mk.check('pass-the-token', pass_the_token), without quotes and parentheses

    Raises:
        ValueError: The answer cannot be called.
    """
    if entry.exercise.called or callable(answer):
        return
    wanted = entry.exercise.name_of_answer
    kind = "class" if wanted[0].isupper() else "function"
    got = f"{answer!r}"
    short = got if len(got) <= 30 else f"{got[:27]}..."
    what = "None" if answer is None else f"of the type {type(answer).__name__}"
    raise ValueError(
        f"mk.check({entry.name!r}, {short}): the answer is the {kind} {wanted} itself, not {what}; write "
        f"mk.check({entry.name!r}, {wanted}), without quotes and parentheses"
    )


def explain_undefined(cell: str, missing: str, names: Mapping[str, object]) -> str:
    """Return why a cell's `mk.check` found no answer of that name; "" if the name was not its answer.

    Args:
        cell: the code of the cell.
        missing: the name that is not defined.
        names: what is defined in the notebook, by name.

    >>> explain_undefined('mk.check("pass-the-token", pass_the_token)', "pass_the_token", {})
    "No cell has defined pass_the_token yet, the answer to 'pass-the-token'. Run the cell above that begins with its \
`def` or `class`. If that cell ends in an error, such as a SyntaxError, it defines nothing: fix the line that the \
error names, and run it again."
    >>> explain_undefined('mk.check("pass-the-token", token)', "token", {"pass_the_token": print})
    "The answer to 'pass-the-token' is called pass_the_token: mk.check('pass-the-token', pass_the_token)"
    """
    name = _exercise_of(cell, missing)
    if not name:
        return ""
    wanted = find(name).exercise.name_of_answer
    if wanted in names:
        return f"The answer to {name!r} is called {wanted}: mk.check({name!r}, {wanted})"
    said = f"No cell has defined {wanted} yet, the answer to {name!r}. "
    own = [each for each, value in names.items() if getattr(value, "__module__", "") == "__main__"]
    near = difflib.get_close_matches(wanted, own, 1, 0.8)
    if near:
        return f"{said}A cell defines {near[0]}: name it {wanted} there, and run that cell again."
    return (
        f"{said}Run the cell above that begins with its `def` or `class`. If that cell ends in an error, such as a "
        "SyntaxError, it defines nothing: fix the line that the error names, and run it again."
    )


def _exercise_of(cell: str, missing: str) -> str:
    """Return the name of the exercise that a cell checks with that variable; "" if there is none."""
    try:
        calls = [node for node in ast.walk(ast.parse(cell)) if isinstance(node, ast.Call)]
    except SyntaxError:  # IPython's own syntax, such as %time
        return ""
    for call in calls:
        match call:
            case ast.Call(ast.Attribute(_, "check"), [ast.Constant(str(name)), ast.Name(variable), *_]):
                if variable == missing:
                    try:
                        return find(name).name
                    except ValueError:  # no exercise's name
                        return ""
    return ""


def listen_to_cells() -> None:
    """In a notebook, print an explanation below the error of each cell that checks an undefined name."""
    interactive = sys.modules.get("IPython")
    shell = interactive.get_ipython() if interactive is not None else None
    if shell is None:
        return

    def explain_error(result: Any) -> None:
        error = result.error_in_exec
        if isinstance(error, NameError) and (
            said := explain_undefined(result.info.raw_cell, str(error.name), shell.user_ns)
        ):
            print(textwrap.fill(said, 100))

    shell.events.register("post_run_cell", explain_error)
