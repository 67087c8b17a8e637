"""Memory ahead: say before a training starts that its GPUs will not hold it.

    at hand     the memory of the smallest device, divided among the ranks that share it
    needed      what `mk.fits` estimates where the model's sizes can be read; of any other model the parameters,
                gradients and optimizer's states alone, which is less than it will need

It is a warning and no refusal: an estimate of memory has a band, and a run that is out of memory says so itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mpkit.common.exceptions import report
from mpkit.common.units import memory_text
from mpkit.devices.hardware import Device, Hardware, Link
from mpkit.plan.model_states import formula
from mpkit.plan.plan import Plan
from mpkit.prediction.cost_model.fits import Fits, fits
from mpkit.prediction.cost_model.known_models import NoArchitecture, architecture_of

if TYPE_CHECKING:
    from torch import nn

    from mpkit.devices.local.choose import DeviceChoice
    from mpkit.strategies.job.job import TrainJob

__all__ = ["memory_at_hand", "memory_warning", "warn_of_memory"]


def warn_of_memory(job: TrainJob, chosen: DeviceChoice, ranks: int) -> None:
    """Warn, with an `UnwisePlan`, if the devices of a training have less memory than it is estimated to need."""
    from mpkit.devices.local.queries import inventory_of
    from mpkit.strategies.job.feed import WholeBatches

    inventory = inventory_of(chosen.kind)
    if inventory is None:
        return
    each = memory_at_hand([device.memory for device in inventory.devices], chosen, ranks)
    batches = job.what.batches
    shape = _shape(batches[0]) if isinstance(batches, WholeBatches) else ()
    message = memory_warning(job.what.model, job.plan, shape, each)
    if message:
        report(message)


def memory_at_hand(memory: Sequence[int], chosen: DeviceChoice, ranks: int) -> int:
    """Return the bytes that the rank with least has of its device; 0 where they are not known.

    Args:
        memory: of each device, in torch's order.
        chosen: which ranks are on which device.
        ranks: the number of ranks.

    >>> from mpkit.devices.local.choose import DeviceChoice
    >>> memory_at_hand([80, 24], DeviceChoice("cuda", (0, 1)), 4)  # two ranks on each
    12
    """
    on = [chosen.number_of(rank) for rank in range(ranks)]
    return min((memory[number] // on.count(number) for number in on), default=0)


def memory_warning(model: nn.Module, plan: Plan, shape: Sequence[int], available: int) -> str:
    """Return what to warn of; "" if the plan fits, or if nothing is known of the memory.

    Args:
        model, plan: what is trained, and how.
        shape: of the inputs of a batch: samples, tokens; () if unknown.
        available: bytes of memory that each rank has.
    """
    if not available:
        return ""
    found = _estimate_memory(model, plan, shape, available)
    if found is None:
        return _states_alone(model, plan, available)
    if found:
        return ""
    remedy = "No change of one or two things makes it fit."
    if found.remedy:
        remedy = f"What would fit: {found.remedy.plan!r} ({found.remedy.change})."
    return (
        f"{plan!r} is estimated to need {memory_text(found.needed)} on rank {found.fullest}, which has "
        f"{memory_text(available)}; the largest part is {found.largest}. {remedy} "
        f"print(mk.fits(model, plan, hardware, global_batch={shape[0]}, sequence={shape[1]})) says more"
    )


def _estimate_memory(model: nn.Module, plan: Plan, shape: Sequence[int], available: int) -> Fits | None:
    """Return the estimate for devices of this memory; None where the model's sizes cannot be read."""
    if len(shape) < 2:
        return None
    try:
        architecture = architecture_of(model)
    except NoArchitecture:
        return None
    device = Device("the device", {"float32": 1e12}, 1e12, available)
    machine = Hardware("this machine", device, Link("any", 0.0, 1e11), per_node=max(plan.ranks, 1))
    try:
        return fits(architecture, plan, machine, global_batch=shape[0], sequence=shape[1], stack="mpkit")
    except ValueError:
        return None  # the training can do what an estimate cannot, such as micro-batches of unequal size


def _states_alone(model: nn.Module, plan: Plan, available: int) -> str:
    psi = sum(parameter.numel() for parameter in model.parameters()) // (plan.pp * plan.tp)
    held = formula(plan, psi, itemsize=4 if plan.precision == "full" else 2)
    needed = sum(held.values())
    if needed <= available:
        return ""
    largest = max(held, key=held.__getitem__)
    return (
        f"{plan!r} needs at least {memory_text(needed)} per rank for parameters, gradients and Adam's states, and "
        f"a rank has {memory_text(available)}; the largest part is {largest}. "
        f"ZeRO divides them among replicas: mk.Plan.zero(3, {max(2, plan.ranks)})"
    )


def _shape(batch: Any) -> tuple[int, ...]:
    from mpkit.common.torch_private import tree_leaves

    return tuple(next(leaf.shape for leaf in tree_leaves(batch) if hasattr(leaf, "shape")))
