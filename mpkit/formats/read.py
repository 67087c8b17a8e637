"""A framework's configuration read as a Plan; the format is guessed from its keys."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpkit.formats.keys import Format
from mpkit.formats.syntax import flat
from mpkit.formats.table import FORMATS
from mpkit.formats.write import format_of
from mpkit.plan.config import Config
from mpkit.plan.plan import Plan
from mpkit.support.tracebacks import level_of_user

__all__ = ["read"]

SHOWN = 12  # keys in a warning


def read(source: str | os.PathLike[str] | Mapping[str, Any], format: str | None = None) -> Plan:
    """Return the plan in a file, a text of several lines, or a mapping, for `Plan.read`.

    Raises:
        ValueError: it is of no format that is known, or could be of several; or a value cannot be.
    """
    if isinstance(source, Config):
        format = format or source.kind
    what, found = _what(source), _loaded(source)
    chosen = format_of(format) if format is not None else _guess(what, found)
    if chosen.name not in found:
        raise ValueError(f"{what} cannot be read as {chosen.name}: {_why_not(source, chosen)}")
    values = found[chosen.name]
    notes: list[str] = []
    fields = chosen.fields_of(values, notes)
    try:
        plan = Plan(**fields)
    except ValueError as error:
        raise ValueError(f"{what}, read as {chosen.name}, says a plan that cannot work. {error}") from None
    if unknown := _unknown(chosen, values):
        more = f" and {len(unknown) - SHOWN} more" if len(unknown) > SHOWN else ""
        notes.append(f"not read, since a Plan says nothing of it: {', '.join(unknown[:SHOWN])}{more}")
    if notes:
        warnings.warn(f"{what}, read as {chosen.name}: {'; '.join(notes)}", stacklevel=level_of_user())
    return plan


def _what(source: Any) -> str:
    return "The text" if isinstance(source, Mapping) or _is_text(source) else str(source)


def _is_text(source: Any) -> bool:
    return isinstance(source, Config) or (isinstance(source, str) and ("\n" in source or source[:1] == "{"))


def _text(source: Any) -> str:
    if _is_text(source):
        return str(source)
    path = Path(source)
    if not path.is_file():
        raise ValueError(
            f"Plan.read({str(source)!r}): there is no such file. It takes the path of a configuration, such as "
            "Plan.read('ds_config.json'), or its text"
        )
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is no text ({error}), and a configuration is: {', '.join(FORMATS)}"
        ) from None


def _loaded(source: Any) -> dict[str, dict[str, Any]]:
    """Return the values by format, of the formats that can be written like this."""
    if isinstance(source, Mapping):
        return dict.fromkeys(FORMATS, flat(source))
    text = _text(source)
    found = {}
    for name, each in FORMATS.items():
        try:
            found[name] = each.syntax.load(text)
        except ValueError:
            continue
    return found


def _why_not(source: Any, chosen: Format) -> str:
    try:
        chosen.syntax.load(_text(source))
    except ValueError as error:
        return str(error)
    raise AssertionError("it can be read")


def _unknown(chosen: Format, values: Mapping[str, Any]) -> list[str]:
    known = {key.name for key in chosen.keys}
    return [name for name in values if name not in known]


def _guess(what: str, found: Mapping[str, Mapping[str, Any]]) -> Format:
    """Return the format that knows the most keys."""
    counts = {name: len(values) - len(_unknown(FORMATS[name], values)) for name, values in found.items()}
    most = max(counts.values(), default=0)
    best = [name for name, count in counts.items() if count == most]
    keys = {name: {key.name for key in FORMATS[name].keys} for name in best}
    # Megatron's arguments come after torchrun's: those of torchrun alone are torchrun's.
    best = [name for name in best if not any(keys[other] < keys[name] for other in best)]
    if not most:
        raise ValueError(
            f"{what} has no key of a format that is known ({', '.join(FORMATS)}). If it is one of them, say which: "
            "Plan.read(path, format='deepspeed')"
        )
    if len(best) > 1:
        raise ValueError(
            f"{what} could be of {' or '.join(best)}: all its keys that are known are in both. Say which: "
            f"Plan.read(path, format={best[0]!r})"
        )
    return FORMATS[best[0]]
