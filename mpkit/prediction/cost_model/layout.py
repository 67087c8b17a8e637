"""Layout: the degrees of a plan as numbers, of one plan or of a hundred thousand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache, reduce
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
    """How the work of a step is divided: one layout, or many at once, whose fields are arrays or values that all share.

    Fields without a comment are those of a Plan; tp is innermost, pp outermost.
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 0  # the ranks along tp that share each expert: 1 if each has whole ones; 0: all of them
    alike: bool = False  # whether ranks along tp hold the same whole experts, instead of counting towards ep
    zero: int = 0
    microbatch: int = 1  # samples per micro-batch and replica
    microbatches: int = 1
    virtual_stages: int = 1
    schedule: str | Schedule = ONE_F_ONE_B
    recompute: str = "none"  # or "products": everything but half of the products and the attention
    sequence_parallel: bool = False
    offload: str = "none"
    cut: Sequence[int] = ()  # the layers of each stage; (): equal numbers, or by weight
    head: float = 0.0  # the head in layers if stages are cut by weight (nanotron); 0: equal numbers
    trainable: float = 1.0  # the share of parameters that is trained (LoRA: Hu et al. 2021)
    sharded: int = 0  # the ranks among which ZeRO shards; 0: all that hold the same weights. Fewer: HSDP
    cp_method: str = "ring"
    cp_order: str = ZIGZAG
    prefetch: int = 1
    load: float = 1.0  # the rows of the busiest rank that divides experts, divided by the mean

    # ---- many layouts as one

    @classmethod
    def stack(cls, layouts: Sequence[Layout]) -> Layout:
        """Return layouts as one: a field in which they differ is an array."""
        columns = zip(*map(attrgetter(*_NAMES), layouts), strict=True)
        values: dict[str, Any] = {
            name: column[0] if column.count(column[0]) == len(column) else np.array(column)
            for name, column in zip(_NAMES, columns, strict=True)
        }
        return cls(**values)

    @classmethod
    def of(cls, names: Sequence[str], values: Sequence[Any]) -> Layout:
        """Return a layout of some fields; the others have their defaults."""
        return _NOTHING.vary(**dict(zip(names, values, strict=True)))

    def take(self, rows: Any, **changes: Any) -> Layout:
        """Return some of these layouts, with other fields."""
        values = {name: take(getattr(self, name), rows) for name in _NAMES}
        return Layout(**(values | changes))

    def one(self, row: int, **changes: Any) -> Layout:
        """Return one of these layouts, in Python's own types."""
        other = self.take(row, **changes)
        values = ((name, getattr(other, name)) for name in _NAMES)
        return Layout(**{name: v.item() if isinstance(v, np.generic) else v for name, v in values})

    def vary(self, **changes: Any) -> Layout:
        """Return the layout with other fields; several times as fast as `replace`."""
        other = object.__new__(Layout)
        other.__dict__.update({name: self.__dict__[name] for name in _NAMES}, **changes)
        return other

    @cached_property
    def shapes(self) -> tuple[Sequence[tuple[str, int, int, int]], NDArray[np.int64]]:
        """The distinct (schedule, pp, stages per rank, micro-batches) of many layouts, and which one each has."""
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
        """The ranks of cp that divide the heads for attention; the others form a ring."""
        return where(self.cp_method == "ulysses", self.cp, 1)

    @cached_property
    def ring(self) -> Numbers:
        """The ranks of cp that pass keys and values around."""
        return self.cp // self.ulysses

    @cached_property
    def expert_tp(self) -> Numbers:
        """The number of ranks that share each expert."""
        return where(self.etp == 0, self.tp, self.etp)

    @cached_property
    def expert_shards(self) -> Numbers:
        """The number of ranks that hold the same experts, among which ZeRO shards them."""
        folded = where(self.alike, 1, self.tp // self.expert_tp)
        return larger(1, self.shards * folded // self.ep)

    @cached_property
    def expert_parts(self) -> Numbers:
        """The number of parts, along tp, of a token's work in experts: of the sequence, or else of each expert."""
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
    def groups(self) -> Numbers:
        """The number of ranks that hold the same shard: 1 unless sharding is hybrid."""
        return self.replicas // self.shards

    @property
    def global_batch(self) -> int:
        """Samples per step."""
        return self.dp * self.microbatch * self.microbatches

    def per_node(self, axis: str, devices: int) -> Numbers:
        """Return how many ranks of a group along an axis share a node, in the group that is divided most.

        Axes beside those of a plan: "ulysses" and "ring" (parts of cp), "replicas" (dp and cp), "shards" (those among
        which ZeRO shards), "groups" (those that hold the same shard) and "edp" (those that shard an expert). Ranks of
        "ep" are neighbours, or tp apart if the ranks along tp share an expert or hold the same ones.
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


_NAMES = tuple(field.name for field in fields(Layout))
_NOTHING = Layout()
ALIKE = (  # the fields that are those of a Plan
    "pp", "dp", "cp", "tp", "ep", "zero", "microbatches", "virtual_stages", "schedule", "recompute",
    "sequence_parallel", "offload", "cp_method", "prefetch",
)  # fmt: skip
OF_MICROBATCH = (  # the fields that decide what a layer computes, sends and keeps of a micro-batch
    "microbatch", "cp", "tp", "ep", "etp", "alike", "sequence_parallel", "cp_method", "cp_order", "trainable", "load",
)  # fmt: skip


def layout_of(plan: Plan, global_batch: int, trainable: float = 1.0, load: float = 1.0) -> Layout:
    """Return a plan's layout for a number of samples per step."""
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


def remembered(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a pure function that remembers its answers; it computes those of arrays, which have no hash, each time."""
    known = lru_cache(4096)(function)

    def call(*values: Any) -> Any:
        try:
            return known(*values)
        except TypeError:
            return function(*values)

    return call


class Stage(NamedTuple):
    """What a rank of a pipeline holds: a number each, or an array of one for each of many layouts."""

    kinds: tuple[Numbers, ...]  # layers of each kind
    layers: Numbers
    first: Numbers  # whether it has the first stage
    last: Numbers  # whether it has the last stage, with the head and the loss
    live: Numbers  # the most micro-batches in flight


def stages_of(model: Architecture, layout: Layout) -> Sequence[Stage]:
    """Return what the ranks of a pipeline hold; of many layouts, one rank of each class of those that hold alike.

    Layouts of fewer classes than others repeat their first one.

    >>> [stage.kinds for stage in stages_of(Architecture(5, 64, 4, experts=4, top_k=2, dense=1), Layout(pp=2))]
    [(1, 2), (0, 2)]
    """
    kinds = model.kinds()
    shape = layout.schedule, layout.pp, layout.virtual_stages, layout.microbatches
    if not isinstance(layout.ranks * layout.microbatches, np.ndarray):
        return _ranks(kinds, *shape, layout.head, tuple(layout.cut))

    def classes(*shape: Any) -> list[tuple[Any, ...]]:
        most: dict[tuple[Any, ...], float] = {}
        for held, *ends, live in _ranks(kinds, *shape, layout.head):
            most[*held, *ends] = max(live, most.get((*held, *ends), 0.0))
        return [(*kind, live) for kind, live in most.items()]

    shapes, which = layout.shapes
    found = [classes(*shape) for shape in shapes]
    most = max(map(len, found))
    table = np.array([[*each, *[each[0]] * (most - len(each))] for each in found], float)[which]
    return [
        Stage(tuple(held), layers, first > 0, last > 0, live)
        for *held, layers, first, last, live in table.transpose(1, 2, 0)
    ]


@lru_cache(4096)
def _ranks(
    model: tuple[tuple[int, int], ...], schedule: str | Schedule, pp: int, v: int, m: int, head: float,
    cut: tuple[int, ...] = (),
) -> list[Stage]:  # fmt: skip
    """Return what each rank of one pipeline holds of a model's kinds of layers."""
    last, live = stage_ranks(schedule, pp, v)[-1], peak_live(schedule, pp, m, v)
    found, begin = [], 0
    for rank, count in enumerate(cut or stage_layers(sum(n for _, n in model), pp, head)):
        end = begin + count
        kinds = tuple(max(0, min(end, i + n) - max(begin, i)) for i, n in model)
        found.append(Stage(kinds, count, rank == 0, rank == last, live[rank]))
        begin = end
    return found


def stage_layers(layers: int, pp: int, head: float = 0.0) -> list[int]:
    """Return the number of layers that each rank of a pipeline holds.

    By weight, as nanotron cuts, a stage ends with the block that exceeds its share.

    >>> stage_layers(30, 4), stage_layers(16, 2, head=4.0)  # the second stage has the head too
    ([8, 8, 7, 7], [11, 5])
    """
    if not head or pp == 1:
        each, more = divmod(layers, pp)
        return [each + (stage < more) for stage in range(pp)]
    held, stage = [0] * pp, 0
    for layer in range(1, layers + 1):
        held[stage] += 1
        if layer > (layers + head) * (stage + 1) / pp:
            stage += 1
    return held


# ---- parameters of the ranks


class Share(NamedTuple):
    """The parameters of a rank."""

    weights: Numbers  # those it computes with, divided by tp, and by ep
    experts: Numbers  # those of experts among them, which fewer replicas hold
    sharded: Numbers  # those in its shard; fewer ranks share experts
    updated: Numbers  # those it updates: under ZeRO its shard


class Shares(NamedTuple):
    """The parameters of the ranks of a layout."""

    ranks: list[Share]  # of the rank of each stage
    fullest: Share  # of the rank with most
    layer: Numbers  # of the largest layer
    layer_experts: Numbers  # of its experts
    edge: Numbers  # outside the layers, of the first or the last stage
    layers: Numbers  # the layers of the rank with most


def shares_of(model: Architecture, layout: Layout, stages: Sequence[Stage]) -> Shares:
    """Return the parameters of the ranks of a layout."""
    held, *of_layers = _weights(model, tuple(stages), layout.tp, layout.expert_tp * layout.ep)

    def share_of(weights: Numbers, experts: Numbers) -> Share:
        sharded = (weights - experts) / layout.shards + experts / layout.expert_shards
        updated = where(layout.zero > 0, sharded, weights) * layout.trainable
        return Share(weights, experts, sharded, updated)

    ranks = [share_of(*each) for each in held]
    fullest = Share(*at_largest([each.weights for each in ranks], *zip(*ranks, strict=True)))
    return Shares(ranks, fullest, *of_layers)


@remembered
def _weights(model: Architecture, stages: Sequence[Stage], tp: Numbers, expert_parts: Numbers) -> Any:
    """Return the parameters that each rank computes with and its experts', and the last four fields of `Shares`."""
    kinds = []
    for first, _ in model.kinds():
        experts, parted = model.expert_parameters(first), model.divided_parameters(first)
        own = experts / expert_parts
        kinds.append((model.layer_parameters(first) - experts - parted + parted / tp + own, own))
    edges = zip((model.embedding_parameters, model.head_parameters), model.whole_at_edges, strict=True)
    embedding, head = ((every - whole) / tp + whole for every, whole in edges)
    held = []
    for stage in stages:
        of_kinds = list(zip(stage.kinds, kinds, strict=True))
        weights, experts = (sum(count * kind[i] for count, kind in of_kinds) for i in (0, 1))
        weights = weights + stage.first * embedding + stage.last * head
        if model.tied:  # the last stage holds a copy of the embedding
            weights = weights + (stage.last > stage.first) * (model.vocabulary * model.hidden / tp)
        held.append((weights, experts))
    largest = at_largest([layer for layer, _ in kinds], *zip(*kinds, strict=True))
    return held, *largest, larger(embedding, head), reduce(larger, (stage.layers for stage in stages))
