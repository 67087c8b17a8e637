"""What the launching process sends to its ranks: function and arguments by value, and its own environment.

Ranks do not run the script or the notebook's cells again, so a `logging.basicConfig(level="INFO")` there would be lost.
So `logging` is set on ranks as it is here (`set_logging`): a logger that has a handler here has one on each rank, which
writes to the rank's standard error, unless it is silent here, as that of torch's checkpoints is: a NullHandler, and at
most handlers that the root has too, such as those that pytest gives to every logger.
"""

from __future__ import annotations

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
from mpkit.common.this_process import cores
from mpkit.strategies.packing.packing import Packer
from mpkit.strategies.packing.world import edited_functions, enter_world, pack_world

__all__ = ["pack", "set_logging", "settings_here", "unpack"]


def pack(function: Callable[..., Any], args: Sequence[Any], modules: Sequence[str] = ()) -> bytes:
    """Pickle a function and its arguments; objects from a notebook, script or REPL are pickled by value.

    This process's settings go before them (`mpkit.strategies.packing.world`).

    Args:
        function, args: what ranks call.
        modules: the installed modules that define the model's classes.

    Raises:
        ValueError: something in them cannot be sent to another process (a lock, an open file, a generator).
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
    edited = edited_functions(packer.modules)
    if edited:
        report(
            f"{', '.join(edited[:5])}: ranks run the file as it is now, and it was edited since this process imported "
            f"it. Import it anew, importlib.reload({edited[0].partition('.')[0]}), and make the model again."
        )
    return pack_world(modules) + file.getvalue()


def unpack(file: IO[bytes], *, enter: bool) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the function and its arguments; `enter`: after changing this process as the launching one was."""
    settings = pickle.load(file)
    if enter:
        enter_world(settings)
    function, args = pickle.load(file)
    return function, args


def settings_here(
    ranks: int,
    device: str,
    backend: str,
    devices: int,
    layers: bool,
    compares: bool,
    numbers: Sequence[int] = (),
) -> Settings:
    """Return the settings of a launch, taken from this process in its present state.

    Raises:
        ValueError: the current folder no longer exists.
    """
    try:
        cwd = os.getcwd()
    except FileNotFoundError:
        raise ValueError(
            "the current folder of this process has been deleted, and ranks start where it is: "
            "os.chdir(...) to a folder that exists"
        ) from None
    return Settings(
        ranks=ranks, device=device, backend=backend, devices=devices, layers=layers, compares=compares,
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
    sources: dict[str, str] = {}
    for name, entry in list(linecache.cache.items()):
        if len(entry) == 4 and not os.path.exists(name) and len(sources) < 2000:
            sources[name] = "".join(entry[2])
    return sources


# ---- logging -------------------------------------------------------------------------------------------------------


def _log_settings() -> dict[str, Any]:
    """Return this process's settings of `logging`, as JSON has them.

    disabled    the level up to which `logging.disable` disables all loggers
    levels      the level of each logger that has one of its own; "" is the root
    formats     by logger, the format of its first handler that writes; None is logging's default
    silent      the loggers that have a NullHandler, and none that writes
    alone       the loggers that do not propagate to the root

    A module's own logger gets its handlers from the rank's import of the module.
    """
    root = logging.getLogger()
    named = root.manager.loggerDict.items()
    loggers = {"": root} | {name: logger for name, logger in named if isinstance(logger, logging.Logger)}
    own = {name: logger for name, logger in loggers.items() if name.partition(".")[0] not in sys.modules}
    writing = {name: _writing(logger) for name, logger in own.items() if logger.handlers}
    first = {name: handlers[0].formatter for name, handlers in writing.items() if handlers}
    return {
        "disabled": root.manager.disable,
        "levels": {name: logger.level for name, logger in loggers.items() if logger.level},
        "formats": {name: formatter and formatter._fmt for name, formatter in first.items()},
        "silent": [name for name, handlers in writing.items() if not handlers],
        "alone": [name for name, logger in own.items() if not logger.propagate],
    }


def _writing(logger: logging.Logger) -> list[logging.Handler]:
    """Return the handlers that write for this logger."""
    writing = [handler for handler in logger.handlers if not isinstance(handler, logging.NullHandler)]
    if logger.parent is None or len(writing) == len(logger.handlers):
        return writing
    return [handler for handler in writing if handler not in logging.getLogger().handlers]


def set_logging(settings: Mapping[str, Any]) -> None:
    """Make this rank's logging like that of the launching process, whose `Settings.logging` this is."""
    if (
        logging.root.manager.disable != settings["disabled"]
    ):  # to set this or a level empties all loggers' caches
        logging.disable(settings["disabled"])
    known = logging.root.manager.loggerDict
    for name, level in settings["levels"].items():
        if name and name not in known:  # of which no cache knows, nor that of a logger below it
            logging.getLogger(name).level = level
        elif (logger := logging.getLogger(name)).level != level:
            logger.setLevel(level)
    for name, words in settings["formats"].items():
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(words or logging.BASIC_FORMAT))
        logging.getLogger(name).addHandler(handler)
    for name in settings["silent"]:
        logging.getLogger(name).addHandler(logging.NullHandler())
    for name in settings["alone"]:
        logging.getLogger(name).propagate = False
