"""Run a cell on a rank: its statements, then its last expression, whose value is shown as a notebook shows it."""

from __future__ import annotations

import ast
import linecache
import traceback
from typing import Any

from mpkit.common.exceptions import one_line, report
from mpkit.common.tracebacks import fold_chain
from mpkit.launch.notebook.exchange import Reply

__all__ = ["complete", "run_cell"]

RICH = {"text/html": "_repr_html_", "image/svg+xml": "_repr_svg_"}
"""What is shown besides text, if an object has it, by the method that returns it."""

MOST = 500
"""The most completions of a text."""


def run_cell(code: str, name: str, namespace: dict[str, Any]) -> Reply:
    """Run a cell.

    Args:
        code: Python code.
        name: what tracebacks call it.
        namespace: the variables of the session on this rank.
    """
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    try:
        value = _value(code, name, namespace)
        if value is not None:
            namespace["_"] = value
        return Reply(shown=_show_value(value))
    except KeyboardInterrupt:
        return Reply("interrupted")
    except BaseException as error:  # SystemExit too, which would end the session
        return Reply("error", error=_describe_value(error))


def _value(code: str, name: str, namespace: dict[str, Any]) -> Any:
    """Return the value of the last expression; None if the cell ends with something else, or with a semicolon."""
    tree = ast.parse(code, name)
    last = tree.body[-1] if tree.body else None
    quiet = code.rstrip().endswith(";")
    if not isinstance(last, ast.Expr):
        exec(compile(tree, name, "exec"), namespace)
        return None
    del tree.body[-1]
    exec(compile(tree, name, "exec"), namespace)
    value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
    return None if quiet else value


def _show_value(value: Any) -> dict[str, str]:
    if value is None:
        return {}
    shown = {"text/plain": repr(value)}
    for kind, method in RICH.items():
        try:
            rich = getattr(value, method, lambda: None)()
        except Exception as error:  # of the user's own class; the text is there
            report(f"{type(value).__name__}.{method} raised {one_line(error)}; the value is shown as text")
            continue
        if isinstance(rich, str):
            shown[kind] = rich
    return shown


def _describe_value(error: BaseException) -> dict[str, str]:
    try:
        message = str(error)
    except Exception as worse:  # the class is the user's own
        message = f"(its __str__ raises {type(worse).__name__})"
    whole = "".join(traceback.format_exception(error))
    fold_chain(error)
    folded = "".join(traceback.format_exception(error))
    return {"type": type(error).__name__, "message": message, "traceback": whole, "folded": folded}


def complete(text: str, namespace: dict[str, Any]) -> list[str]:
    """Return the names and attributes that a text can be completed to.

    >>> complete("tor", {"torch": 1, "tool": 2})
    ['torch']
    """
    import rlcompleter

    completer = rlcompleter.Completer(namespace)
    found: dict[str, None] = {}
    try:
        while len(found) < MOST and (one := completer.complete(text, len(found))) is not None:
            found[one.rstrip("( )")] = None
    except Exception as error:  # attributes are looked up, which may run the user's code
        report(f"looking for names that begin with {text!r} raised {one_line(error)}; some may be missing")
    hidden = text.rpartition(".")[2].startswith("_")
    return [name for name in found if hidden or not name.rpartition(".")[2].startswith("_")]
