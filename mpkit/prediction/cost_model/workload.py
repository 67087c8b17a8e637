"""Workload: what is trained, where, and with which software; an estimate adds a plan, an advice looks for the best."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from mpkit.devices.catalogue import hardware as machine_of
from mpkit.devices.hardware import Hardware
from mpkit.plan.kinds import real
from mpkit.prediction.cost_model.architecture import Architecture
from mpkit.prediction.cost_model.known_models import architecture_of
from mpkit.prediction.cost_model.memory import MemoryModel
from mpkit.prediction.cost_model.preset import Preset, preset_for
from mpkit.prediction.cost_model.stack import Stack
from mpkit.prediction.cost_model.step import StepModel


@dataclass(frozen=True)
class Workload:
    """What is asked for.

    Attributes:
        model: the sizes of the model, as the stack runs it.
        hardware, stack, preset: the machine, the software, and the constants with what they were fitted on.
        global_batch, sequence: samples per step, and tokens per sample.
        trainable: the share of the parameters that is trained.
        load: how busy experts are: rows of the busiest of the ranks that divide them, divided by the mean.
    """

    model: Architecture
    hardware: Hardware
    stack: Stack
    preset: Preset
    global_batch: int
    sequence: int
    trainable: float = 1.0
    load: float = 1.0

    @cached_property
    def memory_model(self) -> MemoryModel:
        """What memory is priced for."""
        return MemoryModel(self.model, self.sequence, self.stack, self.hardware.device)

    @cached_property
    def time_model(self) -> StepModel:
        """What time is priced for."""
        return StepModel(self.model, self.sequence, self.hardware, self.stack, self.preset.constants)

    @property
    def available(self) -> float:
        """Bytes of a device's memory; infinite where the catalogue does not know it, as of a CPU."""
        return float(self.hardware.device.memory or inf)

    @property
    def head(self) -> float:
        """As how many layers the head counts where the software cuts stages by weight; 0: it does not."""
        return self.model.head_in_layers if self.stack.by_weight else 0.0


def workload_of(
    model: object, hardware: Hardware | str, stack: Stack, preset: Preset | None, global_batch: int, sequence: int,
    trainable: float = 1.0, expert_load: float | None = None,
) -> Workload:  # fmt: skip
    """Return what is asked for; arguments are those of `mk.estimate`.

    Some stacks divide experts along tp that others leave whole.

    Raises:
        ValueError: one of them is unknown, or no such number.
    """
    if not 0 < (real(trainable) or 0) <= 1:
        raise ValueError(
            f"trainable={trainable!r}: the share of the parameters that is trained, such as 0.01 for LoRA"
        )
    if preset is not None and not isinstance(preset, Preset):
        raise ValueError(f"preset={preset!r}: constants of one's own, from mk.calibrate(...), or left out")
    machine, sizes = machine_of(hardware), architecture_of(model, trainable=trainable)
    load = _checked_load(expert_load, sizes)
    if stack.divides_experts and sizes.whole_experts:
        sizes = replace(sizes, whole_experts=False)
    constants = preset or preset_for(machine.device.name, stack.name)
    return Workload(sizes, machine, stack, constants, global_batch, sequence, trainable, load)


def _checked_load(load: object, model: Architecture) -> float:
    """Return the rows of the busiest of the ranks that divide experts, divided by the mean; None: 1.

    Raises:
        ValueError: it is no such ratio, or the model has no experts.
    """
    if load is None:
        return 1.0
    ratio = real(load)
    if ratio is None or not 1 <= ratio < inf:
        raise ValueError(
            f"expert_load={load!r:.80}: rows of the busiest rank that divides experts, divided by the mean, 1 or more, "
            "such as expert_load=1.4; of a run, run.expert_load has the rows"
        )
    if not model.experts:
        raise ValueError(f"expert_load={load!r} says how busy experts are, and this model has none")
    return ratio
