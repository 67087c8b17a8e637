"""Calls that do not match a function's parameters: the error names what was typed and shows a call that works."""

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from doctest import DocTestParser
from typing import Any, TypeVar

from mpkit.errors import ArgumentError

Function = TypeVar("Function", bound=Callable[..., Any])


def answers(
    example: str, meant: Mapping[str, str] | Callable[[], Mapping[str, str]] | None = None
) -> Callable[[Function], Function]:
    """Decorate a public function: errors of mistaken calls show this example, not one of its docstring.

    Args:
        example: a call that works, to paste; may have several lines.
        meant: a sentence on mpkit's own name for each keyword of other libraries; or a function that returns them.
    """

    def decorate(function: Function) -> Function:
        vars(function)[ANSWER] = example, meant or {}
        return function

    return decorate


ANSWER = "_mpkit_answer"


def mistaken_call(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> ArgumentError:
    """Return the error of a call that does not match a function's parameters; `public` raises it.

    >>> @answers("area(width=3, height=4)", {"w": "w is width here."})
    ... def area(width, height):
    ...     return width * height
    >>> print(mistaken_call(area, (3,), {"hight": 4}))
    area() has no argument hight; did you mean height=4? Such as:
        area(width=3, height=4)
    """
    name = function.__qualname__.removesuffix(".__init__")
    example, meant = vars(function).get(ANSWER, ("", {}))
    if example:
        name = example.partition("(")[0]
    else:
        examples = DocTestParser().get_examples(inspect.getdoc(function) or "")
        example = next((each.source for each in examples if f"{function.__name__}(" in each.source), "")
    known = meant() if callable(meant) else meant
    said = _what_is_wrong(name, inspect.signature(function), args, kwargs, known)
    said = said or f"{name}() is given one argument by position and by name."
    lines = "".join(f"\n    {line}" for line in example.splitlines())
    return ArgumentError(f"{said} Such as:{lines}" if lines else said)


def _what_is_wrong(
    name: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any], meant: Mapping[str, str]
) -> str:  # fmt: skip
    parameters = {each: p for each, p in signature.parameters.items() if each not in ("self", "cls")}
    bound = len(signature.parameters) - len(parameters)
    positional = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    by_position = [each for each, p in parameters.items() if p.kind in positional]
    given = set(by_position[: len(args) - bound]) | set(kwargs)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    missing = [
        each
        for each, p in parameters.items()
        if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and each not in given
    ]
    for unknown in [each for each in kwargs if each not in parameters]:
        if unknown in meant:
            return f"{name}() has no argument {unknown}. {meant[unknown]}"
        others = missing if takes_any else [each for each in parameters if each not in given]
        near = get_close_matches(unknown, others, 1, 0.5)
        if takes_any and not near:
            continue
        value = kwargs[unknown]
        shown = repr(value) if isinstance(value, (bool, int, float, str)) else "..."
        taken = ", ".join(each for each, p in parameters.items() if p.kind is not p.VAR_KEYWORD)
        hint = f"; did you mean {near[0]}={shown}?" if near else f". It takes {taken}."
        return f"{name}() has no argument {unknown}{hint}"
    if len(args) - bound > len(by_position):
        rest = [each for each, p in parameters.items() if p.kind is p.KEYWORD_ONLY]
        named = f"; those after that are given by name: {', '.join(rest)}" if rest else ""
        return f"{name}() takes {len(by_position)} arguments by position and was given {len(args) - bound}{named}."
    if missing:
        return f"{name}() lacks {', '.join(missing[:-1])}{' and ' * (len(missing) > 1)}{missing[-1]}."
    return ""
