"""Search: every layout by which some devices can train a batch; those that fit, with times; and what is best of them.

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
year describes. Sequence parallelism, where there is any, is on beside tp: it sends as much and holds less.

Then, for all these layouts at once, as one `Layout` of arrays:

    relief     offload and recomputation, in the order of what they cost: the cheapest that fits is the best of them;
               what does not fit with the most recomputation never does
    room       plans that leave a part of the memory free; those that fill it are kept apart
    time       priced for what fits only; a formula stands for the pipeline, and the best layouts are then played

What is left out is never better than what is kept, as tests/advice/test_advice.py shows.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib.resources import files
from itertools import product
from math import inf
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from mpkit.common.units import percent, seconds
from mpkit.plan.kinds import METHODS, every, real
from mpkit.plan.plan import Plan
from mpkit.plan.schedule.catalogue import GPIPE, SCHEDULES, has_pairs
from mpkit.prediction.cost_model.architecture import Architecture
from mpkit.prediction.cost_model.layout import Layout, plan_of
from mpkit.prediction.cost_model.memory import most_at_peak
from mpkit.prediction.cost_model.workload import Workload, can_divide_heads

Indices = NDArray[np.int64]
Floats = NDArray[np.float64]

PLAYED = 25  # the layouts that are played, for the order of those that are shown
FEW = 5  # the layouts that are played of those that fill the memory
CHUNK = 1 << 14  # the layouts that are priced at once: their arrays fit a cache
LONGEST = 4096  # the most actions of a schedule that are played for them; `mk.estimate` plays more
HEADROOM = 0.92
"""The share of a device's memory that a plan may take: predictions of memory are within 5 %, and batches differ."""


# ---- every layout

GROUPS = (1, 2, 4)  # nodes in a group within which ZeRO shards
RECOMPUTE = ("none", "selective", *(f"every={k}" for k in (8, 6, 4, 3, 2)), "full")
"""Recomputation, some of it of one of k layers, in the order of what it costs."""


@dataclass(frozen=True)
class Offers:
    """What a stack offers; by default everything that a Plan says."""

    # Schedules with stages per rank v; (): none; None: all that can be the best
    pipelines: tuple[tuple[str, int], ...] | None = None
    axes: tuple[str, ...] = ("tp", "cp", "sp", "ep")
    zero: tuple[int, ...] = (0, 1, 2, 3)  # its stages of ZeRO
    hybrid: tuple[int, ...] = (1, 2, 3)  # those that it can shard within groups of replicas
    recompute: tuple[str, ...] = RECOMPUTE  # in the order of what they cost, like offload
    offload: tuple[str, ...] = ("none", "optimizer", "params")
    joint_recompute: tuple[str, ...] = RECOMPUTE  # what can be recomputed in a schedule of pairs
    cp_methods: tuple[str, ...] = METHODS  # how ranks that share a sequence attend to the whole of it
    even: bool = False  # whether every virtual stage needs the same number of layers
    grouped: bool = False  # whether interleaved schedules need micro-batches in multiples of pp
    filled: bool = False  # whether a pipeline needs as many micro-batches as stages, less one
    inner_experts: bool = False  # whether all ranks along cp and tp are among those that divide experts

    def schedules(self, pp: int, model: Architecture) -> Iterator[tuple[str, int]]:
        """Yield the schedules of a pipeline with their stages per rank; pairs only if there are experts."""
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


@cache
def _offers() -> dict[str, Offers]:
    rows = tomllib.loads(files("mpkit.prediction.advice").joinpath("offers.toml").read_text("utf-8"))
    # torchtitan runs pairs one after the other, which gains nothing.
    known = SCHEDULES.items()
    torchs = {name: [min(s.advised)] for name, s in known if s.advised and s.torchs and not s.pairs}
    found: dict[str, Offers] = {}
    for names, row in rows.items():
        for name, value in row.items():
            if name == "pipelines":
                stages = torchs if value == "torch's" else value
                row[name] = tuple((schedule, v) for schedule, each in stages.items() for v in each)
            elif isinstance(value, list):
                row[name] = tuple(value)
        found |= dict.fromkeys(names.split(), Offers(**row))
    return found


def offers_of(stack: str) -> Offers:
    """Return what a stack offers; everything if it is not listed."""
    return _offers().get(stack, EVERYTHING)


def families(asked: Workload, devices: int) -> Iterator[tuple[Layout, list[int]]]:
    """Yield layouts that use all devices, each with the possible numbers of samples of a micro-batch."""
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
            pipeline = mesh.vary(schedule=schedule, virtual_stages=v)
            shardings = _shardings(mesh, offers, per_node)
            for (zero, sharded), method in product(shardings, methods if sizes else ()):
                base = pipeline.vary(zero=zero, sharded=sharded, cp_method=method)
                for experts in expert_changes(model, offers, base):
                    if not joint or experts["ep"] > 1:  # else there is nothing to hide
                        yield base.vary(**experts), sizes


def _meshes(asked: Workload, devices: int, offers: Offers) -> Iterator[Layout]:
    model, axes = asked.model, offers.axes
    for tp in divisors(devices) if "tp" in axes else [1]:
        if tp > 4 * asked.hardware.per_node or model.heads % tp or model.ffn % tp:  # at most four nodes
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
    """Yield stages of ZeRO with the ranks among which they shard; 0: all."""
    n = mesh.replicas
    parts = [nodes * per_node // mesh.tp for nodes in GROUPS if nodes * per_node % (mesh.tp * mesh.cp) == 0]
    parts = [part for part in parts if 1 < part < n and n % part == 0]
    for zero in offers.zero if n > 1 else [0]:
        yield zero, 0
        yield from ((zero, part) for part in parts if zero in offers.hybrid)


def expert_changes(model: Architecture, offers: Offers, layout: Layout) -> list[dict[str, Any]]:
    """Return the ways to divide a layer's experts among ranks that share shards, as fields of a layout.

    With sequence parallelism the ranks along tp are among them (folding: Liu et al. 2025, arXiv 2504.14960), and have
    whole experts (etp = 1) or a part of each (etp = tp, which is 0 in a layout). Ranks that hold the same experts
    needlessly are left out, since folded they hold fewer.

    >>> mixtral = Architecture(32, 4096, 32, ffn=14336, experts=8, top_k=2)
    >>> expert_changes(mixtral, EVERYTHING, Layout(dp=2, tp=2, sequence_parallel=True))
    [{'ep': 1, 'etp': 0}, {'ep': 2, 'etp': 1}, {'ep': 2, 'etp': 0}, {'ep': 4, 'etp': 1}]
    """
    undivided: dict[str, Any] = {"etp": 1, "alike": True} if model.whole_experts else {"etp": 0}
    found = [{"ep": 1} | undivided]
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
    """Return the divisors of a number, ascending."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


# ---- those that fit


class FoundLayout(NamedTuple):
    """A layout that fits."""

    layout: Layout
    seconds: float  # per step
    memory: float  # bytes at the peak of the fullest rank, fragmentation included


@dataclass(eq=False)
class FoundLayouts(Sequence[FoundLayout]):
    """Layouts that fit, up to hundreds of thousands; each is made when it is read."""

    layouts: Layout  # many as one
    family: Indices  # the same number for those that differ only in the samples of a micro-batch
    seconds: Floats
    memory: Floats

    def __len__(self) -> int:
        return len(self.seconds)

    @overload
    def __getitem__(self, place: int) -> FoundLayout: ...
    @overload
    def __getitem__(self, place: slice) -> list[FoundLayout]: ...
    def __getitem__(self, place: int | slice) -> FoundLayout | list[FoundLayout]:
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(len(self)))]
        place = range(len(self))[place]
        return FoundLayout(self.layouts.one(place), float(self.seconds[place]), float(self.memory[place]))

    @cached_property
    def kinds(self) -> list[FoundLayout]:
        """The first of each family, in order."""
        return [self[place] for place in np.sort(np.unique(self.family, return_index=True)[1])]

    def take(self, rows: Any) -> FoundLayouts:
        """Return some of the rows, in this order."""
        return FoundLayouts(self.layouts.take(rows), self.family[rows], self.seconds[rows], self.memory[rows])


NOTHING = FoundLayouts(Layout(), np.zeros(0, np.int64), np.zeros(0), np.zeros(0))


def search(asked: Workload, sizes: Sequence[int]) -> tuple[FoundLayouts, FoundLayouts, int]:
    """Return the layouts that fit, those that fill the memory, and the number considered.

    For each offload it keeps the least recomputation that fits, and the least that leaves a part of the memory free. If
    no recomputation is needed, more offload gains nothing. `sizes` are the possible numbers of devices.
    """
    offers, stack, whole = offers_of(asked.stack.name), asked.stack, asked.available
    found = [family for devices in sizes for family in families(asked, devices)]
    if not found:
        return NOTHING, NOTHING, 0
    bases, choices = zip(*found, strict=True)
    family = np.repeat(np.arange(len(bases)), [len(each) for each in choices])
    microbatch = np.concatenate([np.array(each, np.int64) for each in choices])
    layouts = Layout.stack(bases).take(family, microbatch=microbatch)
    layouts = layouts.vary(microbatches=asked.global_batch // layouts.dp // microbatch)
    memory = asked.memory_model.ranks(layouts)

    # Parameters can be on the host under ZeRO-3 only. Selective recomputation frees the attention's scores, which fused
    # attention does not keep.
    in_pairs = [name for name, entry in SCHEDULES.items() if entry.pairs]
    every_row = np.ones(len(family), bool)
    sharded = every_row & (layouts.zero == 3)
    joint = every_row & np.isin(np.asarray(layouts.schedule), in_pairs)
    useful = (each for each in offers.recompute if not (stack.fused and each == "selective"))
    recomputes = [each for each in useful if every(each) <= asked.model.layers]
    considered, reliefs, parts = 0, list(product(offers.offload, recomputes)), []
    open_rows = every_row.copy()  # those for which no relief was enough yet
    for offload in offers.offload:
        able = sharded if offload == "params" else every_row
        rows = np.flatnonzero(able & open_rows)
        needs = [rank.with_offload(offload).take(rows) for rank in memory]
        possible = most_at_peak(needs, recomputes[-1]) <= whole
        rows, needs = rows[possible], [rank.take(possible) for rank in needs]
        filled = np.zeros(len(rows), bool)
        for recompute in recomputes:
            usable = ~joint | (recompute in offers.joint_recompute)
            considered += int((able & usable).sum())
            held = np.where(usable[rows], most_at_peak(needs, recompute), inf)
            fits = held <= HEADROOM * whole
            kept = fits | ((held <= whole) & ~filled)
            number = reliefs.index((offload, recompute))
            parts.append((rows[kept], np.full(kept.sum(), number), held[kept]))
            if recompute == recomputes[0]:
                open_rows[rows[fits]] = False
            rows, filled, needs = rows[~fits], (filled | kept)[~fits], [rank.take(~fits) for rank in needs]
    rows, relief, held = (np.concatenate(each) for each in zip(*parts, strict=True))
    offloads, recomputed = (np.array(each)[relief] for each in zip(*reliefs, strict=True))
    some = layouts.take(rows, offload=offloads, recompute=recomputed)
    chunks = [slice(start, start + CHUNK) for start in range(0, len(rows), CHUNK)]
    took = np.concatenate([np.zeros(0), *(asked.time_model.seconds(some.take(chunk)) for chunk in chunks)])
    priced = FoundLayouts(some, family[rows] * len(reliefs) + relief, took, held)
    roomy = held <= HEADROOM * whole
    return priced.take(roomy), priced.take(~roomy), considered


# ---- what is best

WORDS = "time", "cost", "devices"


@dataclass(frozen=True)
class Objective:
    """What is best of the plans that fit."""

    by: str = "time"  # of `WORDS`: the step's time, its cost in GPU-hours x price, or devices and then time
    price: float | None = None  # per hour of a GPU, for "cost"; None: only GPU-hours count

    def __post_init__(self) -> None:
        if self.by not in WORDS:
            raise ValueError(f"advise(by={self.by!r}): what is best is one of {', '.join(map(repr, WORDS))}")
        if self.price is not None and self.by != "cost":
            given = f"advise(by={self.by!r}, price={self.price!r})"
            raise ValueError(f"{given}: a price counts for by='cost' alone")
        if self.price is not None and not 0 < (real(self.price) or 0) < inf:
            raise ValueError(
                f"advise(price={self.price!r}): the price of an hour of a GPU, such as price=2.5"
            )

    def value_of(self, took: Any, devices: Any) -> tuple[Any, Any]:
        """Return what is to be least for a step of `took` seconds on so many devices, and the seconds."""
        if self.by == "cost":
            return took * devices * (self.price or 1.0) / 3600, took
        return (1.0 * devices, took) if self.by == "devices" else (took, took)

    def words(self, best: FoundLayout, devices: int) -> str:
        """Say what the best plan comes to on a machine with so many devices."""
        used = best.layout.ranks
        if self.by == "devices":
            return f"{used} of {devices} devices are the fewest that it fits."
        cost, took = self.value_of(best.seconds, used)
        return f"{cost:.4g} per step on {used} of {devices} devices: {seconds(took)} x {used}."

    def explain_rejection(self, took: float, devices: int, best: FoundLayout) -> str:
        """Say why a plan that fits is worse than the best one, by cost or devices."""
        if self.by == "devices" and devices > best.layout.ranks:
            return f"it uses {devices} devices, where {best.layout.ranks} are enough"
        cost, least = self.value_of(took, devices)[0], self.value_of(best.seconds, best.layout.ranks)[0]
        if self.by == "cost":
            return f"a step costs {cost:.4g}, {percent(cost / least - 1)} more"
        return f"a step takes {percent(took / best.seconds - 1)} longer on as many devices"


TIME = Objective()


def handicap_of(asked: Workload, offload: Any) -> Any:
    """Return the factor of a layout's time in comparisons: offload has to gain more than predictions may be off."""
    return 1 + asked.preset.band * (np.asarray(offload) != "none")


def rank(asked: Workload, found: FoundLayouts, goal: Objective = TIME, played: int = PLAYED) -> FoundLayouts:
    """Return layouts with the best first; the pipelines of the best ones are played."""

    def order(of: FoundLayouts) -> Indices:
        keys = goal.value_of(of.seconds * handicap_of(asked, of.layouts.offload), of.layouts.ranks)
        return np.lexsort([np.broadcast_to(key, len(of)) for key in reversed(keys)])

    some = found.take(order(found))
    best = some.take(np.arange(min(played, len(some))))
    best.seconds[:] = [asked.time_model.step(each.layout, LONGEST).seconds for each in best]
    first = order(best)
    some.seconds[: len(best)] = best.seconds
    return some.take(np.concatenate([first, np.arange(len(best), len(some))]))


def find_best(asked: Workload, objective: Objective = TIME) -> tuple[FoundLayouts, FoundLayouts, int]:
    """Return the layouts that fit and those that fill the memory, the best first, and the number considered."""
    roomy = full = NOTHING
    tried = 0
    for some in _numbers_of_devices(asked, objective):
        roomy, full, considered = search(asked, some)
        tried += considered
        if len(roomy):
            break
    best = rank(asked, roomy, objective)
    return best, rank(asked, full, objective, FEW if len(best) else PLAYED), tried


def _numbers_of_devices(asked: Workload, objective: Objective) -> Iterator[Sequence[int]]:
    """Yield the numbers of devices to search together: parts of a node, or nodes that divide all of them."""
    machine = asked.hardware
    sizes = divisors(machine.per_node) + [machine.per_node * n for n in divisors(machine.nodes)[1:]]
    if objective.by == "devices":
        yield from ([each] for each in sizes)
    else:
        yield sizes if objective.by == "cost" else [machine.devices]


def plan_under(asked: Workload, layout: Layout) -> Plan:
    """Return the plan of a layout, in the device's 16-bit precision or in the software's 32 bits."""
    precision = "full" if asked.stack.element == 4 else asked.hardware.device.half
    return replace(plan_of(layout), precision=precision)
