"""Preset: the constants of a software stack on a device, with what they were fitted on and how far off they are.

`python -m benchmarks.published FOLDER --write` fits `presets.csv` to the measured steps in FOLDER: the constants that
bring predictions closest to them, in the logarithm. Each is held near its prior, so that few steps suffice (ridge
regression; Gauss-Newton). Predicting each step from a fit without it gives the error of a new step, and the band.
At most four constants are fitted: products, attention, traffic, and launches on one node or stragglers on several.
"""

import csv
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from math import log
from typing import Any

import numpy as np

from mpkit.common.tracebacks import public
from mpkit.devices.hardware import Hardware
from mpkit.prediction.cost_model.architecture import Architecture
from mpkit.prediction.cost_model.layout import Layout
from mpkit.prediction.cost_model.stack import PRIOR, Constants, Stack, stacks
from mpkit.prediction.cost_model.step import StepModel

EAGER = 2.0  # how much more eager operators move than well fused ones
UNFITTED = 0.25
"""The band of a prediction where nothing was fitted: nine of ten steps of a stack are within it where only the other
stacks are known (`python -m benchmarks.published`, the line of stacks that are left out)."""
FEW = 8
"""A preset of fewer rows does not know its band by itself: a 90 % quantile needs more errors than those of 5 rows."""
NEAR = 0.05  # how far measurements are trusted: 5 %
WIDTH = {"matmul": 0.25, "attention": 0.5, "traffic": 0.7, "fixed": 1.0, "straggle": 1.5}
"""How far each constant may lie from its prior, in the logarithm."""
NAMES = tuple(field.name for field in fields(Constants))


def _logs(constants: Constants) -> np.ndarray:
    return np.log([getattr(constants, name) for name in NAMES])


def _of_logs(logs: np.ndarray) -> Constants:
    return Constants(*np.exp(logs).tolist())


@dataclass(frozen=True)
class Preset:
    """Constants with their origin: the device and stack that they are for, and the steps that they were fitted to."""

    device: str
    stack: str
    constants: Constants
    fitted: tuple[str, ...]  # the names of the constants that were fitted; the others are priors
    rows: int  # the number of measured steps
    error: float  # the mean relative error of steps that were left out of the fit
    band: float  # the relative error that nine of ten predictions should keep within
    sources: str = ""  # where the measured steps are from

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
            found[row["device"], row["stack"]] = Preset(
                row["device"], row["stack"], Constants(*(float(row[name]) for name in NAMES)),
                tuple(row["fitted"].split()), int(row["rows"]), float(row["error"]), float(row["band"]), row["sources"],
            )  # fmt: skip
    return found


@cache
def preset_for(device: str, stack: str) -> Preset:
    """Return the preset of a stack on a device; if nothing was fitted, the prior, with `rows` 0 and a wide band."""
    fitted = presets()
    if (device, stack) in fitted:
        return fitted[device, stack]
    return Preset(device, stack, prior_of(stack, fitted.values()), (), 0, UNFITTED, UNFITTED)


def prior_of(stack: str, known: Iterable[Preset]) -> Constants:
    """Return the constants expected of a stack of which nothing is known but whether its operators are fused.

    They are the geometric mean of the known stacks on any device. Each stack has the same weight, its devices weigh by
    their fitted rows, and eager stacks count as if they moved `EAGER` times less.
    """

    def eager(name: str) -> np.ndarray:
        more = EAGER if name in stacks() and stacks()[name].eager else 1.0
        return np.array([log(more) if each == "traffic" else 0.0 for each in NAMES])

    by_stack: dict[str, list[Preset]] = defaultdict(list)
    for preset in known:
        by_stack[preset.stack].append(preset)
    means = [
        np.average([_logs(each.constants) for each in some], axis=0, weights=[each.rows for each in some]) - eager(name)
        for name, some in by_stack.items()
    ]  # fmt: skip
    return _of_logs(np.mean(means, axis=0) + eager(stack))


# ---- the fit


@dataclass(frozen=True)
class Observation:
    """A measured step."""

    name: str  # what a report calls it
    model: Architecture
    layout: Layout
    sequence: int
    hardware: Hardware
    stack: Stack
    seconds: float
    memory: float = 0.0  # bytes that the fullest rank had allocated at its peak; 0: unknown
    source: str = ""  # where it is from

    def predict_seconds(self, constants: Constants) -> float:
        """Return the seconds that these constants predict."""
        priced = StepModel(self.model, self.sequence, self.hardware, self.stack, constants)
        return priced.step(self.layout).seconds


def _fitted_names(rows: Sequence[Observation]) -> tuple[str, ...]:
    """Return the names of the constants that these rows tell apart."""
    several = any(row.layout.ranks > row.hardware.per_node for row in rows)
    return ("matmul", "attention", "traffic", "straggle" if several else "fixed")


def _fit(rows: Sequence[Observation], prior: Constants, names: Sequence[str]) -> Constants:
    """Return the constants in which these names fit measured steps best and the others are the prior's."""
    widths = np.array([WIDTH[name] for name in names])
    moved = np.array([[each == name for each in NAMES] for name in names])

    def residuals(x: np.ndarray) -> np.ndarray:
        now = _of_logs(_logs(prior) + x @ moved)
        errors = [log(row.predict_seconds(now) / row.seconds) / NEAR for row in rows]
        return np.array([*errors, *(x / widths)])

    x = np.zeros(len(names))
    for _ in range(15):
        r = residuals(x)
        jacobian = np.stack([(residuals(x + 1e-4 * unit) - r) / 1e-4 for unit in np.eye(len(names))], axis=1)
        weights = np.ones(len(r))
        # Outliers beyond two times NEAR count linearly (Huber 1964).
        weights[: len(rows)] = np.minimum(1.0, 2 / np.maximum(np.abs(r[: len(rows)]), 1e-9)) ** 0.5
        change, *_ = np.linalg.lstsq(jacobian * weights[:, None], -r * weights, rcond=None)
        longest = float(np.abs(change).max())
        x = x + change * min(1.0, 0.5 / max(longest, 1e-12))
        if longest < 1e-4:
            break
    return _of_logs(_logs(prior) + x @ moved)


def left_out(rows: Sequence[Observation], prior: Constants) -> list[float]:
    """Return each row's relative error with the constants fitted to the others."""
    names, errors = _fitted_names(rows), []
    for i, row in enumerate(rows):
        others = [*rows[:i], *rows[i + 1 :]]
        constants = _fit(others, prior, names) if others else prior
        errors.append(row.predict_seconds(constants) / row.seconds - 1)
    return errors


def preset_of(rows: Iterable[Observation], prior: Constants = PRIOR, name: str = "") -> Preset:
    """Return the preset of measured steps of one stack on one device."""
    steps = list(rows)
    if not steps:
        raise ValueError("there are no measured steps: calibrate([(mk.estimate(...), seconds), ...])")
    software = {row.stack.name for row in steps}
    devices = {row.hardware.device.name for row in steps}
    if len(software) > 1 or len(devices) > 1:
        raise ValueError(
            f"these steps are of {', '.join(sorted(software))} on {', '.join(sorted(devices))}: a preset is of one "
            "stack on one device, so calibrate each of them"
        )
    names = _fitted_names(steps)
    errors = [abs(error) for error in left_out(steps, prior)]
    sources = "; ".join(dict.fromkeys(row.source for row in steps if row.source))
    return Preset(
        devices.pop(), name or software.pop(), _fit(steps, prior, names), names, len(steps),
        sum(errors) / len(errors), _band_of(errors), sources,
    )  # fmt: skip


def _band_of(errors: Sequence[float]) -> float:
    """Return the band for nine of ten new steps: with more and more steps left out, the 90 % quantile of errors."""
    n = len(errors)
    if n < 4:  # as for no steps
        return max(UNFITTED, 1.5 * max(errors))
    quantile = float(np.quantile(np.array(errors), min(1.0, 0.9 * (1 + 1 / n))))
    return max(0.05, quantile * (1 + 1.5 / n))


@public
def calibrate(steps: Iterable[tuple[Any, float]], *, name: str = "") -> Preset:
    """Return a preset from measured steps of one's own, for `mk.estimate(..., preset=)`.

    Args:
        steps: for each, the pair of its estimate and its seconds, (mk.estimate(...), 0.41). Four or more that differ in
            sizes give a band of their own.
        name: what the stack is called; "": as in the estimates.

    Raises:
        ValueError: there are none, one took no time, they are of several stacks or devices, or they are faster than
            the device can be.

    >>> import mpkit as mk
    >>> plan = mk.Plan(dp=8, zero=3)
    >>> guess = mk.estimate("llama3-8b", plan, "8x-h100-nvlink", global_batch=16, sequence=4096)
    >>> preset = calibrate([(guess, 1.2 * guess.step_time)])
    >>> again = mk.estimate("llama3-8b", plan, "8x-h100-nvlink", global_batch=16, sequence=4096, preset=preset)
    >>> guess.step_time < again.step_time < 1.25 * guess.step_time
    True
    """
    if not isinstance(steps, Iterable):
        raise ValueError(f"calibrate({steps!r}): pairs in a list, such as [(mk.estimate(...), 0.41)]")
    rows = [_observation_of(step) for step in steps]
    prior = prior_of(rows[0].stack.name, presets().values()) if rows else PRIOR
    found = preset_of(rows, prior, name)
    stack = rows[0].stack
    for share, what in ((found.constants.matmul, "products"), (found.constants.attention, "attention")):
        if share > 1:
            bits = 8 if stack.fp8 else 8 * stack.element
            raise ValueError(
                f"these steps are faster than {found.device} can be: they ask for {share:.0%} of its peak in {what} "
                f"of {bits} bits. Check that the seconds are those of whole steps, that the estimates name the machine "
                f"that ran and the samples of a step, and that the program computed in {bits} bits, as "
                f"stack={stack.name!r} does"
            )
    return found


def _observation_of(step: Any) -> Observation:
    try:
        guess, seconds = step
        row: Observation = guess.measured(float(seconds))
    except (TypeError, ValueError, AttributeError):
        raise ValueError(
            f"calibrate([..., {step!r}, ...]): each is a pair of an estimate and measured seconds, such as "
            "(mk.estimate('llama3-8b', plan, '8x-h100-nvlink', global_batch=16, sequence=4096), 0.41)"
        ) from None
    if not row.seconds > 0:
        raise ValueError(f"{row.name} took {row.seconds} seconds: give the seconds of a step, such as 0.41")
    return row
