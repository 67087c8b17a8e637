"""What somebody mistypes is answered by the call itself: what was asked, and what would work."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mpkit as mk

WEIRD: list[Any] = [
    None, -1, 0, 10**30, 3.5, float("nan"), "x", "", [], (), {}, object(), np.int64(2), True, b"a",
    [1, 2], len,
]  # fmt: skip
BEFORE: list[tuple[Any, ...]] = [(), ("llama3-8b",), ("llama3-8b", mk.Plan(dp=2)), (4,)]
TAKES_ANYTHING = {"Cluster", "demo", "doctor", "watch", "run", "lab"}
"""Calls that start processes, servers or checks of the machine."""
CALLS = [
    name
    for name in mk.__all__
    if callable(getattr(mk, name)) and not inspect.ismodule(getattr(mk, name)) and name not in TAKES_ANYTHING
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
def test_a_call_answers_for_its_arguments(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for before in BEFORE:
        for weird in WEIRD:
            try:
                getattr(mk, name)(*before, weird)
            except (ValueError, mk.errors.MpkitError, OSError, ImportError) as error:
                assert str(error), (before, weird)
            except TypeError as error:  # Python's own: how many arguments there are, or what mpkit says
                assert re.search(rf"{name}|argument", str(error)), (before, weird, str(error))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: mk.Plan(cp=4, cp_method=()), r"Did you mean Plan\(cp=4\)"),
        (lambda: mk.Plan(cp=4, cp_method=(None, 2)), r"Did you mean Plan\(cp=4\)"),
        (lambda: mk.hardware("h100", nodes=2, nic=[1]), "nic=25"),  # type: ignore[call-overload]
        (lambda: mk.advise("gpt2", "h100", global_batch=8, sequence=64, by="cost", price="2"), "price=2.5"),  # type: ignore[arg-type]
        (
            lambda: mk.estimate("gpt2", mk.Plan(), "h100", global_batch=8, sequence=64, preset="x"),
            "mk.calibrate",
        ),  # type: ignore[arg-type]
    ],
)
def test_keywords_of_another_type_are_answered_with_what_works(make: Callable[[], object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()
