"""Preset: the constants of a software stack on a device, with what they were fitted on and how far off they are.

`presets.csv` is written by `python -m benchmarks.published FOLDER --write`, from the rows in FOLDER.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.resources import files
from math import exp, log
from statistics import geometric_mean

from mpkit.prediction.cost_model.stack import Constants, stacks

__all__ = [
    "EAGER",
    "FEW",
    "UNFITTED",
    "Preset",
    "preset_for",
    "presets",
    "prior_of",
]

EAGER = 2.0
"""How much more eager operators move than well fused ones."""

UNFITTED = 0.25
"""The band of a prediction where nothing was fitted: nine of ten steps of a stack are within it where only the other
stacks are known (`python -m benchmarks.published`, the line of stacks that are left out)."""


FEW = 8
"""A preset of fewer rows does not know its band by itself: a 90 % quantile needs more errors than those of 5 rows."""


@dataclass(frozen=True)
class Preset:
    """Constants with their origin.

    Attributes:
        device, stack: what they are for.
        constants: the constants.
        fitted: the names of those that were fitted; the others are priors.
        rows: the number of measured steps that they were fitted on.
        error: the mean relative error of steps that were left out of the fit.
        band: the relative error that nine of ten predictions should keep within.
        sources: where the measured steps are from.
    """

    device: str
    stack: str
    constants: Constants
    fitted: tuple[str, ...]
    rows: int
    error: float
    band: float
    sources: str = ""

    def __str__(self) -> str:
        values = ", ".join(f"{name} {getattr(self.constants, name):.3g}" for name in self.fitted)
        if not self.rows:
            whose = f"the constants are those of {self.sources or 'other stacks, in the mean'}"
            return f"{self.stack} on {self.device}: nothing was fitted, {whose}; band {self.band:.0%}"
        return (
            f"{self.stack} on {self.device}: {values}; fitted to {self.rows} measured steps, "
            f"{self.error:.1%} off where one is left out; band {self.band:.0%}"
        )


@cache
def presets() -> dict[tuple[str, str], Preset]:
    """Return all presets by device and stack."""
    found = {}
    with files("mpkit.prediction.cost_model").joinpath("presets.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            names = ("matmul", "attention", "traffic", "fixed", "straggle")
            constants = Constants(**{name: float(row[name]) for name in names})
            found[row["device"], row["stack"]] = Preset(
                row["device"], row["stack"], constants, tuple(row["fitted"].split()), int(row["rows"]),
                float(row["error"]), float(row["band"]), row["sources"],
            )  # fmt: skip
    return found


@cache
def preset_for(device: str, stack: str) -> Preset:
    """Return the preset of a stack on a device; where nothing was fitted, the prior, with `rows` 0 and a wide band.

    >>> preset_for("H100 SXM", "llm-foundry").band < UNFITTED == preset_for("L40S", "pytorch").band
    True
    """
    fitted = presets()
    if (device, stack) in fitted:
        return fitted[device, stack]
    return Preset(device, stack, prior_of(stack, fitted.values()), (), 0, UNFITTED, UNFITTED)


def prior_of(stack: str, known: Iterable[Preset]) -> Constants:
    """Return what is expected of a stack of which nothing is known but whether its operators are fused.

    That is the geometric mean of the known stacks, whatever the device, each stack with the same weight; eager ones
    count as if they moved `EAGER` times less.

    >>> round(prior_of("pytorch", presets().values()).matmul, 2)
    0.65
    """
    by_stack: dict[str, list[Preset]] = defaultdict(list)
    for preset in known:
        by_stack[preset.stack].append(preset)
    means = [_mean(group) for group in by_stack.values()]
    fused = [
        replace(mean, traffic=mean.traffic / EAGER) if _is_eager(name) else mean
        for name, mean in zip(by_stack, means, strict=True)
    ]
    names = [field.name for field in fields(Constants)]
    prior = Constants(**{name: geometric_mean(getattr(each, name) for each in fused) for name in names})
    return replace(prior, traffic=EAGER * prior.traffic) if _is_eager(stack) else prior


def _is_eager(stack: str) -> bool:
    return stack in stacks() and stacks()[stack].eager


def _mean(presets: Sequence[Preset]) -> Constants:
    """Return the geometric mean of constants, weighted by the rows that they were fitted on."""
    total = sum(preset.rows for preset in presets)
    names = [field.name for field in fields(Constants)]
    return Constants(
        **{
            name: exp(sum(preset.rows * log(getattr(preset.constants, name)) for preset in presets) / total)
            for name in names
        }
    )
