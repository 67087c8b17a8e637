"""Layout: the degrees of a plan as numbers, of one plan or of a hundred thousand.

Layout   a plan's degrees, with what only some frameworks have; `Layout.stack` makes many of them one of arrays
Stage    what a rank of a pipeline holds: of one layout each rank, of many one of each class of those that hold alike
Shares   how many parameters these ranks compute with, and how many of them they update
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property, reduce
from math import gcd
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpkit.common.arrays import Numbers, at_largest, call_distinct, larger, take, where
from mpkit.plan.kinds import CONTIGUOUS, ZIGZAG, whole
from mpkit.plan.plan import Plan
from mpkit.plan.schedule import Schedule
from mpkit.plan.schedule.catalogue import ONE_F_ONE_B, peak_live, stage_ranks
from mpkit.prediction.cost_model.architecture import Architecture


@dataclass(frozen=True)
class Layout:
    """How the work of a step is divided: one layout, or many at once, each field then an array or what all have.

    Attributes:
        pp, dp, cp, tp, ep, zero, microbatches, virtual_stages, schedule, sequence_parallel, offload, cp_method,
        cp_order, prefetch: as in a Plan; tp is innermost, pp outermost.
        etp: the ranks along tp that share each expert: 1 if each has whole ones; 0: all of them.
        alike: whether the ranks along tp hold the same whole experts, instead of being among those that ep counts.
        microbatch: samples per micro-batch and replica.
        recompute: as in a Plan, or "products": everything but half of the products and the attention.
        cut: the layers of each stage; (): equal numbers, or by weight.
        head: where stages are cut by weight, as nanotron cuts them: as how many layers the head counts; 0: equal
            numbers.
        trainable: the share of the parameters that is trained; the others are frozen (LoRA: Hu et al. 2021).
        sharded: the ranks among which ZeRO shards; 0: all that hold the same weights. Fewer: HSDP.
        load: the rows of the busiest of the ranks that divide experts, divided by the mean.

    >>> Layout(pp=2, dp=4, tp=8, microbatches=16).global_batch
    64
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 0
    alike: bool = False
    zero: int = 0
    microbatch: int = 1
    microbatches: int = 1
    virtual_stages: int = 1
    schedule: str | Schedule = ONE_F_ONE_B
    recompute: str = "none"
    sequence_parallel: bool = False
    offload: str = "none"
    cut: Sequence[int] = ()
    head: float = 0.0
    trainable: float = 1.0
    sharded: int = 0
    cp_method: str = "ring"
    cp_order: str = ZIGZAG
    prefetch: int = 1
    load: float = 1.0

    # ---- many layouts as one

    @classmethod
    def stack(cls, layouts: Sequence[Layout]) -> Layout:
        """Return layouts as one: a field in which they differ is an array.

        >>> both = Layout.stack([Layout(dp=2, zero=3), Layout(dp=4, zero=3)])
        >>> both.dp.tolist(), both.zero, both.ranks.tolist(), both.take(1).dp
        ([2, 4], 3, [2, 4], np.int64(4))
        """
        columns = zip(*map(attrgetter(*_NAMES), layouts), strict=True)
        values: dict[str, Any] = {
            name: column[0] if column.count(column[0]) == len(column) else np.array(column)
            for name, column in zip(_NAMES, columns, strict=True)
        }
        return cls(**values)

    def take(self, rows: Any, **changes: Any) -> Layout:
        """Return some of these layouts, with other fields."""
        values = {field.name: take(getattr(self, field.name), rows) for field in fields(self)}
        return Layout(**(values | changes))

    def one(self, row: int, **changes: Any) -> Layout:
        """Return one of these layouts, in Python's own types."""
        other = self.take(row, **changes)
        values = ((field.name, getattr(other, field.name)) for field in fields(self))
        return Layout(
            **{name: value.item() if isinstance(value, np.generic) else value for name, value in values}
        )

    def vary(self, **changes: Any) -> Layout:
        """Return the layout with other fields, for searches: several times as fast as `replace`."""
        other = object.__new__(Layout)
        other.__dict__.update({name: self.__dict__[name] for name in _NAMES}, **changes)
        return other

    @cached_property
    def shapes(self) -> tuple[Sequence[tuple[str, int, int, int]], NDArray[np.int64]]:
        """The pipelines of many layouts: schedule, pp, stages per rank and micro-batches; and which one each has."""
        columns = self.schedule, self.pp, self.virtual_stages, self.microbatches
        return call_distinct(lambda *shape: shape, *columns)

    # ---- what follows from the degrees

    @cached_property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.pp * self.dp * self.cp * self.tp

    @cached_property
    def replicas(self) -> int:
        """The number of ranks that would hold the same weights without ZeRO: those along dp and cp."""
        return self.dp * self.cp

    @cached_property
    def ulysses(self) -> Numbers:
        """The ranks, out of cp, that divide the heads for attention; the others of a sequence are in a ring."""
        return where(self.cp_method == "ulysses", self.cp, 1)

    @cached_property
    def ring(self) -> int:
        """The ranks, out of cp, that pass keys and values around."""
        inner: int = self.cp // self.ulysses
        return inner

    @cached_property
    def expert_tp(self) -> Numbers:
        """The number of ranks that share each expert."""
        return where(self.etp == 0, self.tp, self.etp)

    @cached_property
    def expert_shards(self) -> Numbers:
        """The number of ranks that hold the same experts, and among which ZeRO shards these."""
        folded = where(self.alike, 1, self.tp // self.expert_tp)
        return larger(1, self.shards * folded // self.ep)

    @cached_property
    def expert_parts(self) -> Numbers:
        """The number of parts into which the work of a token's experts is divided along tp.

        Ranks that share no experts compute those of their own part of the sequence, or all the same.
        """
        return where(self.sequence_parallel, self.tp, self.expert_tp)

    @property
    def busiest(self) -> Numbers:
        """The rows of the busiest rank's experts, divided by the mean of the ranks that divide them."""
        return where(self.load > self.ep, self.ep * 1.0, self.load)

    @cached_property
    def sequence_parts(self) -> Numbers:
        """The number of parts into which a sequence is divided between tensor-parallel layers."""
        return where(self.sequence_parallel, self.tp, 1)

    @cached_property
    def shards(self) -> Numbers:
        """The number of ranks among which ZeRO shards."""
        return where(self.sharded == 0, self.replicas, self.sharded)

    @property
    def groups(self) -> int:
        """The number of ranks that hold the same shard: 1 unless sharding is hybrid."""
        ranks: int = self.replicas // self.shards
        return ranks

    @property
    def global_batch(self) -> int:
        """Samples per step."""
        return self.dp * self.microbatch * self.microbatches

    @property
    def stage_to_rank(self) -> tuple[int, ...]:
        """The rank, along pp, of each stage.

        >>> Layout(pp=2, virtual_stages=2, schedule="zbv").stage_to_rank
        (0, 1, 1, 0)
        """
        return stage_ranks(self.schedule, self.pp, self.virtual_stages)

    def per_node(self, axis: str, devices: int) -> Numbers:
        """Return how many ranks of a group along an axis share a node, in the group that is divided most.

        >>> Layout(tp=8).per_node("tp", 8), Layout(tp=6).per_node("tp", 8)  # ranks 6 and 7, and 8 to 11
        (8, 2)

        Args:
            axis: "tp", "ulysses" and "ring" (the parts of cp), "replicas" (dp and cp), "shards" (those among
                which ZeRO shards), "groups" (those that hold the same shard) or
                "ep": beside each other, and tp apart where the ranks along tp share an expert or hold the same ones;
                "edp": those among which ZeRO shards an expert.
            devices: devices per node.
        """
        tp: Numbers = self.tp
        size: Numbers = getattr(self, "expert_shards" if axis == "edp" else axis)
        if axis == "tp":
            inner: Numbers = 1
        elif axis in ("ep", "edp"):
            inner = where(self.alike, tp, self.expert_tp) * (self.ep if axis == "edp" else 1)
        else:
            inner = tp * {"ring": self.ulysses, "groups": self.shards}.get(axis, 1)
        places = devices // inner
        if isinstance(places, np.ndarray) or isinstance(size, np.ndarray):
            return where(np.asarray(places > 0), np.gcd(size, places), 1)
        return gcd(size, places) if places else 1

    def stage_layers(self, layers: int) -> list[int]:
        """Return the number of layers that each rank of a pipeline holds.

        >>> Layout(pp=4).stage_layers(30)
        [8, 8, 7, 7]
        >>> Layout(pp=2, head=4.0).stage_layers(16)  # the second stage has the head too
        [11, 5]
        """
        if self.cut:
            return list(self.cut)
        if self.head and self.pp > 1:
            return list(_by_weight(layers, self.pp, self.head))
        each, more = divmod(layers, self.pp)
        return [each + (stage < more) for stage in range(self.pp)]


_NAMES = tuple(field.name for field in fields(Layout))
ALIKE = (
    "pp", "dp", "cp", "tp", "ep", "zero", "microbatches", "virtual_stages", "schedule", "recompute",
    "sequence_parallel", "offload", "cp_method", "prefetch",
)  # fmt: skip
"""The fields that are those of a Plan, by name."""


@cache
def _by_weight(layers: int, pp: int, head: float) -> tuple[int, ...]:
    """Return the layers of each stage as nanotron cuts them: a stage ends with the block that exceeds its share."""
    held, stage = [0] * pp, 0
    for layer in range(1, layers + 1):
        held[stage] += 1
        if layer > (layers + head) * (stage + 1) / pp:
            stage += 1
    return tuple(held)


def layout_of(
    plan: Plan, global_batch: int, trainable: float = 1.0, load: float = 1.0
) -> Layout:  # fmt: skip
    """Return a plan's layout for a number of samples per step.

    Raises:
        ValueError: the samples cannot be divided among replicas and micro-batches.

    >>> layout_of(Plan(pp=2, dp=2, schedule="1f1b", microbatches=4), 32).microbatch
    4
    """
    parts = plan.dp * plan.microbatches
    if (whole(global_batch) or 0) < 1:
        raise ValueError(f"global_batch={global_batch!r}: samples per step, a whole number, 1 or more")
    if global_batch % parts:
        near = max(1, round(global_batch / parts)) * parts
        raise ValueError(
            f"global_batch={global_batch} does not divide into dp={plan.dp} replicas x "
            f"microbatches={plan.microbatches} = {parts} micro-batches: global_batch={near} does"
        )
    return Layout(
        **{name: getattr(plan, name) for name in ALIKE}, microbatch=global_batch // parts, trainable=trainable,
        cp_order=plan.cp_order, sharded=plan.shards if plan.dp_shard else 0, load=load,
        etp=1 if plan.ep > 1 and plan.etp in (None, 1) else 0,
        alike=plan.ep > 1 and plan.tp > 1 and plan.etp is None,
    )  # fmt: skip


def plan_of(layout: Layout) -> Plan:
    """Return the plan of a layout, in 16 bits."""
    return Plan(
        **{name: getattr(layout, name) for name in ALIKE}, precision="bf16",
        dp_shard=layout.sharded // layout.cp or None,
        etp=layout.expert_tp if layout.ep > 1 and layout.tp > 1 and not layout.alike else None,
        cp_order=layout.cp_order if layout.ring > 1 else CONTIGUOUS,
    )  # fmt: skip


# ---- stages


class Stage(NamedTuple):
    """What a rank of a pipeline holds: a number each, or an array of one for each of many layouts.

    Attributes:
        kinds: the number of layers, of each kind.
        first, last: whether it has the first stage, and the last one with the head and the loss.
        live: the most micro-batches in flight.
    """

    kinds: tuple[Numbers, ...]
    first: Numbers
    last: Numbers
    live: Numbers

    @property
    def layers(self) -> Numbers:
        """The number of layers."""
        return sum(self.kinds)


def stages_of(model: Architecture, layout: Layout) -> list[Stage]:
    """Return what the ranks of a pipeline hold; of many layouts, one rank of each class of those that hold alike.

    Layouts of fewer classes than others repeat their first one.

    >>> [stage.kinds for stage in stages_of(Architecture(5, 64, 4, experts=4, top_k=2, dense=1), Layout(pp=2))]
    [(1, 2), (0, 2)]
    """
    if not isinstance(layout.ranks * layout.microbatches, np.ndarray):
        return _ranks(model, layout)

    def classes(schedule: str, pp: int, v: int, m: int) -> list[tuple[Any, ...]]:
        shape = Layout(pp=pp, schedule=schedule, virtual_stages=v, microbatches=m, head=layout.head)
        most: dict[tuple[Any, ...], float] = {}
        for kinds, *ends, live in _ranks(model, shape):
            most[*kinds, *ends] = max(live, most.get((*kinds, *ends), 0.0))
        return [(*kind, live) for kind, live in most.items()]

    shapes, which = layout.shapes
    found = [classes(*shape) for shape in shapes]
    most = max(map(len, found))
    table = np.array([[*each, *[each[0]] * (most - len(each))] for each in found], float)[which]
    return [
        Stage(tuple(kinds), first > 0, last > 0, live)
        for *kinds, first, last, live in table.transpose(1, 2, 0)
    ]


def _ranks(model: Architecture, layout: Layout) -> list[Stage]:
    """Return what each rank of one pipeline holds."""
    last = layout.stage_to_rank[-1]
    live = peak_live(layout.schedule, layout.pp, layout.microbatches, layout.virtual_stages)
    found, begin = [], 0
    for rank, count in enumerate(layout.stage_layers(model.layers)):
        end = begin + count
        kinds = tuple(max(0, min(end, i + n) - max(begin, i)) for i, n in model.kinds())
        found.append(Stage(kinds, rank == 0, rank == last, live[rank]))
        begin = end
    return found


# ---- parameters of the ranks


class Share(NamedTuple):
    """The parameters of a rank.

    Attributes:
        weights: as it computes with them, divided by tp, and by ep.
        experts: of these, those of experts, which fewer replicas hold.
        sharded: those in its shard; fewer ranks share experts.
        updated: those that it updates: under ZeRO, of experts too, its part.
    """

    weights: Numbers
    experts: Numbers
    sharded: Numbers
    updated: Numbers


class Shares(NamedTuple):
    """The parameters of the ranks of a layout.

    Attributes:
        ranks: those of the rank of each stage.
        fullest: those of the rank with most.
        layer, layer_experts: of the largest layer, and of its experts.
        edge: those outside the layers, of the first or the last stage.
        layers: the layers of the rank with most.
    """

    ranks: list[Share]
    fullest: Share
    layer: Numbers
    layer_experts: Numbers
    edge: Numbers
    layers: Numbers


def shares_of(model: Architecture, layout: Layout, stages: Sequence[Stage]) -> Shares:
    """Return the parameters of the ranks of a layout.

    >>> gpt2 = Architecture(12, 768, 12, vocabulary=50257, positions=1024, tied=True, bias=True)
    >>> layout = Layout(dp=4, zero=1)
    >>> shares_of(gpt2, layout, stages_of(gpt2, layout)).fullest.updated
    31109952.0
    """
    t, kinds = layout.tp, []
    for first, _ in model.kinds():
        experts, parted = model.expert_parameters(first), model.divided_parameters(first)
        own = experts / (layout.expert_tp * layout.ep)
        kinds.append((model.layer_parameters(first) - experts - parted + parted / t + own, own))
    embedding, head = (
        (every - whole) / t + whole
        for every, whole in zip(
            (model.embedding_parameters, model.head_parameters), model.whole_at_edges, strict=True
        )
    )

    def share_of(stage: Stage) -> Share:
        weights, experts = (
            sum(count * kind[i] for count, kind in zip(stage.kinds, kinds, strict=True)) for i in (0, 1)
        )
        weights = weights + stage.first * embedding + stage.last * head
        if model.tied:  # the last stage holds a copy of the embedding
            weights = weights + (stage.last > stage.first) * (model.vocabulary * model.hidden / t)
        sharded = (weights - experts) / layout.shards + experts / layout.expert_shards
        updated = where(layout.zero > 0, sharded, weights) * layout.trainable
        return Share(weights, experts, sharded, updated)

    ranks = [share_of(stage) for stage in stages]
    fullest = Share(*at_largest([each.weights for each in ranks], *zip(*ranks, strict=True)))
    layer, layer_experts = at_largest([layer for layer, _ in kinds], *zip(*kinds, strict=True))
    layers = reduce(larger, (stage.layers for stage in stages))
    return Shares(ranks, fullest, layer, layer_experts, larger(embedding, head), layers)
