"""What a program is doing while it communicates: the line that runs, and its annotation.

The line is the innermost one that is neither torch's nor the kit's. Annotations are `torch.profiler.record_function`,
which FSDP2, DDP and optimizers use as well.
"""

import sys
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch.autograd.profiler import record_function

from mpkit.common.process_wide import Replacements

_KIT = str(Path(__file__).parents[2])
_INTERNAL = (str(Path(torch.__file__).parent), _KIT, "<frozen")
_CALLS = (
    "distributed_c10d.py", "c10d_logger.py", "_ops.py", "_functional_collectives.py", "distributed/nn/functional.py",
    "_library/autograd.py",
)  # fmt: skip
_DEPRECATION = "typing_extensions.py"  # wraps functions that torch has renamed
_OF_MODES = ("__torch_dispatch__", "__torch_function__")
_TO_MODES = ("torch/overrides.py", "torch/_compile.py", "torch/_dynamo/eval_frame.py")  # call these
_COMM_FOLDER = str(Path(_KIT, "strategies", "comm"))  # records the calls of ctx.comm
# Whose code it is: the program's, torch.distributed's calls, what makes them (DDP), ctx.comm's, a dispatch mode's.
_PROGRAM, _CALL, _INSIDE, _COMM, _MODE = range(5)


class SourceLines:
    """The lines of one program, each formatted once."""

    def __init__(self) -> None:
        # Of the last `running_line`: whether it calls torch.distributed itself, and not through DDP or FSDP, and
        # whether Python called the operator, and not C++, as DDP's reducer.
        self.is_direct = self.by_python = False
        # By the identity of a code object, since hashing one reads all its bytecode; `_codes` keeps them alive.
        self._whose: dict[int, int] = {}
        self._words: dict[tuple[int, int], str] = {}
        self._codes: list[CodeType] = []

    def running_line(self) -> str | None:
        """Return the program's running line, "train.py:12 in main", or ""; None within `ctx.comm`, which records it."""
        # The kernel's caller: none in the thread in which C++ computes the backward on a GPU.
        frame = sys._getframe(1).f_back
        known, innermost, calls, direct = self._whose, True, True, True
        self.by_python = False
        while frame is not None:
            code = frame.f_code
            whose = known.get(id(code), -1)
            if whose < 0:
                whose = known[id(code)] = _whose(code)
                self._codes.append(code)
            if innermost:
                self.by_python = whose in (_PROGRAM, _CALL)
            # A mode has called the operator, itself or as torch calls operators: who has called the mode?
            calls = calls and whose in (_CALL, _MODE)
            innermost = calls and whose == _MODE
            if whose == _PROGRAM:
                self.is_direct = direct
                key = (id(code), frame.f_lasti)
                if key not in self._words:  # for speed: f_lineno reads the code's table of lines
                    self._words[key] = f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
                return self._words[key]
            if whose == _COMM:
                return None
            if whose == _INSIDE:
                direct = False
            frame = frame.f_back
        self.is_direct = False
        return ""


def _whose(code: CodeType) -> int:
    file = code.co_filename
    if code.co_name in _OF_MODES or file.endswith(_TO_MODES):  # also of `with torch.device("cuda")`
        return _MODE
    if file.startswith(_COMM_FOLDER):
        return _COMM
    if file.endswith(_DEPRECATION):
        return _CALL
    if not file.startswith(_INTERNAL):
        return _PROGRAM
    return _CALL if file.endswith(_CALLS) else _INSIDE


class Annotations:
    """The open annotations, one within another."""

    def __init__(self) -> None:
        self.innermost = ""  # the name of the innermost one, "" outside of all
        self._around: list[str] = []
        self._replaced = Replacements()

    def install(self) -> None:
        """Intercept annotations."""
        before_enter: Any = record_function.__enter__
        before_exit: Any = record_function.__exit__
        around = self._around

        def enter(annotation: Any) -> Any:
            around.append(self.innermost)
            self.innermost = annotation.name
            return before_enter(annotation)

        def leave(annotation: Any, *error: Any) -> None:
            self.innermost = around.pop() if around else ""
            before_exit(annotation, *error)

        self._replaced.put(record_function, "__enter__", enter)
        self._replaced.put(record_function, "__exit__", leave)

    def uninstall(self) -> None:
        """Restore annotations."""
        self._replaced.restore()
