"""What this process has set for `logging`, so that ranks log the same: levels, and where lines appear.

Ranks do not run the script or the notebook's cells again, so a `logging.basicConfig(level="INFO")` there would be lost.
A logger that has a handler in the launching process has one on each rank, which writes to the rank's standard error,
unless it is silent there, as that of torch's checkpoints is: a NullHandler, and at most handlers that the root has too,
such as those that pytest gives to every logger.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Any, TypedDict

__all__ = ["LogSettings", "log_settings_here", "set_logging"]


class LogSettings(TypedDict):
    """Settings of `logging`, as JSON has them.

    Attributes:
        disabled: the level up to which `logging.disable` disables all loggers.
        levels: the level of each logger that has one of its own; "" is the root.
        formats: the format of the first handler that writes, of each logger that has one; None is logging's default.
        silent: the loggers that have a NullHandler, and none that writes.
        alone: the loggers that do not propagate to the root.
    """

    disabled: int
    levels: dict[str, int]
    formats: dict[str, str | None]
    silent: list[str]
    alone: list[str]


def log_settings_here() -> LogSettings:
    """Return this process's settings; a module's own logger gets its handlers from the rank's import of the module."""
    root = logging.getLogger()
    loggers = {"": root} | {
        name: logger for name, logger in root.manager.loggerDict.items() if isinstance(logger, logging.Logger)
    }
    own = {name: logger for name, logger in loggers.items() if name.partition(".")[0] not in sys.modules}
    writing = {name: _writing(logger) for name, logger in own.items() if logger.handlers}
    return LogSettings(
        disabled=root.manager.disable,
        levels={name: logger.level for name, logger in loggers.items() if logger.level},
        formats={name: _format_of(handlers[0]) for name, handlers in writing.items() if handlers},
        silent=[name for name, handlers in writing.items() if not handlers],
        alone=[name for name, logger in own.items() if not logger.propagate],
    )


def set_logging(settings: Mapping[str, Any]) -> None:
    """Make this rank's logging like that of the launching process."""
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


def _writing(logger: logging.Logger) -> list[logging.Handler]:
    """Return the handlers that write for this logger."""
    writing = [handler for handler in logger.handlers if not isinstance(handler, logging.NullHandler)]
    if logger.parent is None or not any(type(handler) is logging.NullHandler for handler in logger.handlers):
        return writing
    return [handler for handler in writing if handler not in logging.getLogger().handlers]


def _format_of(handler: logging.Handler) -> str | None:
    return None if handler.formatter is None else handler.formatter._fmt
