"""Variants of an exercise, one per student: its file, with other values for the constants that it says vary.

An exercise that has variants has a table of them in its Python file; `{M}` in its text file stands for the value of M:

    VARIES = {"M": (10, 12, 14), "FORWARD": ((1.0, 1.2, 2.6, 1.2), (1.0, 2.4, 1.2, 1.0))}

choose    take a value for each constant, by the course, the student and the exercise
replace   put these values into the file's code, in place of its own
run       run that code as a module: text, solution and right values follow from the constants
"""

from __future__ import annotations

import ast
import functools
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from inspect import getsource
from types import ModuleType
from typing import Any, Self

__all__ = ["NOT_IN_FILES", "Variant", "plainly", "varies", "vary_module"]

NOT_IN_FILES = r'^\.|[\\/:*?"<>|\x00-\x1f]'
"""What a student's name may have and the name of a folder may not, on one system or another."""


@dataclass(frozen=True)
class Variant:
    """Whose numbers an exercise has.

    Attributes:
        student: the student's name.
        key: a digest of the course and the student, from which all numbers follow.
    """

    student: str
    key: str

    @classmethod
    def for_student(cls, course: str, student: str) -> Self:
        """Return a student's variant in a course; names are compared as `plainly` has them.

        >>> print(Variant.for_student("pp-2026", "Kim Lee"))
        Kim Lee:63e6e3a4b7-8c5d
        >>> Variant.for_student("pp-2026", "kim_lee").key == Variant.for_student("pp-2026", "Kim Lee").key
        True
        """
        return cls(student, _digest(course, plainly(student))[:10])

    @classmethod
    def read(cls, text: str) -> Self:
        """Return the variant that was printed as this text.

        Raises:
            ValueError: No variant is printed so: somebody changed the name or the digits.
        """
        student, _, key = text.rpartition(":")
        variant = cls(student, key.partition("-")[0])
        if str(variant) != text:
            raise ValueError(
                f"variant={text!r} is no variant that was handed out: its name and its digits do not belong together. "
                "Use the line VARIANT = ... as it is in your own notebook"
            )
        return variant

    def __str__(self) -> str:
        """Return the name, the key, and four digits by which `read` notices a changed name."""
        return f"{self.student}:{self.key}-{_digest(self.student, self.key)[:4]}"

    def choose(self, exercise: str, varies: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        """Return this variant's value of each constant.

        >>> Variant("ada", "0").choose("memory", {"M": (10, 12, 14), "P": (3, 4)})
        {'M': 14, 'P': 4}
        """
        return {
            name: values[int(_digest(self.key, exercise, name), 16) % len(values)]
            for name, values in varies.items()
        }


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def plainly(name: str) -> str:
    """Return a name as names are compared: "Kim_Lee" and "Kim Lee.ipynb" are "kim lee".

    What no file name may have counts as "_", which stands in its place in the name of a student's folder.
    """
    return " ".join(
        re.sub(NOT_IN_FILES, "_", name.removesuffix(".ipynb")).replace("_", " ").split()
    ).casefold()


def varies(module: ModuleType) -> Mapping[str, Sequence[Any]]:
    """Return the values that each constant of an exercise's module may have; none if it has no variants."""
    table: Mapping[str, Sequence[Any]] = getattr(module, "VARIES", {})
    return table


@functools.lru_cache(256)
def vary_module(name: str, text: str) -> tuple[ModuleType, str]:
    """Return an exercise's module with a variant's numbers, and its code.

    The module cannot be imported by its name, so what it defines is sent to ranks by value.

    Args:
        name: the name of the exercise's module.
        text: the variant, as it is printed; "": the numbers that are in the file.
    """
    module = import_module(name)
    code = getsource(module)
    if not text or not varies(module):
        return module, code
    # ---- choose
    values = Variant.read(text).choose(name.rpartition(".")[2], varies(module))
    # ---- replace
    code = _replace_constants(code, values)
    # ---- run
    made = ModuleType(f"{name} ({text})")
    exec(compile(code, f"<{made.__name__}>", "exec"), vars(made))
    return made, code


def _replace_constants(code: str, values: Mapping[str, Any]) -> str:
    r"""Return the code with other values assigned to constants of the module.

    >>> print(_replace_constants("M = 4  # micro-batches\nP: int = (2\n  + 2)", {"M": 8, "P": 6}))
    M = 8  # micro-batches
    P: int = 6
    """
    lines = code.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    text, left = b"".join(lines), dict(values)
    for node in reversed(ast.parse(code).body):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        name = getattr(targets[0], "id", None)
        value = getattr(node, "value", None)
        if name not in left or not isinstance(value, ast.expr):
            continue
        assert value.end_lineno is not None and value.end_col_offset is not None
        begin = starts[value.lineno - 1] + value.col_offset
        end = starts[value.end_lineno - 1] + value.end_col_offset
        if text[begin - 1 : begin] == b"(":  # a value in parentheses, over several lines
            begin, end = begin - 1, text.index(b")", end) + 1
        text = text[:begin] + repr(left.pop(name)).encode() + text[end:]
    assert not left, f"VARIES names {', '.join(left)}, to which the file assigns nothing"
    return text.decode()
