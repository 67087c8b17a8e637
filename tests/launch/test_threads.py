"""Trainings from two threads: what the whole process shares is afterwards as it was."""

from __future__ import annotations

import io
import logging
import random
import sys
import threading
import warnings

import numpy as np
import pytest
import torch

from mpkit.strategies.prepare.isolation import quiet
from tests.limits import EVENT


def shared() -> list[object]:
    """Return what belongs to the process."""
    drawn = torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()
    return [sys.stdout, list(warnings.filters), warnings.showwarning, logging.root.manager.disable, drawn]


def test_the_second_thread_waits_and_what_others_print_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thread a enters first and would leave last: each would restore what the other changed."""
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    inside, end, order = threading.Event(), threading.Event(), []

    def a() -> None:
        with quiet():
            print("not shown")
            torch.rand(3)
            inside.set()
            assert end.wait(EVENT)
            order.append("a")

    def b() -> None:
        with quiet():
            order.append("b")

    before = shared()
    first, second = threading.Thread(target=a), threading.Thread(target=b)
    first.start()
    assert inside.wait(EVENT)
    stream = sys.stdout
    print("shown")
    second.start()
    end.set()
    first.join(), second.join()
    assert order == ["a", "b"] and shared() == before and sys.stdout is out
    print("shown too", file=stream)  # somebody has kept it
    assert out.getvalue() == "shown\nshown too\n"
