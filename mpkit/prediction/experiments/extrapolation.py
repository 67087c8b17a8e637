"""Extrapolation: what training would take on more ranks than were measured.

    read        the model's architecture, the samples of a batch and the tokens of a sample
    check       every plan is one that `mk.estimate` can price; before any rank starts
    calibrate   the constants that fit the steps that were measured (`mk.calibrate`)
    predict     the other plans with these constants, and the band

A fit to few steps says little about the next one: with fewer than four the band is at least the one that is assumed
where nothing was fitted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mpkit.devices.catalogue import hardware as find
from mpkit.devices.hardware import Hardware
from mpkit.plan.plan import Plan
from mpkit.prediction.cost_model.architecture import Architecture
from mpkit.prediction.cost_model.calibrate import calibrate
from mpkit.prediction.cost_model.estimate import Estimate, estimate
from mpkit.prediction.cost_model.known_models import NoArchitecture, architecture_of
from mpkit.prediction.cost_model.preset import UNFITTED, Preset, preset_as_played
from mpkit.strategies.prepare.arguments.batches import take_batches

if TYPE_CHECKING:
    import torch

__all__ = ["LargerMachine", "larger_machine"]

ENOUGH = 4
"""Measured steps that give a band of their own."""


@dataclass(frozen=True)
class LargerMachine:
    """Predictions for a model, a batch and a machine.

    Attributes:
        model, sequence, hardware: the model's sizes, tokens per sample, and the machine.
        plans: the plans to predict.
        batch_of: the samples per step on so many ranks.
    """

    model: Architecture
    sequence: int
    hardware: Hardware
    plans: Sequence[Plan]
    batch_of: Callable[[int], int]

    def check(self, measured: Sequence[Plan]) -> None:
        """Check that all plans can be priced.

        Raises:
            ValueError: one cannot, or has no more ranks than those that are measured.
        """
        most = max(plan.ranks for plan in measured)
        for plan in self.plans:
            if plan.ranks <= most:
                raise ValueError(
                    f"scaling(beyond=[..., {plan.ranks}, ...]): {most} ranks are measured, and what is beyond has "
                    f"more: beyond=[{2 * most}, {4 * most}]"
                )
        for plan in (*measured, *self.plans):
            self._estimate_plan(plan)

    def predict(self, measured: Sequence[tuple[Plan, float]]) -> list[Estimate]:
        """Return the estimates of the plans, from the measured seconds of others."""
        prior = preset_as_played(self.hardware.device).constants
        found = calibrate(((self._estimate_plan(plan), took) for plan, took in measured), prior=prior)
        if len(measured) < ENOUGH:
            found = replace(found, band=max(UNFITTED, found.band))
        return [self._estimate_plan(plan, found) for plan in self.plans]

    def _estimate_plan(self, plan: Plan, preset: Preset | None = None) -> Estimate:
        return estimate(
            self.model, plan, self.hardware, global_batch=self.batch_of(plan.ranks), sequence=self.sequence,
            stack="mpkit", preset=preset,
        )  # fmt: skip


def larger_machine(
    model: torch.nn.Module, data: Any, measured: Sequence[Plan], plans: Sequence[Plan], hardware: Hardware | str | None,
    *, weak: bool, on_gpus: bool,
) -> LargerMachine:  # fmt: skip
    """Return what predicts these plans, checked.

    Args:
        model, data: as for `mk.scaling`.
        measured, plans: the plans that are run, and those to predict.
        hardware: the machine; None: CPU ranks, each on a core of its own.
        weak: whether the batch grows with the ranks.
        on_gpus: whether the runs are on GPUs.

    Raises:
        ValueError: the model's sizes or its batches cannot be read, or a plan cannot be priced.
    """
    try:
        architecture = architecture_of(model)
    except NoArchitecture as error:
        raise ValueError(
            f"scaling(beyond=...) predicts transformers whose sizes it can read, and this is a {type(model).__name__}. "
            "Any model, from a profile: mk.profile(model, data, loss=..., optimizer=...).predict(mk.Plan.ddp(8))"
        ) from error
    batches = take_batches(data, 1)
    samples, sequence = _sizes(batches[0])
    least = min(plan.ranks for plan in measured)
    if hardware is None and on_gpus:
        raise ValueError(
            "scaling(beyond=...) on GPUs predicts for a machine of the catalogue: say which, such as "
            "hardware='8x-h100-nvlink' or mk.hardware('h100', nodes=4, nic='ndr'); mk.hardware() lists them"
        )
    machine = find(hardware or "cpu")
    found = LargerMachine(
        architecture, sequence, machine, plans, lambda ranks: samples * ranks // least if weak else samples
    )
    found.check(measured)
    return found


def _sizes(batch: Any) -> tuple[int, int]:
    """Return the samples of a batch, and the tokens of a sample."""
    from mpkit.common.torch_private import tree_leaves

    shape = next(leaf.shape for leaf in tree_leaves(batch) if hasattr(leaf, "shape"))
    return int(shape[0]), int(shape[1]) if len(shape) > 1 else 1
