"""The parts of an exercise's file.

given      the code between `# %% given` and `# %% answer`, which students get; it may be absent
solution   the code between `# %% answer` and `# %% checks`, with its markers
stub       the solution without the code between the markers
plain      the solution without its markers
"""

from __future__ import annotations

import ast
import linecache
import re
from dataclasses import dataclass
from typing import Any

BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
"""nbgrader's own markers."""

IMPORTS = """\
from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mpkit as mk
"""
"""The first cell of every exercise notebook: all imports that cells use. (Annotations are never evaluated, because
IPython applies the `from __future__` of one cell to the cells after it.)"""


@dataclass(frozen=True)
class ExerciseSource:
    """An exercise's file, in its parts.

    Attributes:
        given: the code that students get.
        solution: the code of the answer, with its markers.
    """

    given: str
    solution: str

    @classmethod
    def from_code(cls, name: str, code: str) -> ExerciseSource:
        """Read the parts of an exercise's code; `name` is its module's."""
        answer = re.search(r"^# %% answer\n(.*?)^# %% checks", code, re.S | re.M)
        assert answer is not None, f"{name} has no part between '# %% answer' and '# %% checks'"
        return cls(given_in(code), answer.group(1).strip() + "\n")

    @property
    def plain(self) -> str:
        """The solution without its markers and without the `# instead:` lines."""
        return re.sub(rf"^ *({BEGIN}|{END}|# instead:.*)\n", "", self.solution, flags=re.M)

    @property
    def answer(self) -> str:
        """The name of the answer: what the cell defines last."""
        *_, last = ast.parse(self.solution).body
        if isinstance(last, ast.FunctionDef | ast.ClassDef):
            return last.name
        assert isinstance(last, ast.Assign), "the answer's cell ends with a function, a class or a value"
        return ast.unparse(last.targets[0])

    @property
    def has_instead(self) -> bool:
        """Whether the stub is more than an error: a program to fix, or values to fill in."""
        return bool(re.search(r"^ *# instead:", self.solution, re.M))

    @property
    def stub(self) -> str:
        """The student's cell: each part between the markers is replaced by its `# instead:` lines, or by an error."""

        def keep_stub(match: re.Match[str]) -> str:
            indent, inside = match.group(1), match.group(2)
            instead = re.findall(rf"^{indent}# instead: ?(.*)\n", inside, re.M)
            lines = instead or ['raise NotImplementedError("your turn")']
            return "".join(f"{indent}{line}\n" if line else "\n" for line in lines)

        return re.sub(rf"^( *){BEGIN}\n(.*?)^ *{END}\n", keep_stub, self.solution, flags=re.S | re.M)


def given_in(code: str) -> str:
    """Return the code that a module's code gives to students: from `# %% given` to the next mark; "" if none."""
    match = re.search(r"^# %% given\n(.*?)(?=^# %%|\Z)", code, re.S | re.M)
    return match.group(1).strip() if match else ""


def run_cell(code: str, name: str, label: str = "answer", given: str = "") -> Any:
    """Run a cell as a notebook would, and return what it defines under a name; it can be sent to ranks by value.

    Args:
        code: the code of the cell.
        name: the name to return.
        label: the cell's name in tracebacks.
        given: the code that the exercise gives; it runs before the cell, after the imports that every notebook has.
    """
    filename = f"<{label}>"
    linecache.cache[filename] = (len(code), None, code.splitlines(keepends=True), filename)
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(IMPORTS + given, "<given>", "exec"), space)
    exec(compile(code, filename, "exec"), space)
    return space[name]
