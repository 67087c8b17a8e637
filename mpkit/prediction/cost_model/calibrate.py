"""Calibration: from measured steps to the constants of a stack on a device.

    observe      a measured step: what was asked for, and how long it took
    fit          the constants that bring predictions closest to the measurements, in the logarithm; each constant is
                 held near its prior, so that few steps suffice (ridge regression; Gauss-Newton)
    leave one    fit without each step in turn and predict it: the error that a new step will have, and the band

At most four constants are fitted: products, attention, traffic, and launches on one node or stragglers on several.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from typing import Any

import numpy as np

from mpkit.common.tracebacks import public
from mpkit.devices.hardware import Hardware
from mpkit.prediction.cost_model.architecture import Architecture
from mpkit.prediction.cost_model.layout import Layout
from mpkit.prediction.cost_model.preset import UNFITTED, Preset, presets, prior_of
from mpkit.prediction.cost_model.stack import PRIOR, Constants, Stack
from mpkit.prediction.cost_model.step import StepModel

__all__ = ["Observation", "calibrate", "fit", "left_out", "preset_of"]

NEAR = 0.05
"""How far measurements are trusted: 5 %."""
WIDTH = {"matmul": 0.25, "attention": 0.5, "traffic": 0.7, "fixed": 1.0, "straggle": 1.5}
"""How far each constant may lie from its prior, in the logarithm."""


@dataclass(frozen=True)
class Observation:
    """A measured step.

    Attributes:
        name: what it is called in a report.
        model, layout, sequence, hardware, stack: what ran, where.
        seconds: what a step took.
        memory: bytes that the rank with most had allocated at its peak; 0 if unknown.
        source: where it is from.
    """

    name: str
    model: Architecture
    layout: Layout
    sequence: int
    hardware: Hardware
    stack: Stack
    seconds: float
    memory: float = 0.0
    source: str = ""

    def predict_seconds(self, constants: Constants) -> float:
        """Return the seconds that these constants predict."""
        priced = StepModel(self.model, self.sequence, self.hardware, self.stack, constants)
        return priced.step(self.layout).seconds


def fitted_names(rows: Sequence[Observation]) -> tuple[str, ...]:
    """Return the names of the constants that these rows can tell apart."""
    several = any(row.layout.ranks > row.hardware.per_node for row in rows)
    return ("matmul", "attention", "traffic", "straggle" if several else "fixed")


def fit(rows: Sequence[Observation], prior: Constants = PRIOR, names: Sequence[str] = ()) -> Constants:
    """Return the constants that fit measured steps best.

    Args:
        rows: the measured steps.
        prior: what the constants are without them.
        names: the constants to fit; (): as many as the rows can tell apart.
    """
    names = tuple(names) or fitted_names(rows)
    widths = np.array([WIDTH[name] for name in names])

    def constants(x: np.ndarray) -> Constants:
        return replace(
            prior, **{name: getattr(prior, name) * exp(v) for name, v in zip(names, x, strict=True)}
        )

    def residuals(x: np.ndarray) -> np.ndarray:
        now = constants(x)
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
    return constants(x)


def left_out(rows: Sequence[Observation], prior: Constants, names: Sequence[str] = ()) -> list[float]:
    """Return each row's relative error where the others alone were fitted."""
    names = tuple(names) or fitted_names(rows)
    errors = []
    for i, row in enumerate(rows):
        others = [*rows[:i], *rows[i + 1 :]]
        constants = fit(others, prior, names) if others else prior
        errors.append(row.predict_seconds(constants) / row.seconds - 1)
    return errors


def preset_of(rows: Iterable[Observation], prior: Constants = PRIOR, name: str = "") -> Preset:
    """Return the preset of measured steps of one stack on one device.

    Raises:
        ValueError: there are none, or they are of several stacks or devices.
    """
    steps = list(rows)
    if not steps:
        raise ValueError("there are no measured steps: calibrate([(mk.estimate(...), seconds), ...])")
    stacks = {row.stack.name for row in steps}
    devices = {row.hardware.device.name for row in steps}
    if len(stacks) > 1 or len(devices) > 1:
        raise ValueError(
            f"these steps are of {', '.join(sorted(stacks))} on {', '.join(sorted(devices))}: a preset is of one stack "
            "on one device, so calibrate each of them"
        )
    names = fitted_names(steps)
    errors = left_out(steps, prior, names)
    sizes = sorted(abs(error) for error in errors)
    sources = "; ".join(dict.fromkeys(row.source for row in steps if row.source))
    return Preset(
        devices.pop(), name or stacks.pop(), fit(steps, prior, names), names, len(steps),
        sum(sizes) / len(sizes), band_of(sizes), sources,
    )  # fmt: skip


@public
def calibrate(
    steps: Iterable[Observation | tuple[Any, float]],
    *,
    prior: Constants | None = None,
    name: str = "",
) -> Preset:
    """Return a preset from measured steps of one's own, for `mk.estimate(..., preset=)`.

    Args:
        steps: for each, the pair of its estimate and its seconds, (mk.estimate(...), 0.41), or what
            `estimate.measured(seconds)` returns. Four or more that differ in sizes give a band of their own.
        prior: the constants to which few steps are held; None: those expected of a stack that is not known.
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
    rows = []
    for step in steps:
        row = step if isinstance(step, Observation) else _observation_of(step)
        if not row.seconds > 0:
            raise ValueError(
                f"{row.name} took {row.seconds} seconds: give the seconds of a step, such as 0.41"
            )
        rows.append(row)
    if not rows:
        return preset_of(rows)  # which says what to give
    stack = rows[0].stack
    found = preset_of(rows, prior or prior_of(stack.name, presets().values()), name)
    _check_shares(found, stack)
    return found


def _check_shares(found: Preset, stack: Stack) -> None:
    """Check that no share of a peak is above 1.

    Raises:
        ValueError: one is.
    """
    for share, what in ((found.constants.matmul, "products"), (found.constants.attention, "attention")):
        if share > 1:
            bits = 8 if stack.fp8 else 8 * stack.element
            raise ValueError(
                f"these steps are faster than {found.device} can be: they ask for {share:.0%} of its peak in {what} "
                f"of {bits} bits. Check that the seconds are those of whole steps, that the estimates name the machine "
                f"that ran and the samples of a step, and that the program computed in {bits} bits, as "
                f"stack={stack.name!r} does"
            )


def _observation_of(step: Any) -> Observation:
    """Return the observation of a pair of an estimate and its seconds.

    Raises:
        ValueError: it is none.
    """
    try:
        guess, seconds = step
        row: Observation = guess.measured(float(seconds))
    except (TypeError, ValueError, AttributeError):
        raise ValueError(
            f"calibrate([..., {step!r}, ...]): each is a pair of an estimate and measured seconds, such as "
            "(mk.estimate('llama3-8b', plan, '8x-h100-nvlink', global_batch=16, sequence=4096), 0.41)"
        ) from None
    return row


def band_of(errors: Sequence[float]) -> float:
    """Return the band that should cover nine of ten new steps, from the sizes of the errors of steps left out.

    The more steps there are, the closer it is to their 90 % quantile; with less than four it is that of no steps.

    >>> round(band_of([0.01 * i for i in range(20)]), 3)
    0.193
    """
    n = len(errors)
    if n < 4:
        return max(UNFITTED, 1.5 * max(errors))
    quantile = float(np.quantile(np.array(errors), min(1.0, 0.9 * (1 + 1 / n))))
    return max(0.05, quantile * (1 + 1.5 / n))
