"""Search: the layouts that fit, each with its time, memory first.

For a family of layouts, which differ in the samples of a micro-batch only:

    relief     offload and recomputation, in the order of what they cost: the cheapest that fits is the best of them
    room       plans that leave a part of the memory free; those that fill it are kept apart
    prune      activations and logits grow with the micro-batch, so when not even the most relief makes one fit, none of
               the larger ones fits
    time       priced for what fits only; a formula stands for the pipeline, and the best layouts are then played

What is left out is never better than what is kept, so the best layout found is the best there is;
tests/advice/test_search.py compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from mpkit.prediction.advice.offers import Offers, offers_of
from mpkit.prediction.advice.prices import LayoutPrices
from mpkit.prediction.advice.space import families
from mpkit.prediction.cost_model.layout import Layout
from mpkit.prediction.cost_model.stack import Stack

__all__ = ["FEW", "PLAYED", "SHOWN", "FoundLayout", "SearchResult", "best_played", "search"]

SHOWN = 20
"""The plans of an advice."""
PLAYED = 25
"""The layouts that are played, for the order of those that are shown."""
FEW = 5
"""The layouts that are played of those that fill the memory."""


@dataclass(frozen=True, slots=True)
class FoundLayout:
    """A layout that fits.

    Attributes:
        layout: how the step is divided.
        seconds: per step.
        memory: bytes at the peak of the rank with most, fragmentation included.
    """

    layout: Layout
    seconds: float
    memory: float


@dataclass(frozen=True)
class SearchResult:
    """What a search found.

    Attributes:
        found: the layouts that fit, the best first.
        tight: those that fit and leave less than 8 % of the memory free, the best first.
        considered: the number that were considered, those that do not fit included.
    """

    found: list[FoundLayout]
    tight: list[FoundLayout]
    considered: int


def search(priced: LayoutPrices, devices: int) -> SearchResult:
    """Return the layouts that fit so many devices, with about their seconds."""
    room = float(priced.hardware.device.memory)
    searched = SearchResult([], [], 0)
    found, tight, considered = searched.found, searched.tight, 0
    offers = offers_of(priced.stack.name)
    for family in families(
        priced.asked, devices, priced.hardware.per_node, offers, priced.head, priced.stack.by_flops
    ):
        reliefs = _reliefs(family[0], offers, priced.stack)
        considered += len(reliefs) * len(family)
        for layout in family:
            if priced.memory(_relieve(layout, *reliefs[-1])) > room:
                break
            for each, memory in _fitting_layouts(priced, layout, reliefs, room):
                fits = FoundLayout(each, priced.screened_seconds(each), memory)
                (found if memory <= priced.room else tight).append(fits)
    return replace(searched, considered=considered)


def best_played(
    priced: LayoutPrices,
    found: Sequence[FoundLayout],
    least: Callable[[FoundLayout], Any],
    played: int = PLAYED,
) -> list[FoundLayout]:
    """Return the layouts found, the best first, with the pipelines of the best ones played.

    Args:
        priced: what was asked.
        found: the layouts, as `search` returns them.
        least: what is least for the best.
        played: how many are played.
    """
    ordered = sorted(found, key=least)
    best = [replace(each, seconds=priced.step(each.layout).seconds) for each in ordered[:played]]
    return [*sorted(best, key=least), *ordered[played:]]


def _reliefs(layout: Layout, offers: Offers, stack: Stack) -> list[tuple[str, str]]:
    """Return the pairs of offload and recomputation that a layout can have, ordered by offload, then by cost.

    Selective recomputation frees the attention's scores, which fused attention does not keep.
    """
    offloads = offers.offload if layout.zero == 3 else [each for each in offers.offload if each != "params"]
    recomputes = [each for each in offers.recompute if not (stack.fused and each == "selective")]
    return [(offload, recompute) for offload in offloads for recompute in recomputes]


def _fitting_layouts(
    priced: LayoutPrices, layout: Layout, reliefs: Sequence[tuple[str, str]], room: float
) -> Iterator[tuple[Layout, float]]:
    """Yield for each offload the least recomputation that fits, and the least that leaves a part of the memory free.

    Where no recomputation is needed, more offload is for nothing.
    """
    for offload, group in groupby(reliefs, key=lambda relief: relief[0]):
        tight = False
        for _, recompute in group:
            relieved = _relieve(layout, offload, recompute)
            memory = priced.memory(relieved)
            if memory <= priced.room:
                yield relieved, memory
                if recompute == reliefs[0][1]:
                    return
                break
            if memory <= room and not tight:
                yield relieved, memory
                tight = True


def _relieve(layout: Layout, offload: str, recompute: str) -> Layout:
    if (offload, recompute) == (layout.offload, layout.recompute):
        return layout  # its degrees have been multiplied already
    return layout.vary(offload=offload, recompute=recompute)
