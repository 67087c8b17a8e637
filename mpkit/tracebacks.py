"""Tracebacks that end at the user's line: frames of mpkit, and of torch below them, are folded away.

A mistake is answered by its last line; above it Python prints every frame on the way to the check that found it. A
public function that is decorated with `public` takes the frames of mpkit and of torch out of an exception's
traceback as it leaves. Frames of the user's own functions that mpkit called (a model, a dataset) stay. What looks
like a mistake of mpkit itself keeps all of its frames. `mk.show_internals()` keeps them always.

Nothing is patched: neither sys.excepthook nor IPython. So it works alike in scripts, notebooks and debuggers.
"""

from __future__ import annotations

import functools
import inspect
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, FunctionType, TracebackType
from typing import Any, TypeVar, cast

from mpkit.errors import MpkitError

__all__ = ["fold_chain", "fold_stack", "folds", "internals_shown", "public", "show_internals"]

Thing = TypeVar("Thing")

FOLDED = ("mpkit", "torch", "contextlib", "functools")
"""Top-level packages whose frames are folded."""

MISTAKES = (ValueError, MpkitError)
"""What mpkit raises on purpose; anything else that begins in mpkit is a mistake of its own."""

_PACKAGES = [f"{Path(__file__).parent}/"]
_STDLIB = sysconfig.get_path("stdlib")


class _Switch:
    shown = False


def show_internals(shown: bool = True) -> None:
    """Show all frames of mpkit and torch in tracebacks, or fold them again.

    Args:
        shown: False folds them, which is how mpkit begins.

    >>> import mpkit as mk
    >>> mk.show_internals()
    >>> mk.show_internals(False)
    """
    _Switch.shown = bool(shown)


def internals_shown() -> bool:
    """Whether `show_internals` asked for all frames."""
    return _Switch.shown


def public(thing: Thing) -> Thing:
    """Decorate a public function, or all public methods and properties of a class: exceptions leave it folded."""
    if isinstance(thing, type):
        for name, member in list(vars(thing).items()):
            if name.startswith("_") and name not in ("__init__", "__call__", "__getitem__"):
                continue
            if isinstance(member, FunctionType):
                setattr(thing, name, _guarded(member))
            elif isinstance(member, (classmethod, staticmethod)):
                setattr(thing, name, type(member)(_guarded(member.__func__)))
            elif isinstance(member, property) and member.fget is not None:
                setattr(
                    thing, name, property(_guarded(member.fget), member.fset, member.fdel, member.__doc__)
                )
        return thing
    assert isinstance(thing, FunctionType)
    return cast(Thing, _guarded(thing))


def _guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    if inspect.isgeneratorfunction(function):
        return function

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            if not _Switch.shown:
                fold_chain(error)
            raise  # without an argument: so this frame is not added again

    return guarded


def fold_chain(error: BaseException) -> None:
    """Take the frames of mpkit and torch out of the tracebacks of an exception, of its cause and of its context."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        if folds(each):
            each.__traceback__ = fold(each.__traceback__)
            context = each.__context__
            if context is not None and context.__traceback__ is not None and not _visible(context):
                each.__suppress_context__ = (
                    True  # mpkit's own handling of it, in which no line of the user's was
                )
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)


def _visible(error: BaseException) -> bool:
    """Whether a line of the user's is in its traceback."""
    return any(not _is_folded(frame) for frame, _ in _frames(error.__traceback__))


def folds(error: BaseException) -> bool:
    """Whether the frames of mpkit say nothing to a user: a mistake that mpkit found, or one in the user's own code."""
    if isinstance(error, KeyboardInterrupt):
        return True
    frames = [frame for frame, _ in _frames(error.__traceback__)]
    internal = [i for i, frame in enumerate(frames) if _is_folded(frame)]
    below = frames[internal[-1] + 1 :] if internal else frames
    if below:  # called by mpkit; what of the standard library mpkit itself calls is no concern of the user
        return not all(_is_standard(frame) for frame in below)
    if frames and _module(frames[-1]).startswith(
        "torch.distributed"
    ):  # a call of the user's own that it refused
        return _visible(error)
    return isinstance(error, MISTAKES) and bool(frames) and _root(frames[-1]) == "mpkit"


def fold(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames of mpkit and torch."""
    kept = [(frame, at) for frame, at in _frames(trace) if not _is_folded(frame)]
    folded = None
    for frame, at in reversed(kept):
        folded = TracebackType(folded, frame, at.tb_lasti, at.tb_lineno)
    return folded


def fold_stack(text: str) -> str:
    """The stack that faulthandler wrote, without the lines of mpkit and torch; all of it if nothing else is there."""
    lines = text.strip().splitlines()
    kept = [line for line in lines if not any(f'"{place}' in line for place in _places())]
    return "\n".join(kept if any("File " in line for line in kept) and not _Switch.shown else lines)


def _places() -> Iterator[str]:
    yield from _PACKAGES
    for kind in ("purelib", "platlib"):
        yield f"{sysconfig.get_path(kind)}/torch/"


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
