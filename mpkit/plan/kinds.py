"""What each field of a Plan takes by itself, the errors for wrong values, and constructors with the names of fields.

rules.toml has the sentences; elsewhere.toml has other libraries' names of fields, values, constructors and schedules.
"""

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

from mpkit.common.calls import answers
from mpkit.errors import UnknownName
from mpkit.plan.tensor_plan import TensorPlan

MOST = 1_000_000  # ranks along an axis, stages per rank, micro-batches
RECOMPUTE = ("none", "selective", "full")
ORDERS = CONTIGUOUS, ZIGZAG = ("contiguous", "zigzag")
METHODS = ("ring", "ulysses")

Change = dict[str, Any]
Parts = tuple[str | Change, ...]  # a sentence in which each change stands for the plan that it makes


class Kind(NamedTuple):
    """What a field takes."""

    read: Callable[[Any], Any]  # returns the value, as Python's own type; None if the field does not take it
    works: Any = None  # a value that the field takes, or a tuple of all its words
    optional: bool = False  # whether None is a value too


def whole(value: object) -> int | None:
    """Return a whole number of any type (numpy's too) as an int, else None. True and False do not count as numbers."""
    try:
        return None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def real(value: object) -> float | None:
    """Return a real number of any type (numpy's too) as a float, else None."""
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else None


def every(recompute: str) -> int:
    """Return k if every k-th block is recomputed: 1 for "full", k for "every=k", else 0.

    >>> every("full"), every("every=2"), every("selective"), every("every=0"), every("every=two")
    (1, 2, 0, 0, 0)
    """
    word, _, number = recompute.partition("=")
    return int(recompute == "full") or (int(number) if word == "every" and number.isdecimal() else 0)


def _degree(works: int, optional: bool = False) -> Kind:
    return Kind(lambda value: _between(value, 1, MOST), works, optional)


def _between(value: Any, least: int, most: float) -> int | None:
    number = whole(value)
    return number if number is not None and least <= number <= most else None


def _choice(*choices: str) -> Kind:
    return Kind(lambda value: value if isinstance(value, str) and value in choices else None, choices)


@lru_cache(3)
def tables(name: str = "rules") -> dict[str, Any]:
    """Return the tables of a TOML file of this room."""
    return tomllib.loads((Path(__file__).parent / f"{name}.toml").read_text("utf-8"))


def parts_of(says: str, known: Mapping[str, Any]) -> Parts:
    """Return a sentence's text, its braces filled with what is known, and its changes.

    >>> parts_of("{p} and <zero=p + 1>", {"p": 2})
    ('2 and ', {'zero': 3})
    """
    parts = (
        eval(f"dict({part})", {**known}) if number % 2 else part.format_map(known)
        for number, part in enumerate(re.split("<(.*?)>", says))
    )
    return tuple(part for part in parts if part)


def rejection_of(name: str, value: Any) -> Parts:
    """Return why a field does not take a value: a sentence of rules.toml, with the nearest plan that works."""
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
    """Return the field that another library's word means, and what to know about it; ({}, "") for an unknown word."""
    if name == "data_parallel" and word in (stages := meant_values("zero")):
        stage, known = stages[word]
        return {"data_parallel": "ddp", "zero": stage}, known
    ours, known = meant_values(name).get(word, (None, ""))
    return {} if ours is None else {name: ours}, known


def _read_recompute(value: Any) -> str | None:
    if not isinstance(value, str):
        return None
    return value if value in RECOMPUTE else f"every={every(value)}" if every(value) else None


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


def keywords() -> dict[str, str]:
    """Return, for another library's keyword such as tp_size, a sentence with mpkit's name of it."""
    return {name: row["says"] for row in tables("elsewhere")["keyword"] for name in row["names"]}


def meant_values(field: str) -> dict[str, tuple[Any, str]]:
    """Return, for another library's value in lower case (full_shard), a Plan's closest and what to know about it."""
    rows = [row for row in tables("elsewhere")["value"] if row["field"] == field]
    return {name: (row["ours"], row["says"]) for row in rows for name in row["names"]}


def constructors() -> dict[str, str]:
    """Return the calls that make a Plan, by another library's name of its strategy."""
    return dict(tables("elsewhere")["constructor"])


def schedules() -> dict[str, str]:
    """Return the names of schedules, by those in papers and other frameworks, such as "pipedream" for "1f1b"."""
    return {name: ours for ours, names in tables("elsewhere")["schedule"].items() for name in names}


@answers("Plan.dp(replicas=4)", keywords)
def dp(cls: type[Any], replicas: int, **options: Any) -> Any:
    """Plan data parallelism on n ranks as torch.nn.DataParallel does it: rank 0 owns the model and steps.

    >>> from mpkit.plan.plan import Plan
    >>> Plan.dp(2)
    Plan(dp=2, data_parallel='dp')
    """
    return cls(dp=replicas, data_parallel="dp", **options)


@answers("Plan.zero(stage=3, replicas=4)", keywords)
def zero(cls: type[Any], stage: int, replicas: int | None = None, **options: Any) -> Any:
    """Plan ZeRO (Rajbhandari et al. 2020): it shards among n replicas what each of them would hold.

    Stage 1 shards optimizer states, 2 gradients too, 3 parameters too.

    >>> from mpkit.plan.plan import Plan
    >>> Plan.zero(3, 4, precision="bf16")
    Plan(dp=4, zero=3, precision='bf16')
    """
    if replicas is None:
        raise ValueError(
            f"Plan.zero({stage}): among how many ranks? The stage comes first, then the number of replicas: "
            f"Plan.zero({whole(stage) if whole(stage) in (1, 2, 3) else 3}, 4)"
        )
    if whole(stage) not in (1, 2, 3):
        raise ValueError(
            f"Plan.zero(stage={stage!r}, replicas={replicas}): the stages of ZeRO are 1 (optimizer states sharded), 2 "
            f"(and gradients) and 3 (and parameters); without sharding it is Plan.ddp({replicas}). Such as "
            f"Plan.zero(stage=1, replicas={replicas})"
        )
    return cls(dp=replicas, zero=stage, **options)


@answers("Plan.tp(ranks=2)", keywords)
def tp(cls: type[Any], ranks: int, **options: Any) -> Any:
    """Plan tensor parallelism (Shoeybi et al., "Megatron-LM", 2019): every layer is divided among t ranks.

    >>> from mpkit.plan.plan import Plan
    >>> Plan.tp(2, sequence_parallel=True)
    Plan(tp=2, sequence_parallel=True)
    """
    return cls(tp=ranks, **options)


NAMED_AS_FIELDS: dict[str, Callable[..., Any]] = {"dp": dp, "tp": tp, "zero": zero}


class NamedConstructors(type):
    """The type of Plan: its error for a constructor that Plan does not have names the one that was meant.

    >>> from mpkit.plan.plan import Plan
    >>> Plan.fsdp(8)
    Traceback (most recent call last):
    mpkit.errors.UnknownName: Plan has no constructor fsdp; it is Plan.zero(3, 8) here
    """

    def __getattr__(cls, name: str) -> Any:
        near = [] if name.startswith("_") else get_close_matches(name.lower(), dir(cls), 1, 0.6)
        hint = f"; did you mean Plan.{near[0]}?" if near else ""
        if name in constructors():
            hint = f"; it is {constructors()[name]} here"
        raise UnknownName(f"Plan has no constructor {name}{hint}")
