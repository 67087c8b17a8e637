"""Near misses: plans one change away from the best, and what stands against each.

    faster    it would be faster and does not fit: by how many bytes
    slower    it fits, and takes longer: because of what

One change is another stage of ZeRO, less or more recomputation or offload, the other cp_method, twice or half of ep,
the other etp, or twice or half of a degree in exchange for replicas or stages. Micro-batches are then divided anew, as
the search would.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mpkit.common.units import memory_text, percent, seconds
from mpkit.plan.schedule.catalogue import GPIPE, has_pairs
from mpkit.prediction.advice.offers import Offers, in_best_order, offers_of
from mpkit.prediction.advice.prices import LayoutPrices
from mpkit.prediction.advice.screening import screen_layouts
from mpkit.prediction.advice.space import can_share, cp_methods, expert_changes
from mpkit.prediction.cost_model.layout import Layout
from mpkit.prediction.cost_model.step import StepTime

__all__ = ["NearMiss", "near_misses"]

NEAR = 0.5
"""By how much of the room a plan that does not fit is out at most, to be called near."""
EXPOSED = "tensor parallel", "context parallel", "replicas", "ZeRO-3 gathers", "messages between stages"
"""Causes that are communication which nothing hides."""


@dataclass(frozen=True)
class NearMiss:
    """A plan one change away from the best.

    Attributes:
        layout: the plan's layout.
        change: what differs from the best.
        seconds: per step.
        excess: bytes by which it takes more than the room that plans may take; 0 or less where it does not.
        why: the reason in words.
    """

    layout: Layout
    change: str
    seconds: float
    excess: float
    why: str

    def __str__(self) -> str:
        return f"{self.change}: {self.why}"


def near_misses(priced: LayoutPrices, best: Layout) -> list[NearMiss]:
    """Return the near misses: those that would be faster by how little they are out, then the others by time."""
    offers = offers_of(priced.stack.name)
    changes = [(change, in_best_order(layout, offers)) for change, layout in _changes(priced, best, offers)]
    (took, _), *priced_changes = screen_layouts(priced, [best, *(layout for _, layout in changes)])
    room = priced.room
    nearest: dict[str, tuple[bool, float, float, Layout]] = {}
    for (change, layout), (seconds_, memory) in zip(changes, priced_changes, strict=True):
        excess = memory - room
        if seconds_ >= took if excess > 0 else seconds_ <= took:
            continue  # it neither fits nor is faster; or it is as good as the best
        if excess > NEAR * room:
            continue
        this = excess > 0, seconds_, excess, layout
        nearest[change] = min(nearest.get(change, this), this, key=lambda each: each[:2])
    here = priced.step(best)
    found = [_near_miss(priced, here, change, *of[2:]) for change, of in nearest.items()]
    return sorted(found, key=lambda miss: (miss.excess <= 0, max(0.0, miss.excess), miss.seconds))


def _near_miss(priced: LayoutPrices, here: StepTime, change: str, excess: float, layout: Layout) -> NearMiss:
    """Say what stands against a layout: memory, or what grows most, or how much communication nothing hides.

    Args:
        priced: what was asked.
        here: the best layout's step.
        change: what differs from it.
        excess: bytes by which the layout does not fit.
        layout: the layout.
    """
    there = priced.step(layout)
    if excess > 0:
        memory = priced.hardware.device.memory
        free = memory - priced.room - excess
        out = (
            f"leaves {percent(free / memory)} of the memory free"
            if free > 0
            else f"out by {memory_text(-free)}"
        )
        why = f"{out}; it would take {seconds(there.seconds)} per step"
        return NearMiss(layout, change, there.seconds, excess, why)
    words = f"{percent(there.seconds / here.seconds - 1)} longer"
    exposed = sum(there.because.get(cause, 0.0) for cause in EXPOSED)
    if exposed > 0.2 * there.seconds:
        share = percent(exposed / there.seconds)
        why = f"{words}; {share} of the step is communication that nothing hides"
    else:
        more = {cause: took - here.because.get(cause, 0.0) for cause, took in there.because.items()}
        cause = max(more, key=more.__getitem__)
        why = f"{words}; {seconds(more[cause])} more for {cause}"
    return NearMiss(layout, change, there.seconds, excess, why)


def _changes(priced: LayoutPrices, best: Layout, offers: Offers) -> Iterator[tuple[str, Layout]]:
    """Yield the layouts one change away that the software and the model can have, with the change in words."""
    for zero in offers.zero:
        if zero != best.zero and best.replicas > 1 and not (zero < 3 and best.offload == "params"):
            sharded = best.sharded if zero in offers.hybrid else 0
            yield f"zero={zero}", replace(best, zero=zero, sharded=sharded, secondary=0)
    for method in cp_methods(priced.asked.model, offers, best.tp, best.cp, priced.hardware.per_node):
        if method != best.cp_method:
            yield f"cp_method={method!r}", replace(best, cp_method=method)
    for change in expert_changes(priced.asked.model, offers, best):
        layout = replace(best, **{"alike": False} | change)
        moved = layout.ep == best.ep > 1 and layout.expert_tp != best.expert_tp
        if layout.ep in (2 * best.ep, best.ep / 2) or moved:
            etp = f", etp={layout.expert_tp}" if layout.ep > 1 and layout.tp > 1 else ""
            yield f"ep={layout.ep}{etp}", layout
    if best.secondary:
        yield "without secondary shards", replace(best, secondary=0)
    if best.sharded:
        yield "sharded among all replicas", replace(best, sharded=0)
    for recompute in offers.recompute:
        if recompute != best.recompute and not (priced.stack.fused and recompute == "selective"):
            words = "without recomputation" if recompute == "none" else f"recompute={recompute!r}"
            yield words, replace(best, recompute=recompute)
    for offload in offers.offload:
        if offload != best.offload and not (offload == "params" and (best.zero < 3 or best.secondary)):
            yield (
                "without offload" if offload == "none" else f"offload={offload!r}",
                replace(best, offload=offload),
            )
    for axis in ("tp", "pp", "cp"):
        for other in ("dp", "pp", "tp"):
            for factor in (2, 1):
                if axis == other:
                    continue
                more, less = (axis, other) if factor == 2 else (other, axis)
                if getattr(best, less) % 2 == 0 and (axis == "tp" or other == "dp"):
                    yield from _shift_degree(priced, best, offers, more, less)


def _shift_degree(
    priced: LayoutPrices, best: Layout, offers: Offers, more: str, less: str
) -> Iterator[tuple[str, Layout]]:
    """Yield the layouts with twice as much of one degree and half of another, for each micro-batch."""
    degrees = {more: getattr(best, more) * 2, less: getattr(best, less) // 2}
    for layout in _layouts(priced, replace(best, **degrees, sharded=0, secondary=0), offers):
        yield f"{more}={degrees[more]}, {less}={degrees[less]}", layout


def _layouts(priced: LayoutPrices, layout: Layout, offers: Offers) -> Iterator[Layout]:
    """Yield a mesh's layouts by micro-batch, if the model, the batch and the software can have it."""
    model, asked = priced.asked.model, priced.asked
    impossible = (
        (layout.tp > 1 and not offers.tensor)
        or (layout.cp > 1 and not offers.context)
        or (layout.pp > 1 and not offers.schedules)
        or model.heads % layout.tp
        or model.ffn % layout.tp
        or not can_share(asked.sequence, layout.tp, layout.cp, offers)
        or asked.global_batch % layout.dp
        or layout.pp * layout.virtual_stages > model.layers
        or layout.shards * (1 if layout.alike else layout.tp // layout.expert_tp) % layout.ep
        or (offers.even and model.layers % (layout.pp * layout.virtual_stages))
        or (layout.offload == "params" and layout.replicas == 1)
    )
    if impossible:
        return
    samples = asked.global_batch // layout.dp
    schedule, v = layout.schedule, layout.virtual_stages
    joint = isinstance(schedule, str) and has_pairs(schedule)
    if layout.pp == 1 and not (joint and v == 1):
        schedule, v = GPIPE, 1
    elif layout.pp > 1 and (schedule == GPIPE or (joint and v == 1)):
        schedule, v = offers.schedules[0]
    for each in (layout.microbatch // 2, layout.microbatch, layout.microbatch * 2):
        if not each or samples % each or (offers.filled and samples // each < layout.pp - 1):
            continue
        for method in cp_methods(model, offers, layout.tp, layout.cp, priced.hardware.per_node):
            yield replace(
                layout, schedule=schedule, virtual_stages=v, microbatch=each, microbatches=samples // each,
                sequence_parallel=layout.tp > 1 and offers.sequence, zero=layout.zero if layout.replicas > 1 else 0,
                cp_method=method,
            )  # fmt: skip
