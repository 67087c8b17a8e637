"""What each field of a Plan takes by itself, and what a wrong value is answered with."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from math import isfinite
from numbers import Real
from typing import Any, NamedTuple

from mpkit.plan import synonyms
from mpkit.plan.tensor_plan import TensorPlan

__all__ = [
    "CONTIGUOUS",
    "KINDS",
    "METHODS",
    "MOST",
    "ORDERS",
    "ZIGZAG",
    "Change",
    "Parts",
    "every",
    "real",
    "whole",
]

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
        says: of the field's name and a wrong value: what it takes, and a change that works.
        optional: whether None is a value too.
    """

    read: Callable[[Any], Any]
    says: Callable[[str, Any], Parts]
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
    def says(name: str, value: Any) -> Parts:
        if (whole(value) or 0) > MOST:
            return (
                f"that is more than any machine has. {name} is at most {MOST:,}, such as in ",
                {name: works},
            )
        return (f"{name} is a whole number, 1 or more, such as in ", {name: works})

    return Kind(lambda value: _between(value, 1, MOST), says, optional)


def _between(value: Any, least: int, most: float) -> int | None:
    number = whole(value)
    return number if number is not None and least <= number <= most else None


def _choice(*choices: str, words: str = "") -> Kind:
    """Take one of some words; a wrong one is answered with the nearest, or with what another library's word means."""

    def says(name: str, value: Any) -> Parts:
        word = str(value).lower()
        change, known = _meant_field(name, word)
        change = change or {name: (get_close_matches(word, choices, 1, 0.3) or [choices[0]])[0]}
        one_of = words or f"{name} is one of {', '.join(map(repr, choices))}."
        return (f"{one_of} {known}Did you mean ", change)

    return Kind(lambda value: value if isinstance(value, str) and value in choices else None, says)


def _meant_field(name: str, word: str) -> tuple[Change, str]:
    """Return the field that another library's word means, and what to know of it; ({}, "") for an unknown word."""
    if name == "data_parallel" and word in (stages := synonyms.values("zero")):
        stage, known = stages[word]
        return {"data_parallel": "ddp", "zero": stage}, known
    ours, known = synonyms.values(name).get(word, (None, ""))
    return {} if ours is None else {name: ours}, known


def _read_recompute(value: Any) -> str | None:
    if not isinstance(value, str):
        return None
    if value in RECOMPUTE:
        return value
    return f"every={every(value)}" if value.startswith("every=") and every(value) else None


def _says_recompute(name: str, value: Any) -> Parts:
    near = (get_close_matches(str(value), RECOMPUTE, 1, 0.3) or ["full"])[0]
    if whole(value) or str(value).lower().startswith("every"):
        near = f"every={max(whole(value) or 2, 1)}"
    return (
        f"recompute is one of {', '.join(map(repr, RECOMPUTE))}, or 'every=k': every k-th block, such as 'every=2'. "
        "Did you mean ", {name: near},
    )  # fmt: skip


def _says_zero(name: str, value: Any) -> Parts:
    change, known = _meant_field(name, str(value).lower())
    if change:
        return (f"zero is the stage of ZeRO, 0 to 3. {known}Such as ", change)
    return (
        "ZeRO has the stages 1 (optimizer states sharded), 2 (and gradients) and 3 (and parameters); 0 is plain DDP. "
        "Such as ", {name: 1},
    )  # fmt: skip


def _read_bucket(value: Any) -> float | None:
    number = real(value)
    return (whole(value) or number) if number is not None and number > 0 and isfinite(number) else None


def _says_tensor(name: str, value: Any) -> Parts:
    what = "a dict" if isinstance(value, Mapping) else "that"
    return (
        f"which layers are divided is an mk.tensor.TensorPlan, not {what}, such as mk.tensor.find_tensor_plan(model) "
        "gives; left out, that is what is taken: ", {name: None},
    )  # fmt: skip


KINDS: dict[str, Kind] = {
    **{name: _degree(4) for name in ("pp", "dp", "tp", "cp", "ep")},
    "microbatches": _degree(8),
    "virtual_stages": _degree(1),
    "dp_shard": _degree(4, optional=True),
    "recompute": Kind(_read_recompute, _says_recompute),
    "data_parallel": _choice("ddp", "dp"),
    "offload": _choice("none", "optimizer", "params"),
    "precision": _choice("full", "bf16", "fp16"),
    "unused": _choice("error", "allow"),
    "batchnorm": _choice("sync", "local"),
    "zero": Kind(lambda value: _between(value, 0, 3), _says_zero),
    "prefetch": Kind(
        lambda value: _between(value, 0, float("inf")),
        lambda name, value: ("how many layers ahead ZeRO-3 gathers, a whole number, 0 or more: ", {name: 1}),
    ),
    "bucket_mb": Kind(
        _read_bucket,
        lambda name, value: (
            "the size of a bucket of gradients in MiB, a number above 0, such as ", {name: 10}
        ),
    ),
    "cp_order": _choice(
        *ORDERS,
        words="a rank's part of a sequence is 'contiguous', or in two pieces, 'zigzag', so that causal attention is as "
        "much work for each.",
    ),
    "cp_method": _choice(
        *METHODS,
        words="attention over a divided sequence passes keys and values around, 'ring', or divides the heads "
        "meanwhile, 'ulysses'.",
    ),
    "sequence_parallel": Kind(
        lambda value: value if isinstance(value, bool) else None,
        lambda name, value: ("True, or False: ", {name: True}),
    ),
    "tensor": Kind(lambda value: value if isinstance(value, TensorPlan) else None, _says_tensor, optional=True),
}  # fmt: skip
"""By field; `schedule`, `cut` and `etp` depend on others."""
