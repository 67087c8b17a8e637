"""Tracebacks that end at the user's line: frames of mpkit, and of torch below them, are folded away.

The last line of a traceback explains the mistake; above it Python prints every frame down to the check that found it.
A function decorated with `public` removes the frames of mpkit and of torch from an exception's traceback as it leaves.
Frames of the user's own functions that mpkit called (a model, a dataset) stay. An exception that looks like a bug in
mpkit itself keeps all of its frames, and `show_internals()` keeps them always.

Nothing is patched, neither sys.excepthook nor IPython, so this works the same in scripts, notebooks and debuggers.
"""

import functools
import inspect
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from pathlib import Path
from types import FrameType, FunctionType, TracebackType
from typing import Any, TypeVar, cast

from mpkit.common.calls import mistaken_call
from mpkit.common.missing_packages import lacks_torch, needs_torch
from mpkit.errors import MpkitError

Thing = TypeVar("Thing")

FOLDED = ("mpkit", "torch", "contextlib", "functools")
"""Top-level packages whose frames are folded."""

MISTAKES = (ValueError, MpkitError)
"""The errors that mpkit raises on purpose; any other that starts in mpkit is a bug of its own."""

_PACKAGES = [f"{Path(__file__).parents[1]}/"]
_STDLIB = sysconfig.get_path("stdlib")


class _Switch:
    shown = False


def show_internals(shown: bool = True) -> None:
    """Show all frames of mpkit and torch in tracebacks, or fold them again.

    Args:
        shown: whether to show all frames; False, the initial state, folds them.

    >>> show_internals()
    >>> show_internals(False)
    """
    _Switch.shown = bool(shown)


def internals_shown() -> bool:
    """Return whether `show_internals` asked for all frames."""
    return _Switch.shown


def public(thing: Thing) -> Thing:
    """Decorate a public function, or all public methods and properties of a class, to fold exceptions that leave it.

    A class then also answers a mistyped attribute with the nearest one that it has.
    """
    if isinstance(thing, type):
        if not hasattr(thing, "__getattr__"):
            thing.__getattr__ = _suggest_attribute  # type: ignore[attr-defined]
        for name, member in list(vars(thing).items()):
            if name.startswith("_") and name not in ("__init__", "__call__", "__getitem__"):
                continue
            if isinstance(member, FunctionType):
                setattr(thing, name, _guard(member))
            elif isinstance(member, (classmethod, staticmethod)):
                setattr(thing, name, type(member)(_guard(member.__func__)))
            elif isinstance(member, property) and member.fget is not None:
                setattr(thing, name, property(_guard(member.fget), member.fset, member.fdel, member.__doc__))
        return thing
    assert isinstance(thing, FunctionType)
    return cast(Thing, _guard(thing))


def _suggest_attribute(self: object, name: str) -> Any:
    """Raise the AttributeError of a missing attribute, with the nearest one's name (IPython does not give it)."""
    if name.startswith("_") or hasattr(type(self), name):
        return object.__getattribute__(self, name)  # raises Python's own error, or that of the property
    near = get_close_matches(name, [each for each in dir(self) if not each.startswith("_")], 1, 0.6)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise AttributeError(f"{type(self).__name__} has no attribute {name}{hint}")


def _guard(function: Callable[..., Any]) -> Callable[..., Any]:
    if inspect.isgeneratorfunction(function):
        return function

    @functools.wraps(function)
    def call_guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            try:
                return function(*args, **kwargs)
            except ModuleNotFoundError as error:
                if not lacks_torch(error) or not _raised_here(error):
                    raise
                raise needs_torch(f"mk.{function.__qualname__.removesuffix('.__init__')}") from None
            except TypeError as error:
                if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                    raise  # from within the function, which had begun
                raise mistaken_call(function, args, kwargs) from None
        except BaseException as error:
            if not _Switch.shown:
                fold_chain(error)
            raise  # a bare raise does not add this frame again

    return call_guarded


def fold_chain(error: BaseException) -> None:
    """Remove the frames of mpkit and torch from the tracebacks of an exception, its cause and its context."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        if folds(each):
            each.__traceback__ = fold(each.__traceback__, isinstance(each, KeyboardInterrupt))
            context = each.__context__
            # Without a line of the user's code, the context is mpkit's own handling of the error.
            if context is not None and context.__traceback__ is not None and not _visible(context):
                each.__suppress_context__ = True
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)


def _raised_here(error: BaseException) -> bool:
    """Return whether mpkit's own import failed, and not one in the user's function."""
    frames = [frame for frame, _ in _frames(error.__traceback__) if not _is_standard(frame)]
    return _root(frames[-1]) == "mpkit"


def _visible(error: BaseException) -> bool:
    """Return whether a line of the user's code is in the exception's traceback."""
    return any(not _is_folded(frame) for frame, _ in _frames(error.__traceback__))


def folds(error: BaseException) -> bool:
    """Return whether to fold an exception's frames: the user's code raised it, or mpkit found the user's mistake."""
    if isinstance(error, KeyboardInterrupt):
        return True
    frames = [frame for frame, _ in _frames(error.__traceback__)]
    internal = [i for i, frame in enumerate(frames) if _is_folded(frame)]
    below = frames[internal[-1] + 1 :] if internal else frames
    if below:  # mpkit called these; its own calls into the standard library do not concern the user
        return not all(_is_standard(frame) for frame in below)
    user = max((i for i, frame in enumerate(frames) if not _is_folded(frame)), default=len(frames))
    if any(_module(frame).startswith("torch.distributed") for frame in frames[user + 1 :]):
        return True  # the user's own call, which torch rejected
    return isinstance(error, MISTAKES) and bool(frames) and _root(frames[-1]) == "mpkit"


def fold(trace: TracebackType | None, interrupted: bool = False) -> TracebackType | None:
    """Return the traceback without the frames of mpkit and torch.

    After Ctrl-C (`interrupted`), those of Python's own at its end are folded too: mpkit was waiting in them.
    """
    frames = list(_frames(trace))
    while interrupted and frames and (_is_standard(frames[-1][0]) or _is_folded(frames[-1][0])):
        frames.pop()
    folded = None
    for frame, at in reversed(frames):
        if not _is_folded(frame):
            folded = TracebackType(folded, frame, at.tb_lasti, at.tb_lineno)
    return folded


def fold_stack(text: str) -> str:
    """Return faulthandler's stack without the lines of mpkit and torch; all of it if nothing is left."""
    places = [*_PACKAGES, *(f"{sysconfig.get_path(kind)}/torch/" for kind in ("purelib", "platlib"))]
    lines = text.strip().splitlines()
    kept = [line for line in lines if not any(f'"{place}' in line for place in places)]
    return "\n".join(kept if any("File " in line for line in kept) and not _Switch.shown else lines)


def level_of_user() -> int:
    """Return the `stacklevel` that shows a warning of this function's caller at the user's line."""
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None and _is_folded(frame):
        frame, level = frame.f_back, level + 1
    return level


def _frames(trace: TracebackType | None) -> Iterator[tuple[FrameType, TracebackType]]:
    while trace is not None:
        yield trace.tb_frame, trace
        trace = trace.tb_next


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _root(frame: FrameType) -> str:
    return _module(frame).partition(".")[0]


def _is_folded(frame: FrameType) -> bool:
    return _root(frame) in FOLDED


def _is_standard(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return name.startswith((_STDLIB, "<frozen")) and "site-packages" not in name


def in_cells(text: str) -> str:
    """Return the text with each place in a cell of this notebook spelled like "Cell In[3], line 7".

    >>> in_cells("rank 0 waits at train.py:7")
    'rank 0 waits at train.py:7'
    """
    interactive = sys.modules.get("IPython")
    shell = interactive.get_ipython() if interactive is not None else None
    if shell is None:
        return text

    def name_cell(place: re.Match[str]) -> str:
        label = shell.compile.format_code_name(place[1])  # ("Cell", "In[3]"), or None for a file
        return f"{label[0]} {label[1]}, line {place[2]}" if label else place[0]

    return re.sub(r"(/\S+\.py|<[^<>\n]+>):(\d+)", name_cell, text)
