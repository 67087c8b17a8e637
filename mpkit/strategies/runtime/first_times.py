"""What only a rank sees happen for the first time: a parameter gets a gradient, or none; a module changes its mode; a
mask in the loss hides something (`mpkit.strategies.models.step_facts`).

A model may take another branch from some step on. If no step that is compared with serial training has the same, the
rank notes the step in which it happened first, and the run's line names it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from torch import nn

from mpkit.common.disk import FULL, write_whole

__all__ = ["FIRST_TIMES", "FirstTimes", "first_unverified"]

FIRST_TIMES = "first-times"
"""The name of a rank's file with what no compared step has had: JSON, the step by what happens."""


class FirstTimes:
    """What happens in a rank's steps for the first time.

    Args:
        path: the rank's file.
        modules: the modules whose modes are watched, by name.
    """

    def __init__(self, path: Path, modules: dict[str, nn.Module]) -> None:
        self._path, self._modules = path, modules
        self._latest: tuple[object, ...] = ()
        self._compared: set[str] = set()
        self._open: dict[str, int] = {}

    def note(
        self,
        step: int,
        used: Iterable[str],
        trained: Iterable[str],
        others: Iterable[str] = (),
        *,
        compared: bool,
    ) -> None:
        """Note which parameters have a gradient in a step, of those that are trained, and in which modes modules are.

        Args:
            step: the step, counted from 0.
            used, trained: names of parameters.
            others: other facts of the step, in words.
            compared: whether the step is compared with serial training.
        """
        used, others = frozenset(used), frozenset(others)
        modes = tuple(module.training for module in self._modules.values())
        if (used, modes, others, compared) == self._latest:
            return
        self._latest = used, modes, others, compared
        facts = set(others)
        facts |= {f"{name} gets {'a' if name in used else 'no'} gradient" for name in trained}
        facts |= {
            f"{name or 'the model'} is in {'training' if mode else 'evaluation'} mode"
            for name, mode in zip(self._modules, modes, strict=True)
        }
        if compared:
            self._compared |= facts
            self._open = {fact: first for fact, first in self._open.items() if fact not in facts}
        else:
            self._open |= {fact: step for fact in facts - self._compared if fact not in self._open}
        if self._open or self._path.exists():
            try:
                write_whole(self._path, json.dumps(self._open).encode())
            except OSError as error:
                if error.errno not in FULL:
                    raise


def first_unverified(paths: Iterable[Path]) -> tuple[int, list[str]]:
    """Return the first step, from 0, with something that no compared step has had, and what; -1 if there is none.

    Args:
        paths: the ranks' files.
    """
    happened = [json.loads(path.read_bytes()) for path in paths if path.exists()]
    first = min((step for facts in happened for step in facts.values()), default=-1)
    return first, sorted({fact for facts in happened for fact, step in facts.items() if step == first})
