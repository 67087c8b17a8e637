"""What this process has set for `logging`, so that ranks log the same: levels, and where lines appear.

Ranks do not run the script or the notebook's cells again, so a `logging.basicConfig(level="INFO")` there would be lost.
A logger that has a handler in the launching process has one on each rank, which writes to the rank's standard error.
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
        formats: the format of the first handler of each logger that has handlers; None is logging's default.
        alone: the loggers that do not propagate to the root.
    """

    disabled: int
    levels: dict[str, int]
    formats: dict[str, str | None]
    alone: list[str]


def log_settings_here() -> LogSettings:
    """Return this process's settings; a module's own logger gets its handlers from the rank's import of the module."""
    root = logging.getLogger()
    loggers = {"": root} | {
        name: logger for name, logger in root.manager.loggerDict.items() if isinstance(logger, logging.Logger)
    }
    own = {name: logger for name, logger in loggers.items() if name.partition(".")[0] not in sys.modules}
    return LogSettings(
        disabled=root.manager.disable,
        levels={name: logger.level for name, logger in loggers.items() if logger.level},
        formats={name: _format_of(logger) for name, logger in own.items() if logger.handlers},
        alone=[name for name, logger in own.items() if not logger.propagate],
    )


def set_logging(settings: Mapping[str, Any]) -> None:
    """Make this rank's logging like that of the launching process."""
    logging.disable(settings["disabled"])
    for name, level in settings["levels"].items():
        logging.getLogger(name).setLevel(level)
    for name, words in settings["formats"].items():
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(words or logging.BASIC_FORMAT))
        logging.getLogger(name).addHandler(handler)
    for name in settings["alone"]:
        logging.getLogger(name).propagate = False


def _format_of(logger: logging.Logger) -> str | None:
    formatter = logger.handlers[0].formatter
    return None if formatter is None else formatter._fmt
