"""What somebody mistypes is answered by the call itself: what was asked, and what would work."""

from __future__ import annotations

import inspect
import re
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
