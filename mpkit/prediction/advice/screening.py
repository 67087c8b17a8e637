"""Screening: the memory and about the time of layouts by the hundred thousand, in a few operations on arrays.

    memory   of each class of a pipeline's stages, which hold as many layers of each kind: the fullest counts
    time     a formula stands for the pipeline: m times the slowest rank, the bubble of equal stages, and messages.
             It is exact without a pipeline; of the layouts of a search it is at most 2 % shorter than `step_time` (5 %
             with pairs) and 10 % longer

Both are those of `mpkit.prediction.cost_model`, whose functions are called once for all layouts that agree in what
they depend on.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import log2
from typing import NamedTuple

import numpy as np

from mpkit.plan.schedule.summary import bubble, pairs_by_stage, peak_live
from mpkit.prediction.advice.prices import Floats, Indices, LayoutColumns, LayoutPrices
from mpkit.prediction.cost_model.communication import network_of, overlapped_time
from mpkit.prediction.cost_model.kernels import kernels_of
from mpkit.prediction.cost_model.layout import Layout
from mpkit.prediction.cost_model.memory import (
    FRAGMENTATION,
    SampleMemory,
    kinds_of_stages,
    sample_memory,
    state_memory,
)
from mpkit.prediction.cost_model.stages import MeanLayer, ShardGathers, gathers_of, layer_of
from mpkit.prediction.cost_model.step import (
    hidden_in_pair,
    hop_time,
    micro_batches_beside,
    optimizer_time,
    reductions_of,
)

__all__ = ["Screening", "screen_layouts"]

STAGES = "pp", "schedule", "virtual_stages"
"""The fields of a layout that decide which layers its stages have."""
PARTS = "cp", "tp", "ep", "etp", "alike", "sequence_parallel"
"""Those that decide which part of a layer a rank computes."""
HELD = (
    "stage_to_rank",
    "tp",
    "zero",
    "replicas",
    "sharded",
    "ep",
    "etp",
    "alike",
    "sequence_parallel",
)
"""Those that decide which weights and states a rank holds."""
AT_TIMES = "grads", "gathered"
"""What is not always there."""
DROPPED = {"none": (), "optimizer": ("optimizer",), "params": ("optimizer", "params")}
"""What is on the host with an offload."""


class _Stages(NamedTuple):
    """A pipeline's stages by class: the first, the last, and those that hold alike.

    Attributes:
        members: the stages of each class.
        held: how many layers of each kind one of them has.
    """

    members: list[list[int]]
    held: list[tuple[int, ...]]


class Screening:
    """Prices the rows of some columns.

    Args:
        priced: what is asked, of which machine and software.
        columns: the layouts.
    """

    def __init__(self, priced: LayoutPrices, columns: LayoutColumns) -> None:
        self.priced, self.columns = priced, columns
        self.model, self.stack = priced.asked.model, priced.stack
        self._stage_kind, layouts = columns.distinct(*STAGES)
        self._stages = [self._classes(layout) for layout in layouts]
        self._last = np.array([layout.last for layout in layouts])
        self._pp = np.array([layout.pp for layout in columns.bases])[columns.base]
        self._zero = np.array([layout.zero for layout in columns.bases])[columns.base]
        self._held_kind, self._holders = columns.distinct(*HELD)
        self._shares = [priced.shares(layout) for layout in self._holders]
        self._samples: dict[str, list[SampleMemory]] = {}
        self._again: dict[str, Floats] = {}
        self._updates: dict[str, Floats] = {}

    def _classes(self, layout: Layout) -> _Stages:
        held = kinds_of_stages(self.model, layout)
        members: dict[tuple[object, ...], list[int]] = {}
        for stage, kinds in enumerate(held):
            members.setdefault((kinds, stage == 0, stage == layout.last), []).append(stage)
        return _Stages(list(members.values()), [held[stages[0]] for stages in members.values()])

    # ---- memory

    @cached_property
    def _most(self) -> int:
        """The most classes of stages that a layout has; those of others are repeated."""
        return max(len(stages.members) for stages in self._stages)

    def _pad(self, rows: Sequence[Sequence[object]]) -> list[list[object]]:
        return [[*row, *[row[0]] * (self._most - len(row))] for row in rows]

    @cached_property
    def _composition(self) -> tuple[Floats, Floats]:
        """Of each kind of pipeline and class: layers by kind, and whether it is the last stage."""
        is_last = [
            [last in members for members in stages.members]
            for stages, last in zip(self._stages, self._last, strict=True)
        ]
        held = self._pad([stages.held for stages in self._stages])
        return np.array(held, float), np.array(self._pad(is_last), bool)

    @cached_property
    def _live(self) -> Floats:
        """By row and class, the micro-batches in flight."""
        kind, layouts = self.columns.distinct(*STAGES, microbatches=True)
        rows = []
        for layout in layouts:
            live = peak_live(layout.schedule, layout.pp, layout.microbatches, layout.virtual_stages)
            rows.append([max(live[stage] for stage in stages) for stages in self._classes(layout).members])
        return np.array(self._pad(rows), float)[kind]

    @cached_property
    def _states(self) -> tuple[dict[str, Floats], dict[str, Floats]]:
        """Of each kind of holder and class: bytes that are always there, by offload, and those that are at times."""
        stays: dict[str, list[list[float]]] = {offload: [] for offload in DROPPED}
        at_times: dict[str, list[list[float]]] = {name: [] for name in (*AT_TIMES, "converted")}
        for layout, shares in zip(self._holders, self._shares, strict=True):
            found = [
                state_memory(self.model, layout, self.stack, shares, stages[0], self.priced.hardware.device)
                for stages in self._classes(layout).members
            ]
            for name in AT_TIMES:
                at_times[name].append([each.held[name] for each in found])
            at_times["converted"].append([each.converted for each in found])
            for offload, dropped in DROPPED.items():
                stays[offload].append([
                    sum(n for name, n in each.held.items() if name not in (*dropped, *AT_TIMES)) for each in found
                ])  # fmt: skip
        both = stays, at_times
        return tuple({name: np.array(self._pad(rows), float) for name, rows in each.items()} for each in both)  # type: ignore[return-value]

    @cached_property
    def _part_kind(self) -> tuple[Indices, list[Layout]]:
        return self.columns.distinct(*PARTS)

    def memory(self, rows: Indices, offload: str, recompute: str) -> Floats:
        """Return the bytes at the peak of the rank with most, with what fragmentation takes."""
        kind, layouts = self._part_kind
        if recompute not in self._samples:
            sequence = self.priced.asked.sequence
            self._samples[recompute] = [
                sample_memory(self.model, each.vary(recompute=recompute), sequence, self.stack)
                for each in layouts
            ]
        samples = self._samples[recompute]
        part, stages, held = kind[rows], self._stage_kind[rows], self._held_kind[rows]
        of_kinds = np.array([each.kinds for each in samples])[part]
        border, working = (
            np.array([getattr(each, name) for each in samples])[part] for name in ("border", "working")
        )
        logits, deferred = np.array([each.logits for each in samples])[part].T
        logits = logits + np.minimum(self.stack.deferred, self.columns.microbatches[rows]) * deferred
        composition, is_last = self._composition
        b, most = self.columns.microbatch[rows], np.zeros(len(rows))
        for c in range(self._most):
            stays = self._states[0][offload][held, c]
            at_times = {name: values[held, c] for name, values in self._states[1].items()}
            grads, gathered = at_times["grads"], at_times["gathered"]
            layers = b * self._live[rows, c] * (composition[stages, c] * of_kinds).sum(axis=1)
            head = b * np.where(is_last[stages, c], 2 * border + logits, 0.0)
            moments = (
                grads + layers + head + gathered,
                grads + layers + b * working + gathered,
                grads + at_times["converted"] + gathered,
            )
            most = np.maximum(most, stays + np.max(moments, axis=0))
        return most * (1 + FRAGMENTATION)

    # ---- time

    @cached_property
    def _layer(self) -> tuple[Indices, list[MeanLayer]]:
        """By row, the kind of its layer; and those kinds."""
        priced, stack = self.priced, self.stack
        by_count = stack.converts_once and (stack.fp8 or stack.fp4)
        kind, layouts = self.columns.distinct(
            *PARTS, "cp_method", "cp_order", "trainable", microbatch=True, microbatches=by_count
        )
        network, constants = network_of(priced.hardware), priced.preset.constants
        found = []
        for layout in layouts:
            kernels = kernels_of(priced.hardware.device, stack, constants, layout.microbatches)
            found.append(layer_of(self.model, layout, priced.asked.sequence, kernels, network))
        return kind, found

    @cached_property
    def _layer_seconds(self) -> Floats:
        """Of each kind of layer: seconds of its forward and backward, of the head and the embedding beside it, and of
        its all-to-alls, either way.
        """
        return np.array([
            (each.forward, each.backward, each.head, each.embed, each.causes["experts"] / 2)
            for each in self._layer[1]
        ])  # fmt: skip

    @cached_property
    def _hops(self) -> Floats:
        """By row, the seconds of a message between stages."""
        priced, network = self.priced, network_of(self.priced.hardware)
        kind, layouts = self.columns.distinct("cp", "tp", "replicas", "sequence_parallel", microbatch=True)
        seconds = [
            hop_time(
                self.model, layout.vary(pp=2), priced.asked.sequence, priced.hardware, network, self.stack
            )
            for layout in layouts
        ]
        return np.array(seconds)[kind]

    @cached_property
    def _counts(self) -> Floats:
        """Of each kind of pipeline: layers of the first rank, of the last, and the most of another one."""
        rows = []
        for stages, last in zip(self._stages, self._last, strict=True):
            held = {stage: sum(n) for m, n in zip(stages.members, stages.held, strict=True) for stage in m}
            between = [n for stage, n in held.items() if stage not in (0, last)]
            rows.append((held[0], held[int(last)], max(between, default=0)))
        return np.array(rows, float)

    @cached_property
    def _bubbles(self) -> Floats:
        """By row: the bubble in times of a rank, messages that nothing hides, micro-batches beside a reduction, and
        pairs of a stage, the mean of all.
        """
        kind, layouts = self.columns.distinct(*STAGES, microbatches=True)
        rows = []
        for layout in layouts:
            m, v, pp = layout.microbatches, layout.virtual_stages, layout.pp
            share = bubble(layout.schedule, pp, m, v) if pp > 1 else 0.0
            # A rank sends each micro-batch once per virtual stage, forward and backward; interleaving makes v times as
            # many messages (Narayanan et al. 2021, section 2.2.2). A stack whose sends block waits for all of them.
            exposed = 2.0 * m * v if self.stack.blocks(v) else 2.0 * m * (v - 1) / v
            idle = share / (1 - share) * m / (pp - 1) if pp > 1 else 0.0
            hops = 2 * (pp - 1) + exposed if pp > 1 else 0.0
            pairs = pairs_by_stage(layout.schedule, pp, m, v) if self.stack.overlaps_pairs else (0,)
            rows.append((idle, hops, micro_batches_beside(layout), sum(pairs) / len(pairs)))
        return np.array(rows, float)[kind]

    @cached_property
    def _collectives(self) -> Floats:
        """Of each kind of holder: seconds of ZeRO-3's gathers, and of the reductions of replicas."""
        network = network_of(self.priced.hardware)
        rows = []
        for layout, shares in zip(self._holders, self._shares, strict=True):
            gathers = gathers_of(layout, shares, network)[:3] if layout.zero == 3 else (0.0,) * 3
            rows.append((*gathers, *reductions_of(layout, shares, network, self.stack)))
        return np.array(rows)

    def seconds(self, rows: Indices, offload: str, recompute: str) -> Floats:
        """Return about the seconds per step."""
        priced, stack = self.priced, self.stack
        kind = self._layer[0][rows]
        forward, backward, head, embed, exchanged = self._layer_seconds[kind].T
        if recompute not in self._again:
            self._again[recompute] = np.array([layer.seconds_again(recompute) for layer in self._layer[1]])
        forward, backward = forward.copy(), backward + self._again[recompute][kind]
        m, pp, zero = self.columns.microbatches[rows], self._pp[rows], self._zero[rows]
        *gathers, reduce, gather, summed = self._collectives[self._held_kind[rows]].T
        # ---- stages
        ahead = np.array([layout.prefetch for layout in self.columns.bases])[self.columns.base][rows]
        edge = np.zeros(len(rows))
        for prefetch in np.unique(ahead):
            this = (zero == 3) & (ahead == prefetch)
            gathered, reduced, edges = (column[this] for column in gathers)
            part = ShardGathers(gathered, reduced, edges, int(prefetch))
            waits = part.waits(forward[this], backward[this], stack.overlap)
            forward[this] += waits[0]
            backward[this] += waits[1]
            edge[this] = waits[2]
        first = embed + edge
        last = head / 3, head * 2 / 3 + np.where(pp > 1, edge, 0.0)
        counts = self._counts[self._stage_kind[rows]]
        at_end = self._last[self._stage_kind[rows]] == 0  # the first rank has the last stage too
        zeroes = np.zeros(len(rows))
        ends = (
            (counts[:, 0], first + np.where(at_end, last[0], 0.0), np.where(at_end, last[1], 0.0)),
            (counts[:, 1], last[0] + np.where(at_end, first, 0.0), last[1]),
            (counts[:, 2], zeroes, zeroes),
        )
        f = np.array([n * forward + more for n, more, _ in ends])
        b = np.array([n * backward + more for n, _, more in ends])
        slowest = (f + b).argmax(axis=0), np.arange(len(rows))
        f, b = f[slowest], b[slowest]
        # ---- pipeline
        idle, hops, beside, pairs = self._bubbles[rows].T
        whole = self.model.layers * (forward + backward) + first + last[0] + last[1]
        pipeline = m * (f + b) + (whole - f - b) * idle + hops * self._hops[rows]
        pipeline -= pairs * hidden_in_pair(f, b, counts.T[slowest] * exchanged)
        # ---- replicas, optimizer, stragglers
        reduced = (
            self._exposed_reductions(np.where(zero == 2, m, 1) * reduce, gather, f, b, beside, rows) + summed
        )
        if offload not in self._updates:
            kernels = kernels_of(priced.hardware.device, stack, priced.preset.constants)
            self._updates[offload] = np.array([
                optimizer_time(layout.vary(offload=offload), shares, priced.hardware, kernels)
                for layout, shares in zip(self._holders, self._shares, strict=True)
            ])  # fmt: skip
        update = self._updates[offload][self._held_kind[rows]]
        doublings = log2(max(1.0, self.columns.bases[0].ranks / priced.hardware.per_node))
        took: Floats = (pipeline + reduced + update) * (1 + priced.preset.constants.straggle * doublings)
        return took

    def _exposed_reductions(
        self, reduce: Floats, gather: Floats, forward: Floats, backward: Floats, beside: Floats, rows: Indices
    ) -> Floats:
        """Return the seconds of the reductions of replicas that nothing hides, as `step_time` counts them."""
        stack, zero = self.stack, self._zero[rows]
        late = beside * forward
        hidden = np.where(zero >= stack.gathers_ahead, overlapped_time(late, gather) - late, gather)
        each = np.where(zero == 2, self.columns.microbatches[rows], 0)
        backward = np.maximum(beside, each) * backward
        hides = stack.overlap & ((self._pp[rows] == 1) | stack.staged_overlap)
        found: Floats = np.where(
            hides, overlapped_time(backward, reduce) - backward + hidden, reduce + gather
        )
        return found


def screen_layouts(priced: LayoutPrices, layouts: Sequence[Layout]) -> list[tuple[float, float]]:
    """Return about the seconds, and the memory, of each of some layouts of as many ranks."""
    found = [(0.0, 0.0)] * len(layouts)
    by_relief: dict[tuple[str, str], list[int]] = {}
    for row, layout in enumerate(layouts):
        by_relief.setdefault((layout.offload, layout.recompute), []).append(row)
    screening = Screening(priced, LayoutColumns.of_layouts(layouts)) if layouts else None
    for relief, rows in by_relief.items():
        assert screening is not None
        some = np.array(rows)
        both = screening.seconds(some, *relief), screening.memory(some, *relief)
        for row, seconds, held in zip(rows, *map(np.ndarray.tolist, both), strict=True):
            found[row] = seconds, held
    return found
