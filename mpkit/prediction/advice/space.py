"""Space: every layout by which a batch of a model can be trained on a number of devices.

    mesh         pp x dp x tp x cp = devices, where tp divides heads and MLP, cp the sequence, dp the batch
    cp_method    a ring; Ulysses if the heads can be divided; and a ring of nodes with Ulysses inside
    ep           each divisor of the ranks that hold the same weights which divides the experts, if there are any
    schedule     that the software has (`mpkit.prediction.advice.offers`), with its stages per rank; accumulation
                 without stages
    zero         of those that it has, 0 to 3; on several nodes also sharded within groups of 1, 2 or 4 of them
    microbatch   each divisor of a replica's samples

Recomputation and offload are not enumerated here: they only ever cost time, so the search adds them where memory asks
for them (`mpkit.prediction.advice.search`). Sequence parallelism, where there is any, is on beside tp: it sends as
much and holds less.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from mpkit.plan.schedule.catalogue import GPIPE
from mpkit.plan.tensor_checks import METHODS
from mpkit.prediction.advice.offers import EVERYTHING, Offers
from mpkit.prediction.cost_model.architecture import Architecture
from mpkit.prediction.cost_model.check import can_divide_heads
from mpkit.prediction.cost_model.layout import Layout

__all__ = ["TrainingQuestion", "can_share", "cp_methods", "divisors", "expert_degrees", "families"]


GROUPS = (1, 2, 4)
"""Nodes in a group within which ZeRO shards."""


@dataclass(frozen=True)
class TrainingQuestion:
    """What is to be trained.

    Attributes:
        model: its sizes.
        global_batch, sequence: samples per step, and tokens per sample.
    """

    model: Architecture
    global_batch: int
    sequence: int


def families(
    asked: TrainingQuestion,
    devices: int,
    per_node: int,
    offers: Offers = EVERYTHING,
    head: float = 0.0,
    balanced: bool = False,
) -> Iterator[tuple[Layout, ...]]:
    """Yield families of layouts that differ in the samples of a micro-batch only, the smallest first.

    Args:
        asked: what is to be trained.
        devices: all of them are used.
        per_node: devices per node; tensor parallelism goes up to four nodes.
        offers: what the software can do.
        head, balanced: as in a Layout.

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
            for pp in divisors(devices // tp // cp) if offers.schedules else [1]:
                dp = devices // tp // cp // pp
                if pp > model.layers or asked.global_batch % dp:
                    continue
                for family in _of_mesh(asked, offers, per_node, pp, dp, tp, cp, head, balanced):
                    ways = product(
                        cp_methods(model, offers, tp, cp, per_node),
                        expert_degrees(model, offers, family[0]),
                    )
                    for method, ep in ways:
                        etp = 1 if ep > 1 else 0
                        yield tuple(each.vary(cp_method=method, ep=ep, etp=etp) for each in family)


def _of_mesh(
    asked: TrainingQuestion,
    offers: Offers,
    per_node: int,
    pp: int,
    dp: int,
    tp: int,
    cp: int,
    head: float,
    balanced: bool,
) -> Iterator[tuple[Layout, ...]]:
    samples = asked.global_batch // dp
    stages = [(zero, 0) for zero in offers.zero] if dp * cp > 1 else [(0, 0)]
    sizes = [nodes * per_node // tp for nodes in GROUPS if nodes * per_node % (tp * cp) == 0]
    stages += [(zero, n) for zero in offers.hybrid for n in sizes if 1 < n < dp * cp and dp * cp % n == 0]
    for zero, sharded in stages:
        for schedule, v in offers.schedules if pp > 1 else ((GPIPE, 1),):
            layers = asked.model.layers
            if pp * v > layers or (offers.even and layers % (pp * v)):
                continue
            groups = pp if offers.even and v > 1 else 1  # of micro-batches
            layout = Layout(
                pp=pp, dp=dp, cp=cp, tp=tp, zero=zero, virtual_stages=v, schedule=schedule,
                sequence_parallel=tp > 1 and offers.sequence, head=head, balanced=balanced, sharded=sharded,
            )  # fmt: skip
            family = tuple(
                layout.vary(microbatch=each, microbatches=samples // each)
                for each in divisors(samples)
                if samples // each % groups == 0 and (not offers.filled or samples // each >= pp - 1)
            )
            if family:
                yield family


def cp_methods(
    model: Architecture, offers: Offers, tp: int, cp: int, per_node: int
) -> list[str | tuple[int, int]]:
    """Return the ways in which the ranks of a sequence can attend to the whole of it; the first where it is whole.

    Of Ulysses times a ring it is the one with most ranks of a node that can divide the heads, as its authors advise.

    >>> llama3 = Architecture(32, 4096, 32, kv_heads=8)
    >>> cp_methods(llama3, EVERYTHING, 1, 8, 8), cp_methods(llama3, EVERYTHING, 2, 32, 8)
    (['ring', 'ulysses'], ['ring', (4, 8)])
    """
    if cp == 1:
        return [METHODS[0]]
    found: list[str | tuple[int, int]] = [
        each for each in offers.cp_methods if each == METHODS[0] or can_divide_heads(model, tp, cp)
    ]
    inside = [u for u in divisors(cp)[1:-1] if u * tp <= per_node and can_divide_heads(model, tp, u)]
    if inside and offers.cp_both and (cp * tp > per_node or METHODS[1] not in found):
        found.append((inside[-1], cp // inside[-1]))
    return found


def can_share(sequence: int, tp: int, cp: int, offers: Offers) -> bool:
    """Return whether ranks can share sequences of so many tokens: a ring has two pieces per rank, in zigzag order.

    >>> [can_share(12, *degrees, EVERYTHING) for degrees in ((1, 1), (4, 1), (8, 1), (1, 4), (2, 3))]
    [True, True, False, False, True]
    """
    return sequence % (cp * max(tp if offers.sequence else 1, 2 if cp > 1 else 1)) == 0


def expert_degrees(model: Architecture, offers: Offers, layout: Layout) -> list[int]:
    """Return the numbers of ranks that can divide the experts of a layer, out of those that share shards.

    Where the software has all ranks along cp and tp divide experts, these are among them.
    """
    if not model.experts or not offers.experts:
        return [1]
    inner = layout.cp * layout.tp if offers.inner_experts else 1
    ranks = layout.shards * (layout.tp if offers.inner_experts else 1)
    return [ep for ep in divisors(ranks) if model.experts % ep == 0 and (ep == 1 or ep % inner == 0)]


def divisors(n: int) -> list[int]:
    """Return the divisors of a number, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]
