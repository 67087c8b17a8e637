"""Steps of an optimizer on stand-ins, taken as in plain PyTorch or divided as on ranks.

Values and gradients are fixed and smooth, in float64 where the optimizer accepts it. Gradients change size from step to
step and from parameter to parameter, so that thresholds on norms are crossed in both directions.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpkit.strategies.prepare.arguments.task import OptimizerTraits
from mpkit.strategies.update.optimizer import (
    OptimizerFunction,
    SeveralOptimizers,
    Take,
    UpdatedPart,
    kind_of,
    make_optimizer,
)
from mpkit.strategies.update.whole_model import WholeParameter, make_like

__all__ = ["SCALES", "Division", "OptimizerTrial", "plain"]


SCALES = (1.0, 0.01, 100.0, 1.0, 1e4, 1e-3, 1.0, 1.0, 30.0, 0.1, 1.0, 1e3)
"""Sizes of the gradients, step by step."""

ENOUGH = 2**17
"""Elements of the largest model that is tried in its own shapes; in larger models parameters get smaller shapes."""

LONGEST, SHORT = 160, 4
"""Limits of the smaller shapes' dimensions, for the first parameter of each shape and for the others. Optimizers that
treat large matrices differently (factored second moments from 128 on) do so at 160 too."""

Division = Mapping[str, Take | None]
"""What one optimizer receives, by name: a whole parameter (None), or a part of it."""


class OptimizerTrial:
    """Steps of a user's optimizer.

    Args:
        function: the user's optimizer function.
        whole: the trained parameters of the model.
        steps: the number of steps, at most as many as `SCALES` has.

    Attributes:
        whole: the parameters in the shapes that are tried.
        smaller: whether these shapes are smaller than the model's.
        examined: what the steps of an optimizer with all parameters change; set by a `run` without a division.
    """

    examined = OptimizerTraits()

    def __init__(
        self, function: OptimizerFunction, whole: Sequence[WholeParameter], steps: int = len(SCALES)
    ) -> None:
        self._function, self._scales = function, SCALES[:steps]
        self.smaller = sum(prod(w.shape) for w in whole) > ENOUGH
        self.whole = _smaller(whole) if self.smaller else list(whole)
        # The same in every run: torch.sin of the same numbers need not give the same bits twice.
        self._first = [_values(w, i) for i, w in enumerate(self.whole)]
        self._gradients: dict[tuple[int, int], Tensor] = {}  # by parameter and step

    def in_float64(self) -> OptimizerTrial:
        """Return this trial with parameters in float64, which shows the smallest differences."""
        wide = [w._replace(dtype=torch.float64) if w.dtype.is_floating_point else w for w in self.whole]
        trial = OptimizerTrial(self._function, wide, len(self._scales))
        trial.smaller = self.smaller
        return trial

    def run(self, division: Division | None = None, seed: int = 0) -> list[dict[str, Tensor]]:
        """Return the parameters after each step of an optimizer that holds all of them, or a division of them.

        Raises:
            Exception: whatever the optimizer raises.
        """
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        takes: Division = {w.name: None for w in self.whole} if division is None else division
        held = {
            w.name: UpdatedPart(
                make_like(w, _take_part(takes[w.name], self._first[i]).clone()), takes[w.name]
            )
            for i, w in enumerate(self.whole)
            if w.name in takes
        }
        optimizer = make_optimizer(self._function, self.whole, held)
        before = {} if optimizer is None else _other_state(optimizer)
        steps: list[dict[str, Tensor]] = []
        for step, scale in enumerate(self._scales):
            for i, w in enumerate(self.whole):
                if w.name in held:
                    if (i, step) not in self._gradients:
                        self._gradients[i, step] = _gradient(w, i, step) * scale
                    gradient = self._gradients[i, step]
                    held[w.name].parameter.grad = _take_part(held[w.name].take, gradient).clone()
            if optimizer is not None:
                optimizer.step()
            steps.append({name: each.parameter.detach().clone() for name, each in held.items()})
        if division is None and optimizer is not None:
            self.examined = _examine(optimizer, before)
        return steps

    def off_by(
        self, expected: list[dict[str, Tensor]], actual: list[dict[str, Tensor]], division: Division
    ) -> tuple[float, str]:
        """Return the largest error of a division's parameters relative to their update, and that parameter's name.

        A parameter that only one of the two updates has an error of 1.
        """
        worst, name = 0.0, ""
        before = {w.name: first for w, first in zip(self.whole, self._first, strict=True)}
        for wholes, parts in zip(expected, actual, strict=True):
            for key, part in parts.items():
                reach = float((wholes[key] - before[key]).nan_to_num().abs().max()) if part.numel() else 0.0
                off = _relative_error(_take_part(division[key], wholes[key]), part, reach)
                if off > worst:
                    worst, name = off, key
            before = wholes
        return worst, name


def _relative_error(expected: Tensor, actual: Tensor, reach: float) -> float:
    if not actual.numel() or torch.equal(expected, actual):
        return 0.0
    same = (expected == actual) | (expected.isnan() & actual.isnan())
    difference = (
        float((expected - actual)[~same].abs().nan_to_num(torch.inf).max()) if not same.all() else 0.0
    )
    return min(difference / reach, 1.0) if reach else float(difference > 0)


def _examine(made: torch.optim.Optimizer, before: Mapping[str, Any]) -> OptimizerTraits:
    after = _other_state(made)
    changed = [name for name in after if after[name] != before.get(name)]
    states = {str(key) for state in made.state.values() if isinstance(state, dict) for key in state}
    return OptimizerTraits(kind_of(made), tuple(sorted(states)), ", ".join(changed))


def _other_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what an optimizer has besides parameters and their states: options of groups, attributes."""
    if isinstance(optimizer, SeveralOptimizers):
        each = {f"{kind_of(one)}.{i}": _other_state(one) for i, one in enumerate(optimizer.optimizers)}
        return {f"{name} {key}": value for name, facts in each.items() for key, value in facts.items()}
    facts = {
        f"param_groups[{i}][{key!r}]": plain(value)
        for i, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if key not in ("params", "param_names")
    }
    for key, value in vars(optimizer).items():
        if isinstance(value, torch.optim.Optimizer) and value.state is not optimizer.state:
            facts[key] = len(value.state)
        elif key not in ("param_groups", "state", "defaults"):
            facts[key] = plain(value)
    return facts


def _take_part(take: Take | None, tensor: Tensor) -> Tensor:
    return tensor if take is None else take(tensor)


def _values(whole: WholeParameter, number: int) -> Tensor:
    return _wave(whole, 0.7 + 0.1 * number, 0.3)


def _gradient(whole: WholeParameter, number: int, step: int) -> Tensor:
    return _wave(whole, 1.3 + 0.07 * number + step, 10.0 ** (number % 3 - 1))


def _wave(whole: WholeParameter, phase: float, size: float) -> Tensor:
    """Return values of both signs, none of them near zero."""
    wave = torch.sin(torch.arange(prod(whole.shape), dtype=torch.float64) * 0.37 + phase)
    return ((wave + 0.1 * torch.sign(wave)) * size).to(whole.dtype).view(whole.shape)


def _smaller(whole: Sequence[WholeParameter]) -> list[WholeParameter]:
    seen: set[tuple[int, ...]] = set()
    shrunk = []
    for each in whole:
        longest = SHORT if each.shape in seen else LONGEST
        seen.add(each.shape)
        shrunk.append(each._replace(shape=tuple(min(n, longest) for n in each.shape)))
    return shrunk


def plain(value: Any) -> Any:
    """Convert a value into comparable data: numbers, strings, and tensors as lists.

    >>> import torch
    >>> plain({"lr": torch.tensor(0.5), "betas": (0.9, 0.99)})
    {'lr': 0.5, 'betas': [0.9, 0.99]}
    """
    if isinstance(value, Tensor):
        return (
            value.tolist()
            if value.numel() <= 64
            else (tuple(value.shape), value.to(torch.promote_types(value.dtype, torch.float64)).sum().item())
        )
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    return value if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__
