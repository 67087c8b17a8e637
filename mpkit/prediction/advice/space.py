"""Space: every layout by which a batch of a model can be trained on a number of devices.

    mesh         pp x dp x tp x cp = devices, where tp divides heads and MLP, cp the sequence, dp the batch
    cp_method    a ring, in zigzag order; Ulysses if the heads can be divided
    ep           each divisor of the ranks that hold the same weights which divides the experts, if there are any
    etp          1, or tp where tensor parallelism divides experts
    schedule     that the software has (`Offers`), with its stages per rank; accumulation
                 without stages; pairs (F & B) where experts are divided, whose all-to-alls they hide
    zero         of those that it has, 0 to 3; on several nodes also sharded within groups of 1, 2 or 4 of them
    microbatch   each divisor of a replica's samples

A stack's offers are what it can do, so that only such plans are advised. Plain PyTorch and mpkit can do everything that
a Plan says; of the other stacks it is what their documentation lists, or for a stack of a year what the paper of that
year describes.

Recomputation and offload are not enumerated here: they only ever cost time, so the search adds them where memory asks
for them (`mpkit.prediction.advice.search`). Sequence parallelism, where there is any, is on beside tp: it sends as
much and holds less.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from mpkit.plan.kinds import CONTIGUOUS, METHODS, ORDERS, ZIGZAG
from mpkit.plan.schedule.catalogue import (
    GPIPE,
    INTERLEAVED_1F1B,
    ONE_F_ONE_B,
    OVERLAPPED_1F1B,
    SCHEDULES,
    has_pairs,
)
from mpkit.prediction.cost_model.architecture import Architecture
from mpkit.prediction.cost_model.check import can_divide_experts, can_divide_heads
from mpkit.prediction.cost_model.layout import Layout

__all__ = [
    "EVERYTHING", "LayoutFamily", "Offers", "TrainingQuestion", "can_share", "cp_methods", "divisors",
    "expert_changes", "expert_degrees", "families", "missing_feature", "offers_of",
]  # fmt: skip


GROUPS = (1, 2, 4)
"""Nodes in a group within which ZeRO shards."""
SOME = tuple(f"every={k}" for k in (8, 6, 4, 3, 2))
"""Recomputation of one of k layers, in the order of what it costs."""


@dataclass(frozen=True)
class Offers:
    """What a stack offers.

    Attributes:
        pipelines: its schedules, with their stages per rank v; () if it has no pipelines; None: every schedule.
        zero: its stages of ZeRO.
        hybrid: those that it can shard within groups of replicas.
        recompute, offload: as in a Plan, in the order of what they cost.
        tensor, context, sequence: whether it has tensor, context and sequence parallelism.
        even: whether it wants as many layers in each virtual stage.
        grouped: whether interleaved schedules want micro-batches in multiples of pp.
        filled: whether a pipeline wants as many micro-batches as it has stages, less one.
        experts: whether it divides experts over ranks, and its files say so.
        inner_experts: whether all ranks along cp and tp are among those that divide them.
        cp_methods: how ranks that share a sequence attend to the whole of it.
        cp_orders: which parts of a sequence its ranks can have.
        joint_recompute: what can be recomputed in a schedule of pairs.
    """

    pipelines: tuple[tuple[str, int], ...] | None = None
    zero: tuple[int, ...] = (0, 1, 2, 3)
    recompute: tuple[str, ...] = ("none", "selective", *SOME, "full")
    offload: tuple[str, ...] = ("none", "optimizer", "params")
    tensor: bool = True
    context: bool = True
    sequence: bool = True
    even: bool = False
    grouped: bool = False
    filled: bool = False
    hybrid: tuple[int, ...] = ()
    cp_methods: tuple[str, ...] = METHODS
    cp_orders: tuple[str, ...] = ORDERS
    experts: bool = True
    inner_experts: bool = False
    joint_recompute: tuple[str, ...] = ("none", "selective", *SOME, "full")

    @property
    def schedules(self) -> tuple[tuple[str, int], ...]:
        """The schedules that are tried, with their stages per rank; of all schedules those that can be the best."""
        if self.pipelines is not None:
            return self.pipelines
        return tuple((name, v) for name, entry in SCHEDULES.items() for v in entry.advised)


EVERYTHING = Offers(hybrid=(1, 2, 3))

TORCHTITAN = Offers(
    tuple(
        (name, min(s.advised))
        for name, s in SCHEDULES.items()
        if s.advised and s.torchs and not s.pairs  # which it runs one after the other
    ),
    (2, 3), ("none", "full"), ("none", "params"), hybrid=(2, 3), cp_methods=METHODS[:1],
    cp_orders=(CONTIGUOUS, ZIGZAG), inner_experts=True,
)  # fmt: skip

MEGATRON = tuple((ONE_F_ONE_B if v == 1 else INTERLEAVED_1F1B, v) for v in (*range(1, 9), 10, 12, 14, 16))

_FSDP = Offers(
    (), (2, 3), ("none", "full"), ("none",), tensor=False, context=False, sequence=False, hybrid=(2, 3), experts=False
)  # fmt: skip

OFFERS: Mapping[str, Offers] = {
    "megatron-2021": Offers(
        MEGATRON, (0,), ("full",), ("none",), context=False, sequence=False, even=True, grouped=True, experts=False
    ),
    "megatron": Offers(
        (*MEGATRON, *((OVERLAPPED_1F1B, v) for _, v in MEGATRON)),
        (0, 1),
        offload=("none",),
        grouped=True,  # stages of unlike numbers of layers: --pipeline-model-parallel-layout
        hybrid=(1,),
        cp_orders=(ZIGZAG,),
        joint_recompute=("none", "selective"),
    ),
    "deepspeed-2021": Offers(
        (), recompute=("none", "full"), tensor=False, context=False, sequence=False, experts=False
    ),
    "deepspeed": Offers(
        (), recompute=("none", "full"), tensor=False, sequence=False, hybrid=(3,), cp_methods=METHODS[1:],
        experts=False,
    ),
    "llm-foundry": _FSDP,
    "llm-foundry-pure": _FSDP,
    "nanotron": Offers(
        ((ONE_F_ONE_B, 1),), (0, 1), ("none",), ("none",), context=False, filled=True, experts=False
    ),
    "torchtitan": TORCHTITAN,
    "torchtitan-compile": TORCHTITAN,
}  # fmt: skip
"""Sources: Narayanan et al. 2021 (SC'21, which recomputes everything); the documentation of Megatron-LM, DeepSpeed,
llm-foundry, nanotron and torchtitan. Where mpkit writes a stack's files, tests/advice holds that they say the plans."""


def offers_of(stack: str) -> Offers:
    """Return what a stack offers; everything if nothing else is known of it.

    >>> offers_of("nanotron").schedules, offers_of("pytorch") is EVERYTHING
    ((('1f1b', 1),), True)
    """
    return OFFERS.get(stack, EVERYTHING)


def missing_feature(stack: str, layout: Layout) -> str:
    """Say what a layout asks for that a stack does not offer, with what it has; "" if nothing.

    >>> missing_feature("nanotron", Layout(dp=8, zero=3))
    'nanotron has no ZeRO-3: it has ZeRO-0, ZeRO-1'
    """
    has, joint = offers_of(stack), has_pairs(layout.schedule)
    zeros, hybrid = ([f"ZeRO-{stage}" for stage in stages] for stages in (has.zero, has.hybrid))
    schedules = {GPIPE, *dict(has.schedules)}
    known = (layout.pp == 1 and not joint) or has is EVERYTHING or layout.schedule in schedules
    recompute = has.joint_recompute if joint else has.recompute
    again = layout.recompute in recompute or layout.recompute not in EVERYTHING.recompute
    asked: list[tuple[str, bool, Sequence[str]]] = [
        (f"ZeRO-{layout.zero}", layout.zero in has.zero or layout.replicas == 1, zeros),
        (f"ZeRO-{layout.zero} within groups", not layout.sharded or layout.zero in has.hybrid, hybrid),
        ("tensor parallelism", has.tensor or layout.tp == 1, ()),
        ("context parallelism", has.context or layout.cp == 1, ()),
        (
            f"cp_method={layout.cp_method!r}",
            layout.cp == 1 or layout.cp_method in has.cp_methods,
            has.cp_methods,
        ),
        (
            f"cp_order={layout.cp_order!r}",
            layout.ring == 1 or layout.cp_order in has.cp_orders,
            has.cp_orders,
        ),
        ("expert parallelism", has.experts or layout.ep == 1, ()),
        ("sequence parallelism", has.sequence or layout.tp == 1 or not layout.sequence_parallel, ()),
        ("pipelines", bool(has.schedules) or layout.pp == 1, ()),
        (f"schedule {layout.schedule!r}", known, tuple(dict(has.schedules))),
        (f"recompute={layout.recompute!r}", again, has.recompute),
        (f"offload={layout.offload!r}", layout.offload in has.offload, has.offload),
    ]
    missing = next(((what, others) for what, offered, others in asked if not offered), None)
    if missing is None:
        return ""
    others = ", ".join(each if each.startswith("ZeRO") else repr(each) for each in missing[1])
    return f"{stack} has no {missing[0]}" + (f": it has {others}" if others else "")


# ---- layouts


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
