"""The line of the program that an operation comes from: the innermost one that is neither torch's nor the kit's."""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType, FrameType

import torch

__all__ = ["Lines"]

_KIT = str(Path(__file__).parents[1])
_INTERNAL = (str(Path(torch.__file__).parent), _KIT, "<frozen")
_CALLS = ("distributed_c10d.py", "c10d_logger.py", "_ops.py", "_functional_collectives.py")
_DEPRECATION = "typing_extensions.py"  # wraps functions that torch has renamed
_PROGRAM, _CALL, _INSIDE, _COMM_FILE = range(
    4
)  # of the program, of torch.distributed's calls, of what makes them
_MODE = str(Path(__file__).with_name("measuring.py"))
_COMM = str(Path(_KIT, "comm"))  # what ctx.comm issues is recorded there


class Lines:
    """The lines of one program, each put into words once.

    Attributes:
        is_direct: whether the line that `here` returned last calls torch.distributed itself, and not DDP or FSDP.
    """

    def __init__(self) -> None:
        self.is_direct = False
        self._whose: dict[CodeType, int] = {}
        self._words: dict[tuple[CodeType, int], str] = {}

    def here(self) -> str | None:
        """Return the program's line that is running, such as "train.py:12 in main", "" if there is none.

        Return None if `ctx.comm` is running, which records its own communication.
        """
        frame: FrameType | None = sys._getframe(2)
        direct = True
        while frame is not None:
            code = frame.f_code
            whose = self._whose.get(code, -1)
            if whose < 0:
                whose = self._whose[code] = _whose(code.co_filename)
            if whose == _PROGRAM:
                self.is_direct = direct
                return self._in_words(frame)
            if whose == _COMM_FILE:
                return None
            direct &= whose == _CALL
            frame = frame.f_back
        self.is_direct = False
        return ""

    def called_from_python(self) -> bool:
        """Return whether Python called the running operator; otherwise C++ did, as DDP's reducer does."""
        frame: FrameType | None = sys._getframe(2)
        around = frame.f_back if frame is not None else None
        if (
            around is not None and around.f_code.co_filename == _MODE
        ):  # a measured step: its mode called the operator
            frame = around.f_back
        file = frame.f_code.co_filename if frame is not None else ""
        return file.endswith(_CALLS) or not file.startswith(_INTERNAL)

    def _in_words(self, frame: FrameType) -> str:
        key = frame.f_code, frame.f_lineno
        words = self._words.get(key)
        if words is None:
            words = self._words[key] = f"{key[0].co_filename}:{key[1]} in {key[0].co_name}"
        return words


def _whose(file: str) -> int:
    """Return whose code a file holds."""
    if file.startswith(_COMM):
        return _COMM_FILE
    if file.endswith(_DEPRECATION):
        return _CALL
    if not file.startswith(_INTERNAL):
        return _PROGRAM
    return _CALL if file.endswith(_CALLS) or file == _MODE else _INSIDE
