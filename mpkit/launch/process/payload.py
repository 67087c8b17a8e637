"""What the launching process sends to its ranks: function and arguments by value, and its own environment.

Ranks do not run the script or the notebook's cells again, so a `logging.basicConfig(level="INFO")` there would be lost.
So the ranks' loggers get the levels of this process's loggers, and the root's format (`set_logging`).
"""

import inspect
import io
import linecache
import logging
import os
import pickle
import secrets
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from mpkit.common.exceptions import report
from mpkit.common.launch_folder import Settings
from mpkit.common.process_wide import cores
from mpkit.strategies.packing.packing import Packer
from mpkit.strategies.packing.world import edited_functions, enter_world, pack_world


def check_function(fn: Callable[..., Any], args: Sequence[object]) -> None:
    """Check that ranks can call fn(ctx, *args).

    >>> check_function(lambda: 1, ())  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: run(fn): ranks call fn(ctx), which <lambda>() does not fit: too many positional arguments. ...
    """
    if not callable(fn):
        raise ValueError(f"run(fn) takes a function of a context, such as `lambda ctx: ctx.rank`, not {fn!r}")
    try:
        signature = inspect.signature(fn)
    except ValueError:  # of a built-in function, which does not say its parameters
        return
    try:
        signature.bind(None, *args)
    except TypeError as error:
        call = f"fn(ctx{', *args' * bool(args)})"
        what = f"{getattr(fn, '__name__', type(fn).__name__)}{signature}"
        raise ValueError(
            f"run(fn): ranks call {call}, which {what} does not fit: {error}. Its first parameter is the "
            "context, as in cluster.run(lambda ctx: ctx.rank)"
        ) from None


def pack(function: Callable[..., Any], args: Sequence[Any]) -> bytes:
    """Pickle a function and its arguments; objects from a notebook, script or REPL are pickled by value.

    This process's settings go before them (`mpkit.strategies.packing.world`).
    """
    try:
        file = io.BytesIO()
        packer = Packer(file)
        packer.dump((function, tuple(args)))
    except Exception as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise ValueError(
            f"{name} or what it uses cannot be sent to other processes ({type(error).__name__}: {error}). "
            "Locks, open files, sockets, generators and widgets stay in the process that made them: create such "
            "things inside the function, or pass the plain data they hold."
        ) from None
    if edited := edited_functions(packer.modules):
        report(
            f"{', '.join(edited[:5])}: ranks run the file as it is now, and it was edited since this process imported "
            f"it. Import it anew, importlib.reload({edited[0].partition('.')[0]}), and make the model again."
        )
    return pack_world() + file.getvalue()


def unpack(file: IO[bytes], *, enter: bool) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the function and its arguments; `enter`: after changing this process as the launching one was."""
    settings = pickle.load(file)
    if enter:
        enter_world(settings)
    function, args = pickle.load(file)
    return function, args


def settings_here(
    ranks: int, device: str, backend: str, numbers: Sequence[int], layers: bool = False, compares: bool = True
) -> Settings:
    """Return the settings of a launch, taken from this process in its present state."""
    try:
        cwd = os.getcwd()
    except FileNotFoundError:
        raise ValueError(
            "the current folder of this process has been deleted, and ranks start where it is: "
            "os.chdir(...) to a folder that exists"
        ) from None
    return Settings(
        ranks=ranks, device=device, backend=backend, layers=layers, compares=compares,
        numbers=list(numbers), threads=1 if device == "cpu" else max(1, cores() // ranks), cwd=cwd,
        path=[os.path.abspath(path) if path else cwd for path in sys.path], argv=list(sys.argv),
        sources=_sources_without_file(), port=_free_port(), secret=secrets.token_hex(), logging=_log_settings(),
    )  # fmt: skip


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _sources_without_file() -> dict[str, str]:
    """Return the source of notebook cells and REPL input, whose lines a rank's traceback should show."""
    cached = list(linecache.cache.items())
    without = [(name, entry[2]) for name, entry in cached if len(entry) == 4 and not os.path.exists(name)]
    return {name: "".join(lines) for name, lines in without[:2000]}


def _log_settings() -> dict[str, Any]:
    """Return the levels of this process's loggers, "" for the root, and the format of the root's handler, if any."""
    named = logging.root.manager.loggerDict.items()
    levels = {name: each.level for name, each in named if isinstance(each, logging.Logger) and each.level}
    writing = [each for each in logging.root.handlers if not isinstance(each, logging.NullHandler)]
    formatter = writing[0].formatter if writing else None
    written = None if not writing else formatter._fmt if formatter is not None else logging.BASIC_FORMAT
    return {"levels": {"": logging.root.level, **levels}, "format": written}


def set_logging(settings: Mapping[str, Any]) -> None:
    """Make this rank's logging like that of the launching process, from its `Settings.logging`."""
    known = logging.root.manager.loggerDict
    for name, level in settings["levels"].items():
        if name and name not in known:  # no logger's cache knows of it, and to set a level empties all caches
            logging.getLogger(name).level = level
        elif (logger := logging.getLogger(name)).level != level:
            logger.setLevel(level)
    if settings["format"] is not None:
        logging.basicConfig(format=settings["format"])  # to standard error
