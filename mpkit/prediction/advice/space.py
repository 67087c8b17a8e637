"""Space: every layout by which a batch of a model can be trained on a number of devices.

    mesh         pp x dp x tp x cp = devices, where tp divides heads and MLP, cp the sequence, dp the batch
    cp_method    a ring, in zigzag order; Ulysses if the heads can be divided
    ep           each divisor of the ranks that hold the same weights which divides the experts, if there are any
    etp          1, or tp where tensor parallelism divides experts
    schedule     that the software has (`mpkit.prediction.advice.offers`), with its stages per rank; accumulation
                 without stages; pairs (F & B) where experts are divided, whose all-to-alls they hide
    zero         of those that it has, 0 to 3; on several nodes also sharded within groups of 1, 2 or 4 of them
    microbatch   each divisor of a replica's samples

Recomputation and offload are not enumerated here: they only ever cost time, so the search adds them where memory asks
for them (`mpkit.prediction.advice.search`). Sequence parallelism, where there is any, is on beside tp: it sends as
much and holds less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from mpkit.plan.kinds import METHODS
from mpkit.plan.schedule.catalogue import GPIPE, SCHEDULES, has_pairs
from mpkit.prediction.advice.offers import EVERYTHING, Offers
from mpkit.prediction.cost_model.architecture import Architecture
from mpkit.prediction.cost_model.check import can_divide_experts, can_divide_heads
from mpkit.prediction.cost_model.layout import Layout

__all__ = [
    "LayoutFamily", "TrainingQuestion", "can_share", "cp_methods", "divisors", "expert_changes", "expert_degrees",
    "families",
]  # fmt: skip


GROUPS = (1, 2, 4)
"""Nodes in a group within which ZeRO shards."""


@dataclass(frozen=True)
class TrainingQuestion:
    """What is to be trained.

    Attributes:
        model: its sizes.
        global_batch, sequence: samples per step, and tokens per sample.
        load, trainable: as in a Layout.
    """

    model: Architecture
    global_batch: int
    sequence: int
    load: float = 1.0
    trainable: float = 1.0


@dataclass(frozen=True)
class LayoutFamily:
    """Layouts that differ in the samples of a micro-batch only.

    Attributes:
        base: a layout of them, whose micro-batches are of no importance.
        sizes: the samples of a micro-batch, ascending.
        samples: of a replica.
    """

    base: Layout
    sizes: Sequence[int]
    samples: int

    def __iter__(self) -> Iterator[Layout]:
        return (self.base.vary(microbatch=size, microbatches=self.samples // size) for size in self.sizes)


def families(
    asked: TrainingQuestion,
    devices: int,
    per_node: int,
    offers: Offers = EVERYTHING,
    head: float = 0.0,
) -> Iterator[LayoutFamily]:
    """Yield families of layouts that differ in the samples of a micro-batch only.

    Args:
        asked: what is to be trained.
        devices: all of them are used.
        per_node: devices per node; tensor parallelism goes up to four nodes.
        offers: what the software can do.
        head: as in a Layout.

    >>> gpt2 = Architecture(12, 768, 12, vocabulary=50257)
    >>> found = list(families(TrainingQuestion(gpt2, 8, 1024), 2, 8))
    >>> [layout.microbatch for layout in found[0]]  # of two replicas, each has 4 samples
    [1, 2, 4]
    """
    model = asked.model
    for tp in divisors(devices) if offers.tensor else [1]:
        if tp > 4 * per_node or model.heads % tp or model.ffn % tp:
            continue
        for cp in divisors(devices // tp) if offers.context else [1]:
            if not can_share(asked.sequence, tp, cp, offers):
                continue
            methods = cp_methods(model, offers, tp, cp)
            for pp in divisors(devices // tp // cp) if offers.schedules else [1]:
                dp = devices // tp // cp // pp
                if pp > model.layers or asked.global_batch % dp:
                    continue
                mesh = Layout(
                    pp=pp, dp=dp, cp=cp, tp=tp, sequence_parallel=tp > 1 and offers.sequence, head=head,
                    load=asked.load, trainable=asked.trainable,
                )  # fmt: skip
                for family in _of_mesh(asked, offers, per_node, mesh):
                    ways = product(methods, expert_changes(model, offers, family.base))
                    joint = has_pairs(family.base.schedule)
                    for method, experts in ways:
                        if joint and experts["ep"] == 1:
                            continue  # there is nothing to hide
                        base = family.base.vary(cp_method=method, **experts)
                        yield LayoutFamily(base, family.sizes, family.samples)


def _of_mesh(asked: TrainingQuestion, offers: Offers, per_node: int, mesh: Layout) -> Iterator[LayoutFamily]:
    """Yield the families of a mesh, by how ZeRO shards and by schedule."""
    samples, layers, pp = asked.global_batch // mesh.dp, asked.model.layers, mesh.pp
    for schedule, v in _schedules(offers, pp, experts=asked.model.experts > 0):
        if pp * v > layers or (offers.even and layers % (pp * v)):
            continue
        groups = pp if offers.grouped and v > 1 else 1  # of micro-batches
        sizes = [
            each
            for each in divisors(samples)
            if samples // each % groups == 0 and (not offers.filled or samples // each >= pp - 1)
        ]
        if sizes:
            base = replace(mesh, schedule=schedule, virtual_stages=v)
            for zero, sharded in _shardings(mesh, offers, per_node):
                yield LayoutFamily(base.vary(zero=zero, sharded=sharded), sizes, samples)


def _schedules(offers: Offers, pp: int, *, experts: bool) -> Iterator[tuple[str, int]]:
    """Yield the schedules of a pipeline with their stages per rank; those of pairs only where there are experts."""
    if pp == 1:
        yield GPIPE, 1
    for schedule, v in offers.schedules:
        joint = SCHEDULES[schedule].pairs
        if (not joint and pp > 1) or (joint and experts and (v > 1) == (pp > 1)):
            yield schedule, v


def _shardings(mesh: Layout, offers: Offers, per_node: int) -> Iterator[tuple[int, int]]:
    """Yield stages of ZeRO with the ranks among which they shard."""
    n = mesh.replicas
    if n == 1:
        yield 0, 0
        return
    parts = [nodes * per_node // mesh.tp for nodes in GROUPS if nodes * per_node % (mesh.tp * mesh.cp) == 0]
    parts = [part for part in parts if 1 < part < n and n % part == 0]
    for zero in offers.zero:
        yield zero, 0
        for part in parts:
            if zero in offers.hybrid:
                yield zero, part


def cp_methods(model: Architecture, offers: Offers, tp: int, cp: int) -> list[str]:
    """Return the ways in which the ranks of a sequence can attend to the whole of it; the first where it is whole.

    >>> llama3 = Architecture(32, 4096, 32, kv_heads=8)
    >>> cp_methods(llama3, EVERYTHING, 1, 8), cp_methods(llama3, EVERYTHING, 2, 32)
    (['ring', 'ulysses'], ['ring'])
    """
    if cp == 1:
        return [METHODS[0]]
    return [each for each in offers.cp_methods if each == METHODS[0] or can_divide_heads(model, tp, cp)]


def can_share(sequence: int, tp: int, cp: int, offers: Offers) -> bool:
    """Return whether ranks can share sequences of so many tokens: a ring has two pieces per rank, in zigzag order.

    >>> [can_share(12, *degrees, EVERYTHING) for degrees in ((1, 1), (4, 1), (8, 1), (1, 4), (2, 3))]
    [True, True, False, False, True]
    """
    return sequence % (cp * max(tp if offers.sequence else 1, 2 if cp > 1 else 1)) == 0


def expert_degrees(model: Architecture, offers: Offers, layout: Layout) -> list[int]:
    """Return the numbers of ranks that can divide the experts of a layer, out of those that share shards.

    Beside sequence parallelism the ranks along tp are among them (folding: Liu et al. 2025, arXiv 2504.14960). Where
    the software has all ranks along cp and tp divide experts, these are.

    >>> mixtral = Architecture(32, 4096, 32, experts=8, top_k=2)
    >>> expert_degrees(mixtral, EVERYTHING, Layout(dp=2, tp=2, sequence_parallel=True))
    [1, 2, 4]
    """
    if not model.experts or not offers.experts:
        return [1]
    inner = layout.cp * layout.tp if offers.inner_experts else 1
    ranks = layout.shards * (layout.tp if layout.sequence_parallel else 1)
    return [ep for ep in divisors(ranks) if model.experts % ep == 0 and (ep == 1 or ep % inner == 0)]


def expert_changes(model: Architecture, offers: Offers, layout: Layout) -> list[dict[str, Any]]:
    """Return the ways to divide a layer's experts, as fields of a layout.

    Ranks along tp have whole experts (etp = 1), or, where tensor parallelism divides experts, a part of each (etp = tp,
    which is 0 in a layout). Ranks that hold the same experts without need are left out: folded they hold fewer.

    >>> mixtral = Architecture(32, 4096, 32, ffn=14336, experts=8, top_k=2)
    >>> expert_changes(mixtral, EVERYTHING, Layout(dp=2, tp=2, sequence_parallel=True))
    [{'ep': 1, 'etp': 0}, {'ep': 2, 'etp': 1}, {'ep': 2, 'etp': 0}, {'ep': 4, 'etp': 1}]
    """
    beside = {"etp": 1, "alike": True} if model.whole_experts else {"etp": 0}
    parts = layout.tp > 1 and not offers.inner_experts and can_divide_experts(model, layout.tp)
    found: list[dict[str, Any]] = []
    for ep in expert_degrees(model, offers, layout):
        found.append({"ep": ep, **({"etp": 1} if ep > 1 else beside)})
        if ep > 1 and parts and layout.shards % ep == 0:
            found.append({"ep": ep, "etp": 0})
    return found


def divisors(n: int) -> list[int]:
    """Return the divisors of a number, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]
