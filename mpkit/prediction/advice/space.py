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

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from mpkit.plan.kinds import METHODS
from mpkit.plan.schedule.catalogue import (
    GPIPE,
    INTERLEAVED_1F1B,
    ONE_F_ONE_B,
    OVERLAPPED_1F1B,
    SCHEDULES,
    has_pairs,
)
from mpkit.prediction.cost_model.architecture import Architecture
from mpkit.prediction.cost_model.check import can_divide_heads
from mpkit.prediction.cost_model.layout import Layout
from mpkit.prediction.cost_model.workload import Workload

GROUPS = (1, 2, 4)
"""Nodes in a group within which ZeRO shards."""
RECOMPUTE = ("none", "selective", *(f"every={k}" for k in (8, 6, 4, 3, 2)), "full")
"""Recomputation, some of it of one of k layers, in the order of what it costs."""


@dataclass(frozen=True)
class Offers:
    """What a stack offers; by default everything that a Plan says.

    Attributes:
        pipelines: its schedules, with their stages per rank v; () if it has no pipelines; None: of all schedules those
            that can be the best.
        axes: of tensor ("tp"), context ("cp"), sequence ("sp") and expert parallelism ("ep"), what it has.
        zero: its stages of ZeRO.
        hybrid: those that it can shard within groups of replicas.
        recompute, offload: as in a Plan, in the order of what they cost.
        joint_recompute: what can be recomputed in a schedule of pairs.
        cp_methods: how ranks that share a sequence attend to the whole of it.
        even: whether it wants as many layers in each virtual stage.
        grouped: whether interleaved schedules want micro-batches in multiples of pp.
        filled: whether a pipeline wants as many micro-batches as it has stages, less one.
        inner_experts: whether all ranks along cp and tp are among those that divide experts.
    """

    pipelines: tuple[tuple[str, int], ...] | None = None
    axes: tuple[str, ...] = ("tp", "cp", "sp", "ep")
    zero: tuple[int, ...] = (0, 1, 2, 3)
    hybrid: tuple[int, ...] = (1, 2, 3)
    recompute: tuple[str, ...] = RECOMPUTE
    offload: tuple[str, ...] = ("none", "optimizer", "params")
    joint_recompute: tuple[str, ...] = RECOMPUTE
    cp_methods: tuple[str, ...] = METHODS
    even: bool = False
    grouped: bool = False
    filled: bool = False
    inner_experts: bool = False

    def schedules(self, pp: int, model: Architecture) -> Iterator[tuple[str, int]]:
        """Yield the schedules of a pipeline with their stages per rank; those of pairs only where there are experts."""
        known = self.pipelines
        if known is None:
            known = tuple((name, v) for name, entry in SCHEDULES.items() for v in entry.advised)
        if pp == 1:
            yield GPIPE, 1
        for schedule, v in known:
            joint = has_pairs(schedule)
            usable = model.experts > 0 and (v > 1) == (pp > 1) if joint else pp > 1
            if usable and pp * v <= model.layers and not (self.even and model.layers % (pp * v)):
                yield schedule, v


EVERYTHING = Offers()

TORCHTITAN = Offers(
    tuple(
        (name, min(s.advised))
        for name, s in SCHEDULES.items()
        if s.advised and s.torchs and not s.pairs  # which it runs one after the other
    ),
    zero=(2, 3), hybrid=(2, 3), recompute=("none", "full"), offload=("none", "params"), cp_methods=METHODS[:1],
    inner_experts=True,
)  # fmt: skip
STAGES = (*range(1, 9), 10, 12, 14, 16)
MEGATRON = tuple((ONE_F_ONE_B if v == 1 else INTERLEAVED_1F1B, v) for v in STAGES)
FSDP = Offers((), (), zero=(2, 3), hybrid=(2, 3), recompute=("none", "full"), offload=("none",))
OFFERS: Mapping[str, Offers] = {
    "megatron-2021": Offers(
        MEGATRON, ("tp",), (0,), (), ("full",), ("none",), even=True, grouped=True
    ),
    "megatron": Offers(  # stages of unlike numbers of layers: --pipeline-model-parallel-layout
        (*MEGATRON, *((OVERLAPPED_1F1B, v) for v in STAGES)), zero=(0, 1), hybrid=(1,), offload=("none",),
        joint_recompute=("none", "selective"), grouped=True,
    ),
    "deepspeed-2021": Offers((), (), hybrid=(), recompute=("none", "full")),
    "deepspeed": Offers((), ("cp",), hybrid=(3,), recompute=("none", "full"), cp_methods=METHODS[1:]),
    "llm-foundry": FSDP,
    "llm-foundry-pure": FSDP,
    "nanotron": Offers(((ONE_F_ONE_B, 1),), ("tp", "sp"), (0, 1), (), ("none",), ("none",), filled=True),
    "torchtitan": TORCHTITAN,
    "torchtitan-compile": TORCHTITAN,
}  # fmt: skip
"""Sources: Narayanan et al. 2021 (SC'21, which recomputes everything); the documentation of Megatron-LM, DeepSpeed,
llm-foundry, nanotron and torchtitan. Where mpkit writes a stack's files, tests/advice holds that they say the plans."""


def offers_of(stack: str) -> Offers:
    """Return what a stack offers; everything if nothing else is known of it."""
    return OFFERS.get(stack, EVERYTHING)


def families(asked: Workload, devices: int) -> Iterator[tuple[Layout, list[int]]]:
    """Yield layouts that differ in more than the samples of a micro-batch, each with the numbers that these can be.

    Args:
        asked: what is to be trained, on a machine of as many devices or more.
        devices: all of them are used; tensor parallelism goes up to four nodes.
    """
    model, per_node, offers = asked.model, asked.hardware.per_node, offers_of(asked.stack.name)
    for mesh in _meshes(asked, devices, offers):
        samples = asked.global_batch // mesh.dp
        methods = [METHODS[0]]
        if mesh.cp > 1:
            ulysses = can_divide_heads(model, mesh.tp, mesh.cp)
            methods = [each for each in offers.cp_methods if each == METHODS[0] or ulysses]
        for schedule, v in offers.schedules(mesh.pp, model):
            groups = mesh.pp if offers.grouped and v > 1 else 1  # of micro-batches
            least = mesh.pp - 1 if offers.filled else 0
            sizes = [n for n in divisors(samples) if samples // n % groups == 0 and samples // n >= least]
            joint = has_pairs(schedule)
            for (zero, sharded), method in product(
                _shardings(mesh, offers, per_node), methods if sizes else ()
            ):
                base = mesh.vary(
                    schedule=schedule, virtual_stages=v, zero=zero, sharded=sharded, cp_method=method
                )
                for experts in expert_changes(model, offers, base):
                    if not joint or experts["ep"] > 1:  # else there is nothing to hide
                        yield base.vary(**experts), sizes


def _meshes(asked: Workload, devices: int, offers: Offers) -> Iterator[Layout]:
    """Yield the meshes of so many devices."""
    model, axes = asked.model, offers.axes
    for tp in divisors(devices) if "tp" in axes else [1]:
        if tp > 4 * asked.hardware.per_node or model.heads % tp or model.ffn % tp:
            continue
        for cp in divisors(devices // tp) if "cp" in axes else [1]:
            # A ring has two pieces of a sequence per rank, in zigzag order.
            if asked.sequence % (cp * max(tp if "sp" in axes else 1, 2 if cp > 1 else 1)):
                continue
            for pp in [1] if offers.pipelines == () else divisors(devices // tp // cp):
                dp = devices // tp // cp // pp
                if pp <= model.layers and asked.global_batch % dp == 0:
                    yield Layout(
                        pp=pp, dp=dp, cp=cp, tp=tp, sequence_parallel=tp > 1 and "sp" in axes, head=asked.head,
                        load=asked.load, trainable=asked.trainable,
                    )  # fmt: skip


def _shardings(mesh: Layout, offers: Offers, per_node: int) -> Iterator[tuple[int, int]]:
    """Yield stages of ZeRO with the ranks among which they shard."""
    n = mesh.replicas
    parts = [nodes * per_node // mesh.tp for nodes in GROUPS if nodes * per_node % (mesh.tp * mesh.cp) == 0]
    parts = [part for part in parts if 1 < part < n and n % part == 0]
    for zero in offers.zero if n > 1 else [0]:
        yield zero, 0
        yield from ((zero, part) for part in parts if zero in offers.hybrid)


def expert_changes(model: Architecture, offers: Offers, layout: Layout) -> list[dict[str, Any]]:
    """Return the ways to divide a layer's experts among ranks that share shards, as fields of a layout.

    Beside sequence parallelism the ranks along tp are among them (folding: Liu et al. 2025, arXiv 2504.14960). Where
    the software has all ranks along cp and tp divide experts, these are. Ranks along tp have whole experts (etp = 1),
    or, where tensor parallelism divides experts, a part of each (etp = tp, which is 0 in a layout). Ranks that hold the
    same experts without need are left out: folded they hold fewer.

    >>> mixtral = Architecture(32, 4096, 32, ffn=14336, experts=8, top_k=2)
    >>> expert_changes(mixtral, EVERYTHING, Layout(dp=2, tp=2, sequence_parallel=True))
    [{'ep': 1, 'etp': 0}, {'ep': 2, 'etp': 1}, {'ep': 2, 'etp': 0}, {'ep': 4, 'etp': 1}]
    """
    found: list[dict[str, Any]] = [
        {"ep": 1, **({"etp": 1, "alike": True} if model.whole_experts else {"etp": 0})}
    ]
    if not model.experts or "ep" not in offers.axes:
        return found
    inner = layout.cp * layout.tp if offers.inner_experts else 1
    whole = model.whole_experts or offers.inner_experts or (model.expert_ffn or model.ffn) % layout.tp
    parts = layout.tp > 1 and not whole
    for ep in divisors(layout.shards * (layout.tp if layout.sequence_parallel else 1))[1:]:
        if model.experts % ep == 0 and ep % inner == 0:
            found.append({"ep": ep, "etp": 1})
            if parts and layout.shards % ep == 0:
                found.append({"ep": ep, "etp": 0})
    return found


def divisors(n: int) -> list[int]:
    """Return the divisors of a number, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]
