"""Try a loss on data in which some targets do not count; where that matters, look for such data.

A list of batches is inspected here, batches that are loaded later by the ranks (`Guarded`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from mpkit.common.caught import report
from mpkit.plan.plan import Plan
from mpkit.strategies.loss.guard import Guarded, Masked
from mpkit.strategies.prepare.probe.compare import ROUNDING, are_apart, differ
from mpkit.strategies.prepare.probe.masks import MaskedData, variants
from mpkit.strategies.prepare.probe.parts import Parts
from mpkit.strategies.prepare.probe.trial import ProbeTrial
from mpkit.strategies.prepare.probe.words import for_masked, for_model_loss, for_untried

__all__ = ["try_masked"]

Made = tuple[Parts, list[Any]]
"""Parts of the samples, and the model's outputs for each."""


def try_masked(
    plan: Plan,
    trial: ProbeTrial,
    loss: Callable[[Any, Any], Tensor],
    batches: Any,
    at_once: Made,
    apart: Made,
) -> Guarded | None:
    """Try data in which some targets do not count; return a guarded loss if only the ranks can look for such data.

    Args:
        plan: the plan of the training.
        trial: the trial of model and loss.
        loss, batches: those of the training.
        at_once, apart: all samples in one part, and in the parts of the plan.

    Raises:
        ValueError: the loss of such data is wrong in parts, and the batches have such data.
    """
    # ---- try
    minding: list[Masked] = []
    passed: set[Masked] = set()
    failed: dict[Masked, Exception] = {}
    for variant in variants(loss, trial.data):
        if variant.masked in minding:
            continue
        try:
            differs = _differs(trial, variant, at_once, apart)
        except Exception as error:  # such data may be none, as a target of -1
            failed[variant.masked] = error
            continue
        passed.add(variant.masked)
        if differs:
            minding.append(variant.masked)
    # ---- look for such data
    say = for_model_loss if any(masked.side == 0 for masked in minding) else for_masked
    if not isinstance(batches, list):  # where the loss fails on later data, that ends the run
        message = say(plan, minding[0].number, "such came in this micro-batch") if minding else ""
        return Guarded(loss, minding, message) if minding else None
    for i, (inputs, targets) in enumerate(batches):
        for masked in minding:
            if masked.counts_unevenly(inputs, targets):
                raise ValueError(say(plan, masked.number, f"data[{i}] has such"))
        for masked, caught in failed.items():
            if masked not in passed and masked.counts_unevenly(inputs, targets):
                report(for_untried(plan, masked.number, i, caught))
    return None


def _differs(trial: ProbeTrial, variant: MaskedData, at_once: Made, apart: Made) -> bool:
    """Return whether loss or gradients of the changed data at once differ from those in parts."""
    tried = trial.with_data(variant.data)
    if variant.masked.side == 0:
        return differ(tried, lambda t: (t.run(at_once[0]), t.run(apart[0])))[2]
    # The model does not see the targets: its outputs are known.
    one, other = (tried.of_outputs(made, parts) for parts, made in (at_once, apart))
    return are_apart(one, other, 8 * ROUNDING)
