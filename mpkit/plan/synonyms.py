"""What other libraries call the fields of a Plan, their values, its constructors and schedules: elsewhere.toml."""

from __future__ import annotations

import tomllib
from functools import lru_cache
from pathlib import Path
from typing import Any

__all__ = ["constructors", "keywords", "schedules", "values"]


@lru_cache(1)
def _tables() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("elsewhere.toml").read_text("utf-8"))


def keywords() -> dict[str, str]:
    """Return what another library's keyword is called here, in a sentence.

    >>> keywords()["tp_size"]
    'tp= is the number of tensor-parallel ranks, which share each layer.'
    """
    return {name: row["says"] for row in _tables()["keyword"] for name in row["names"]}


def values(field: str) -> dict[str, tuple[Any, str]]:
    """Return, for another library's value of a field in lower case, the closest of a Plan, and what to know of it.

    >>> values("zero")["full_shard"]
    (3, "FSDP's full_shard is ZeRO-3. ")
    """
    rows = [row for row in _tables()["value"] if row["field"] == field]
    return {name: (row["ours"], row["says"]) for row in rows for name in row["names"]}


def constructors() -> dict[str, str]:
    """Return the call that makes a Plan, by another library's name of its strategy."""
    return dict(_tables()["constructor"])


def schedules() -> dict[str, str]:
    """Return a schedule's name here, by what papers and other frameworks call it.

    >>> schedules()["pipedream"]
    '1f1b'
    """
    return {name: ours for ours, names in _tables()["schedule"].items() for name in names}
