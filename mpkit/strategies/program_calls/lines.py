"""The line of the program that an operation comes from: the innermost one that is neither torch's nor the kit's."""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType, FrameType

import torch

__all__ = ["SourceLines"]

_KIT = str(Path(__file__).parents[2])
_INTERNAL = (str(Path(torch.__file__).parent), _KIT, "<frozen")
_CALLS = (
    "distributed_c10d.py", "c10d_logger.py", "_ops.py", "_functional_collectives.py", "distributed/nn/functional.py",
    "_library/autograd.py",
)  # fmt: skip
_DEPRECATION = "typing_extensions.py"  # wraps functions that torch has renamed
_OF_MODES = ("__torch_dispatch__", "__torch_function__")
_TO_MODES = ("torch/overrides.py", "torch/_compile.py", "torch/_dynamo/eval_frame.py")  # what calls these
_COMM_FOLDER = str(Path(_KIT, "strategies", "comm"))  # what ctx.comm issues is recorded there
# Whose code it is: the program's, torch.distributed's calls, what makes them (DDP), ctx.comm's, a dispatch mode's.
_PROGRAM, _CALL, _INSIDE, _COMM, _MODE = range(5)


class SourceLines:
    """The lines of one program, each put into words once.

    Attributes:
        is_direct: whether the line that `running_line` returned last calls torch.distributed itself, and not DDP or
            FSDP.
        by_python: whether Python called the operator for which `running_line` was asked last; otherwise C++ did, as
            DDP's reducer does.
    """

    def __init__(self) -> None:
        self.is_direct = self.by_python = False
        # By the identity of a code object, for hashing one reads all its bytecode; `_codes` keeps them alive.
        self._whose: dict[int, int] = {}
        self._words: dict[tuple[int, int], str] = {}
        self._codes: list[CodeType] = []

    def running_line(self) -> str | None:
        """Return the program's line that is running, such as "train.py:12 in main", "" if there is none.

        Return None if `ctx.comm` is running, which records its own communication.
        """
        frame: FrameType | None = sys._getframe(2)
        known, innermost, calls, direct = self._whose, True, True, True
        self.by_python = False
        while frame is not None:
            code = frame.f_code
            whose = known.get(id(code), -1)
            if whose < 0:
                whose = self._learn(code)
            if innermost:
                self.by_python = whose in (_PROGRAM, _CALL)
            # A mode has called the operator, itself or as torch calls operators: who has called the mode?
            calls = calls and whose in (_CALL, _MODE)
            innermost = calls and whose == _MODE
            if whose == _PROGRAM:
                self.is_direct = direct
                key = (
                    id(code),
                    frame.f_lasti,
                )  # the line is looked up once: that reads the code's table of lines
                return self._words.get(key) or self._in_words(frame, key)
            if whose == _COMM:
                return None
            if whose == _INSIDE:
                direct = False
            frame = frame.f_back
        self.is_direct = False
        return ""

    def _learn(self, code: CodeType) -> int:
        whose = self._whose[id(code)] = _whose(code)
        self._codes.append(code)
        return whose

    def _in_words(self, frame: FrameType, key: tuple[int, int]) -> str:
        code = frame.f_code
        words = self._words[key] = f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
        return words


def _whose(code: CodeType) -> int:
    """Return whose code it is."""
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
