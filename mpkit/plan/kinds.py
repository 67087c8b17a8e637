"""What each field of a Plan takes by itself, and what a wrong value is answered with.

rules.toml has the sentences, and elsewhere.toml what other libraries call fields, their values, constructors and
schedules.
"""

from __future__ import annotations

import operator
import re
import tomllib
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import lru_cache
from math import inf, isfinite
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

from mpkit.plan.tensor_plan import TensorPlan

MOST = 1_000_000
"""Ranks, and also stages per rank and micro-batches."""

RECOMPUTE = ("none", "selective", "full")
ORDERS = CONTIGUOUS, ZIGZAG = ("contiguous", "zigzag")
METHODS = ("ring", "ulysses")

Change = dict[str, Any]
Parts = tuple[str | Change, ...]
"""A sentence in which each change stands for the plan that it makes."""


class Kind(NamedTuple):
    """What a field takes.

    Attributes:
        read: return the value, as Python's own type; None if the field does not take it.
        works: a value that it takes; of words, all of them.
        optional: whether None is a value too.
    """

    read: Callable[[Any], Any]
    works: Any = None
    optional: bool = False


def whole(value: object) -> int | None:
    """Return a whole number of any type (numpy's too) as an int, else None. True and False do not count as numbers."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def real(value: object) -> float | None:
    """Return a real number of any type (numpy's too) as a float, else None."""
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else None


def every(recompute: str) -> int:
    """Return how many blocks there are for each recomputed one: 1 for "full", k for "every=k", else 0.

    >>> every("full"), every("every=2"), every("selective"), every("every=0"), every("every=two")
    (1, 2, 0, 0, 0)
    """
    if recompute == "full":
        return 1
    number = recompute.removeprefix("every=")
    return int(number) if recompute.startswith("every=") and number.isdecimal() else 0


def _degree(works: int, optional: bool = False) -> Kind:
    return Kind(lambda value: _between(value, 1, MOST), works, optional)


def _between(value: Any, least: int, most: float) -> int | None:
    number = whole(value)
    return number if number is not None and least <= number <= most else None


def _choice(*choices: str) -> Kind:
    return Kind(lambda value: value if isinstance(value, str) and value in choices else None, choices)


@lru_cache(1)
def tables() -> dict[str, Any]:
    """Return the tables of rules.toml."""
    return tomllib.loads(Path(__file__).with_name("rules.toml").read_text("utf-8"))


def parts_of(says: str, known: Mapping[str, Any]) -> Parts:
    """Return a sentence with what is known in its braces, and its changes.

    >>> parts_of("{p} and <zero=p + 1>", {"p": 2})
    ('2 and ', {'zero': 3})
    """
    parts = (
        eval(f"dict({part})", {**known}) if number % 2 else part.format_map(known)
        for number, part in enumerate(re.split("<(.*?)>", says))
    )
    return tuple(part for part in parts if part)


def rejection_of(name: str, value: Any) -> Parts:
    """Return why a field does not take a value: a sentence of rules.toml, with the nearest plan that works.

    >>> rejection_of("pp", 0)
    ('Plan(pp=0): pp is a whole number, 1 or more, such as in ', {'pp': 4})
    """
    kind, word, sentences = KINDS[name], str(value).lower(), tables()["kinds"]
    change, said = _meant_field(name, word)
    known = {"name": name, "value": value, "MOST": MOST, "works": kind.works, "said": said, "change": change}
    is_word = isinstance(kind.works, tuple)
    if name == "zero" and change:
        says = sentences["zero_elsewhere"]
    elif is_word:
        known["change"] = change or {name: (get_close_matches(word, kind.works, 1, 0.3) or kind.works)[0]}
        if name == "recompute" and (whole(value) or word.startswith("every")):
            known["change"] = {name: f"every={max(whole(value) or 2, 1)}"}
        known["one_of"] = f"{name} is one of {', '.join(map(repr, kind.works))}."
        says = sentences.get(name, sentences["word"])
    else:
        usual = "too_many" if (whole(value) or 0) > MOST else "degree"
        says = sentences.get(name, sentences[usual])
    return parts_of("Plan({name}={value!r}): " + says, known)


def _meant_field(name: str, word: str) -> tuple[Change, str]:
    """Return the field that another library's word means, and what to know of it; ({}, "") for an unknown word."""
    if name == "data_parallel" and word in (stages := meant_values("zero")):
        stage, known = stages[word]
        return {"data_parallel": "ddp", "zero": stage}, known
    ours, known = meant_values(name).get(word, (None, ""))
    return {} if ours is None else {name: ours}, known


def _read_recompute(value: Any) -> str | None:
    if not isinstance(value, str):
        return None
    if value in RECOMPUTE:
        return value
    return f"every={every(value)}" if value.startswith("every=") and every(value) else None


def _read_bucket(value: Any) -> float | None:
    number = real(value)
    return (whole(value) or number) if number is not None and number > 0 and isfinite(number) else None


KINDS: dict[str, Kind] = {
    **{name: _degree(4) for name in ("pp", "dp", "tp", "cp", "ep")},
    "microbatches": _degree(8),
    "virtual_stages": _degree(1),
    "dp_shard": _degree(4, optional=True),
    "recompute": Kind(_read_recompute, RECOMPUTE),
    "data_parallel": _choice("ddp", "dp"),
    "offload": _choice("none", "optimizer", "params"),
    "precision": _choice("full", "bf16", "fp16"),
    "unused": _choice("error", "allow"),
    "batchnorm": _choice("sync", "local"),
    "zero": Kind(lambda value: _between(value, 0, 3)),
    "prefetch": Kind(lambda value: _between(value, 0, inf)),
    "bucket_mb": Kind(_read_bucket),
    "cp_order": _choice(*ORDERS),
    "cp_method": _choice(*METHODS),
    "sequence_parallel": Kind(lambda value: value if isinstance(value, bool) else None),
    "tensor": Kind(lambda value: value if isinstance(value, TensorPlan) else None, optional=True),
}
"""By field; `schedule`, `cut` and `etp` depend on others."""


# ------------------------------------------------------------ what other libraries call it: elsewhere.toml


@lru_cache(1)
def _elsewhere() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("elsewhere.toml").read_text("utf-8"))


def keywords() -> dict[str, str]:
    """Return what another library's keyword is called here, in a sentence.

    >>> keywords()["tp_size"]
    'tp= is the number of tensor-parallel ranks, which share each layer.'
    """
    return {name: row["says"] for row in _elsewhere()["keyword"] for name in row["names"]}


def meant_values(field: str) -> dict[str, tuple[Any, str]]:
    """Return, for another library's value of a field in lower case, the closest of a Plan, and what to know of it.

    >>> meant_values("zero")["full_shard"]
    (3, "FSDP's full_shard is ZeRO-3. ")
    """
    rows = [row for row in _elsewhere()["value"] if row["field"] == field]
    return {name: (row["ours"], row["says"]) for row in rows for name in row["names"]}


def constructors() -> dict[str, str]:
    """Return the call that makes a Plan, by another library's name of its strategy."""
    return dict(_elsewhere()["constructor"])


def schedules() -> dict[str, str]:
    """Return a schedule's name here, by what papers and other frameworks call it.

    >>> schedules()["pipedream"]
    '1f1b'
    """
    return {name: ours for ours, names in _elsewhere()["schedule"].items() for name in names}
