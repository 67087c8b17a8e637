"""Offers: what a software stack can do, so that only such plans are advised.

Plain PyTorch and mpkit can do everything that a Plan says. Of the other stacks it is what their documentation lists, or
for a stack of a year what the paper of that year describes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpkit.plan.kinds import CONTIGUOUS, METHODS, ORDERS, ZIGZAG
from mpkit.plan.schedule.catalogue import (
    GPIPE,
    INTERLEAVED_1F1B,
    ONE_F_ONE_B,
    OVERLAPPED_1F1B,
    SCHEDULES,
    has_pairs,
)
from mpkit.prediction.cost_model.layout import Layout

__all__ = ["EVERYTHING", "Offers", "missing_feature", "offers_of"]


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
        if s.advised and "torchtitan" in s.elsewhere and not s.pairs  # which it runs one after the other
    ),
    (2, 3), ("none", "full"), ("none", "params"), hybrid=(2, 3), cp_methods=METHODS[:1],
    cp_orders=(CONTIGUOUS, ZIGZAG), inner_experts=True,
)  # fmt: skip

MEGATRON = tuple((ONE_F_ONE_B if v == 1 else INTERLEAVED_1F1B, v) for v in (*range(1, 9), 10, 12, 14, 16))

OFFERS: Mapping[str, Offers] = {
    "megatron-2021": Offers(
        MEGATRON,
        (0,),
        ("full",),
        ("none",),
        context=False,
        sequence=False,
        even=True,
        grouped=True,
        experts=False,
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
        (),
        recompute=("none", "full"),
        tensor=False,
        sequence=False,
        hybrid=(3,),
        cp_methods=METHODS[1:],
        experts=False,
    ),
    "llm-foundry": Offers(
        (),
        (2, 3),
        ("none", "full"),
        ("none",),
        tensor=False,
        context=False,
        sequence=False,
        hybrid=(2, 3),
        experts=False,
    ),
    "llm-foundry-pure": Offers(
        (),
        (2, 3),
        ("none", "full"),
        ("none",),
        tensor=False,
        context=False,
        sequence=False,
        hybrid=(2, 3),
        experts=False,
    ),
    "nanotron": Offers(
        ((ONE_F_ONE_B, 1),), (0, 1), ("none",), ("none",), context=False, filled=True, experts=False
    ),
    "torchtitan": TORCHTITAN,
    "torchtitan-compile": TORCHTITAN,
}
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
    has = offers_of(stack)
    asked = [
        (
            f"ZeRO-{layout.zero}",
            layout.zero in has.zero or layout.replicas == 1,
            _list_values("ZeRO-", has.zero),
        ),
        (
            f"ZeRO-{layout.zero} within groups",
            not layout.sharded or layout.zero in has.hybrid,
            _list_values("ZeRO-", has.hybrid),
        ),
        ("tensor parallelism", has.tensor or layout.tp == 1, ""),
        ("context parallelism", has.context or layout.cp == 1, ""),
        (
            f"cp_method={layout.cp_method!r}",
            layout.cp == 1 or layout.cp_method in has.cp_methods,
            _list_values("", has.cp_methods),
        ),
        (
            f"cp_order={layout.cp_order!r}",
            layout.ring == 1 or layout.cp_order in has.cp_orders,
            _list_values("", has.cp_orders),
        ),
        ("expert parallelism", has.experts or layout.ep == 1, ""),
        ("sequence parallelism", has.sequence or layout.tp == 1 or not layout.sequence_parallel, ""),
        ("pipelines", bool(has.schedules) or layout.pp == 1, ""),
        (
            f"schedule {layout.schedule!r}",
            (layout.pp == 1 and not has_pairs(layout.schedule))
            or has is EVERYTHING
            or layout.schedule in {GPIPE, *dict(has.schedules)},
            _list_values("", tuple(dict(has.schedules))),
        ),
        (
            f"recompute={layout.recompute!r}",
            layout.recompute in (has.joint_recompute if has_pairs(layout.schedule) else has.recompute)
            or layout.recompute not in EVERYTHING.recompute,
            _list_values("", has.recompute),
        ),
        (f"offload={layout.offload!r}", layout.offload in has.offload, _list_values("", has.offload)),
    ]
    missing = next(((what, others) for what, offered, others in asked if not offered), None)
    if missing is None:
        return ""
    what, others = missing
    return f"{stack} has no {what}" + (f": it has {others}" if others else "")


def _list_values(kind: str, values: Sequence[object]) -> str:
    return ", ".join(f"{kind}{value}" if kind else repr(value) for value in values)
