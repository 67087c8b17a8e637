"""Step: the times of layers composed to the time of a step, of one plan or of many.

ranks        what their layers take, forward, recomputation and backward; the first stage has the embedding, the
             last the head and the loss
ZeRO-3       each layer waits for its parameters, which are gathered beside the layer before
pairs        of a forward and a backward that run as one each computes while the other's tokens travel to experts
pipeline     of one plan the schedule played with these times, message by message; of many a formula: m times the
             slowest rank, the bubble of equal stages, and messages. It is exact without a pipeline, and of the plans
             of a search at most 2 % shorter (5 % with pairs) and 10 % longer
replicas     gradients reduced beside the last backward, or after it; under ZeRO-1 and -2 new weights
             gathered, beside the next forward or before it
optimizer    the bytes that Adam moves
stragglers   all wait for the slowest node
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from mpkit.common.arrays import Numbers, at_largest, larger, log2, smaller, where
from mpkit.plan.schedule.catalogue import (
    INTERLEAVED_1F1B,
    LONG,
    OVERLAPPED_1F1B,
    bubble,
    makespan,
    pairs_by_stage,
)
from mpkit.plan.schedule.core import Schedule
from mpkit.plan.schedule.play import BESIDE
from mpkit.prediction.cost_model.layer import LayerModel, LayerTime, overlapped_time
from mpkit.prediction.cost_model.layout import Layout, Shares, Stage, shares_of, stages_of
from mpkit.trace import Kind

HOST_ADAM = 4e9
"""Parameters per second that the processors of a node update; ZeRO-Offload (Ren et al. 2021), table 4: 1 B in .22 s,
10 B in 2.57 s."""
ADAM = 32
"""Bytes per parameter that the update moves: gradient, master weight and two states read; three of them written."""


class PipelineTimes(NamedTuple):
    """A pipeline as it is played.

    Attributes:
        schedule, p, m, v: the schedule, with ranks, micro-batches and stages per rank.
        forward, backward: seconds per micro-batch of each stage; the backward with what is computed again.
        beside: those that a forward of each stage adds to a backward with which it runs as one.
        hop: seconds of a message between stages.
    """

    schedule: str | Schedule
    p: int
    m: int
    v: int
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    beside: tuple[float, ...]
    hop: float = 0.0

    def with_messages(self, hop: float, *, blocking: bool) -> PipelineTimes:
        """Return these times with messages, which a stage waits for if sends block."""
        if not blocking:
            return self._replace(hop=hop)
        # The last stage sends no output, and the first no gradient.
        sent, less = ((*(time + hop for time in each[:-1]), each[-1]) for each in (self.forward, self.beside))
        back = self.backward[0], *(time + hop for time in self.backward[1:])
        return self._replace(forward=sent, backward=back, beside=less)


@lru_cache(4096)  # plans that differ in what follows the pipeline share it
def _play(times: PipelineTimes, longest: int) -> float:
    """Return the seconds of a schedule in which the two halves of a backward take equally long."""
    schedule, p, m, v, forward, backward, beside, hop = times
    if p == 1:
        pairs = pairs_by_stage(schedule, p, m, v)
        hidden = sum(n * (f - less) for n, f, less in zip(pairs, forward, beside, strict=True))
        return m * (sum(forward) + sum(backward)) - hidden
    halves = [time / 2 for time in backward]
    slots = {"F": forward, "B": backward, "I": halves, "W": halves, BESIDE: beside}
    return makespan(schedule, p, m, v, slots, hop, longest)


@dataclass(frozen=True)
class StepTime:
    """The time of a step of one plan.

    Attributes:
        free, played: the times of its pipeline, without messages and with them.
        longest: the most actions of a schedule that are played.
        after: seconds of what follows the pipeline, in order: "replicas", "optimizer" and "stragglers".
        steady: seconds by cause of the work of the rank with most.
    """

    free: PipelineTimes
    played: PipelineTimes
    longest: int
    after: dict[str, float]
    steady: dict[str, float]

    @cached_property
    def seconds(self) -> float:
        """The whole."""
        return _play(self.played, self.longest) + sum(self.after.values())

    @cached_property
    def because(self) -> dict[str, float]:
        """Seconds by cause, in descending order; they add up to the whole."""
        pipeline, free = _play(self.played, self.longest), _play(self.free, self.longest)
        bubble = {
            "pipeline bubble": free - sum(self.steady.values()),
            "messages between stages": pipeline - free,
        }
        causes = self.steady | bubble | self.after
        # What rounding leaves of 0 is no cause.
        there = [(cause, time) for cause, time in causes.items() if time > 1e-12 * self.seconds]
        return dict(sorted(there, key=lambda each: -each[1]))


class RankTimes(NamedTuple):
    """Seconds per micro-batch of the layers of a pipeline, and of the rank that paces it.

    Attributes:
        kind: a layer, by cause.
        again: of a layer, what its backward computes again.
        waits: what a layer's forward and backward wait for under ZeRO-3, and a micro-batch for what nothing hides.
        layer: a layer's forward and its backward, with all that.
        ends: beside their layers, the first stage's forward, and the last one's forward and backward.
        head: the head and the loss.
        slowest: the rank that paces the pipeline, as its number, its layers, and whether it has the last stage.
        forward, backward: of that rank.
    """

    kind: LayerTime
    again: Numbers
    waits: tuple[Numbers, Numbers, Numbers]
    layer: tuple[Numbers, Numbers]
    ends: tuple[Numbers, Numbers, Numbers]
    head: Numbers
    slowest: tuple[Numbers, Numbers, Numbers]
    forward: Numbers
    backward: Numbers


@dataclass(frozen=True)
class StepModel(LayerModel):
    """What a step is priced for.

    >>> from mpkit.devices.catalogue import build_machine
    >>> from mpkit.prediction.cost_model.architecture import Architecture
    >>> from mpkit.prediction.cost_model.stack import PRIOR, Stack
    >>> model = StepModel(Architecture(12, 768, 12), 1024, build_machine("h100"), Stack("any"), PRIOR)
    >>> plans = Layout(dp=8, zero=2, microbatch=4), Layout(tp=4, microbatch=4, microbatches=8)
    >>> many, each = model.seconds(Layout.stack(plans)), [model.step(plan).seconds for plan in plans]
    >>> bool(np.allclose(many, each))
    True
    """

    def step(self, layout: Layout, longest: int = LONG) -> StepTime:
        """Return the time of a step of one layout.

        Args:
            layout: how the step is divided.
            longest: the most actions of a schedule that are played, as for `makespan`.
        """
        model, stack = self.model, self.stack
        stages = stages_of(model, layout)
        shares = shares_of(model, layout, stages)
        ranks = self._ranks(layout, stages, shares)
        stage_to_rank = layout.stage_to_rank
        held = Counter(stage_to_rank)
        layers = [stages[rank].layers / held[rank] for rank in stage_to_rank]
        f, b = ([n * each for n in layers] for each in ranks.layer)
        f[0] += ranks.ends[0]
        f[-1] += ranks.ends[1]
        b[-1] += ranks.ends[2]
        beside = f
        exchanged = ranks.kind.forward["experts"]  # of a layer
        if exchanged and stack.overlaps_pairs:
            both = zip(f, b, layers, strict=True)
            beside = [one - self._hidden_in_pair(one, two, n * exchanged) for one, two, n in both]
        shape = layout.schedule, layout.pp, layout.microbatches, layout.virtual_stages
        free = PipelineTimes(*shape, tuple(f), tuple(b), tuple(beside))
        played = free.with_messages(self._hop(layout), blocking=stack.blocks(layout.virtual_stages))
        after = self._after(_play(played, longest), ranks, layout, shares)
        steady = self._causes(ranks, layout.microbatches)
        if beside != f:
            hidden = zip(stage_to_rank, pairs_by_stage(*shape), f, beside, strict=True)
            steady["experts"] -= sum(
                n * (one - less) for at, n, one, less in hidden if at == ranks.slowest[0]
            )
        return StepTime(free, played, longest, after, steady)

    def seconds(self, layout: Layout) -> Numbers:
        """Return about the seconds per step of many layouts."""
        stages = stages_of(self.model, layout)
        shares = shares_of(self.model, layout, stages)
        ranks = self._ranks(layout, stages, shares)
        idle, hops, pairs = self._ask_schedules(layout)
        f, b = ranks.forward, ranks.backward
        whole = self.model.layers * (ranks.layer[0] + ranks.layer[1]) + sum(ranks.ends)
        pipeline = layout.microbatches * (f + b) + (whole - f - b) * idle + hops * self._hop(layout)
        if self.stack.overlaps_pairs:
            exchanged = ranks.slowest[1] * ranks.kind.forward["experts"]
            pipeline = pipeline - pairs * self._hidden_in_pair(f, b, exchanged)
        return pipeline + sum(self._after(pipeline, ranks, layout, shares).values())

    def _ask_schedules(self, layout: Layout) -> Numbers:
        """Return of many layouts the bubble, in times of a rank; the messages that nothing hides; and the forwards of a
        stage that run as one with a backward, the mean of all stages.
        """

        def facts(schedule: str, pp: int, v: int, m: int) -> tuple[float, float, float]:
            pairs = pairs_by_stage(schedule, pp, m, v) if self.stack.overlaps_pairs else (0,)
            if pp == 1:
                return 0.0, 0.0, sum(pairs) / len(pairs)
            share = bubble(schedule, pp, m, v)
            # A rank sends each micro-batch once per virtual stage, forward and backward; interleaving makes v times as
            # many messages (Narayanan et al. 2021, section 2.2.2). A stack whose sends block waits for all of them.
            exposed = 2.0 * m * v if self.stack.blocks(v) else 2.0 * m * (v - 1) / v
            return share / (1 - share) * m / (pp - 1), 2 * (pp - 1) + exposed, sum(pairs) / len(pairs)

        shapes, which = layout.shapes
        return np.array([facts(*shape) for shape in shapes])[which].T

    # ---- ranks

    def _ranks(self, layout: Layout, stages: Sequence[Stage], shares: Shares) -> RankTimes:
        kind = self.layer(layout)
        again = kind.again(layout.recompute)
        forward, backward = sum(kind.forward.values()), sum(kind.backward.values()) + again
        waits = self._gathers(layout, shares, forward, backward)
        forward, backward = forward + waits[0], backward + waits[1]
        head, embedding = (
            self.head(layout),
            self.move(12 * layout.microbatch * self.sequence / layout.cp * self.model.hidden),
        )
        ends = embedding + waits[2], head / 3, head * 2 / 3 + where(layout.pp > 1, waits[2], 0.0)
        ranks = []
        for rank, stage in enumerate(stages):
            f = stage.layers * forward + stage.first * ends[0] + stage.last * ends[1]
            ranks.append((rank, stage.layers, stage.last, f, stage.layers * backward + stage.last * ends[2]))
        *slowest, f, b = at_largest([f + b for *_, f, b in ranks], *zip(*ranks, strict=True))
        return RankTimes(kind, again, waits, (forward, backward), ends, head, tuple(slowest), f, b)

    def _causes(self, ranks: RankTimes, microbatches: int) -> dict[str, float]:
        """Return the seconds by cause of the work of the rank with most."""
        (_, layers, last), kind = ranks.slowest, ranks.kind
        layer = {cause: kind.forward[cause] + kind.backward[cause] for cause in kind.forward}
        layer |= {"recomputation": ranks.again, "ZeRO-3 gathers": ranks.waits[0] + ranks.waits[1]}
        found = {cause: microbatches * layers * took for cause, took in layer.items()}
        found["ZeRO-3 gathers"] += microbatches * ranks.waits[2]
        if last:
            found["head and loss"] = microbatches * ranks.head
        took = ranks.forward + ranks.backward
        return found | {"embedding": microbatches * took - sum(found.values())}

    def _hidden_in_pair(self, forward: Numbers, backward: Numbers, exchanged: Numbers) -> Numbers:
        """Return the seconds that a pair of a forward and a backward saves.

        The forward's all-to-alls travel while the backward computes, and the backward's while the forward computes.

        Args:
            forward, backward: seconds of each alone.
            exchanged: those of either in which its tokens travel.
        """
        beside = overlapped_time(backward - exchanged, exchanged) + overlapped_time(
            forward - exchanged, exchanged
        )
        return forward + backward - beside

    def _hop(self, layout: Layout) -> Numbers:
        """Return the seconds of a message between stages, forward or backward."""
        nbytes = self.stack.element * layout.microbatch * self.sequence / layout.cp * self.model.hidden
        crosses = layout.tp * layout.replicas >= self.hardware.per_node  # ranks from one stage to the next
        parts = layout.tp if self.stack.scatter_gather else layout.sequence_parts
        hop = self.message(nbytes / parts, crosses)
        if self.stack.scatter_gather:
            gathered = self.collective(Kind.ALL_GATHER, nbytes, layout, "tp")
            hop = hop + where(layout.sequence_parallel, 0.0, gathered)
        return where(layout.pp == 1, 0.0, hop)

    # ---- collectives of replicas

    def _of_replicas(
        self, kind: Kind, parameters: tuple[Numbers, Numbers], element: float, layout: Layout,
        shares: Shares | None = None,
    ) -> Numbers:  # fmt: skip
        """Return the seconds in which ranks that hold the same weights reduce their gradients, or gather their shards.

        Experts have replicas of their own, ep apart: where ep fills a node, each of these is on another one.

        Args:
            kind: of collective; an all-reduce is among all replicas, others are among those that ZeRO shards among.
            parameters: of a rank, without its experts, and of these.
            element: bytes of each.
            layout: how the step is divided.
            shares: says how many calls these take; None: one.
        """
        whole = kind == Kind.ALL_REDUCE
        own = where(layout.ep > 1, parameters[1], 0.0)
        took: Numbers = 0.0
        for axis, held, n in (
            ("replicas" if whole else "shards", sum(parameters) - own, None),
            ("edp", own, layout.expert_shards * (layout.groups if whole else 1)),
        ):
            calls = self._calls(held, element, layout, shares) if shares else 1
            took = took + self.collective(kind, element * held, layout, axis, n, calls)
        return took

    def _calls(self, parameters: Numbers, element: float, layout: Layout, shares: Shares) -> Numbers:
        return self.stack.calls(parameters, element, layout.zero, layout.replicas, shares.layers)

    def _over_groups(
        self, parameters: tuple[Numbers, Numbers], element: float, layout: Layout, calls: Numbers = 1
    ) -> Numbers:
        """Return the seconds in which the groups of hybrid sharding sum their shards of these gradients (FSDP)."""
        among = where(layout.ep > 1, layout.expert_shards, layout.shards)
        shard = parameters[0] / layout.shards + parameters[1] / among
        return self.collective(Kind.ALL_REDUCE, element * shard, layout, "groups", calls=calls)

    def _gathers(
        self, layout: Layout, shares: Shares, forward: Numbers, backward: Numbers
    ) -> tuple[Numbers, Numbers, Numbers]:
        """Return what a layer's forward and backward wait for under ZeRO-3, and a micro-batch for what nothing hides.

        Each layer is gathered in the forward and again in the backward, where its gradients are reduced too (FSDP; Zhao
        et al. 2023, section 4). The first gather of a micro-batch has nothing to hide behind.
        """
        zero: Numbers = layout.zero
        if isinstance(zero, int) and zero < 3:
            return 0.0, 0.0, 0.0
        stack, layer = self.stack, (shares.layer - shares.layer_experts, shares.layer_experts)
        gather = self._of_replicas(Kind.ALL_GATHER, layer, stack.element, layout)
        reduce = self._of_replicas(Kind.REDUCE_SCATTER, layer, stack.reduced, layout)
        reduce = reduce + self._over_groups(layer, stack.reduced, layout)
        edge = self.collective(Kind.ALL_GATHER, stack.element * shares.edge, layout, "shards")
        waits = gather, gather + reduce, edge
        if stack.overlap:
            ahead = layout.prefetch > 0  # else a layer is gathered when it is wanted
            beside = where(ahead, gather + reduce, reduce)
            waits = (
                where(ahead, overlapped_time(forward, gather) - forward, gather),
                overlapped_time(backward, beside) - backward + where(ahead, 0.0, gather),
                gather + edge,
            )
        waited, waited_backward, alone = (where(zero == 3, each, 0.0) for each in waits)
        return waited, waited_backward, alone

    def _reductions(self, layout: Layout, shares: Shares) -> tuple[Numbers, Numbers, Numbers]:
        """Return the seconds of collectives that keep replicas equal, whatever runs beside them.

        They are: to reduce all gradients once; to gather new weights; and what nothing runs beside: ranks along tp that
        hold the same experts sum the gradients of these, each of its part of the sequence. They do that before the
        update, so that under ZeRO it is their shards.
        """
        stack, zero = self.stack, layout.zero
        own = shares.fullest.experts * layout.trainable
        rest = shares.fullest.weights * layout.trainable - own
        alike = layout.alike & layout.sequence_parallel & (layout.tp > 1)
        shard = own / where(zero > 0, layout.expert_shards, 1)
        summed = self.collective(Kind.ALL_REDUCE, where(alike, stack.reduced * shard, 0.0), layout, "tp")
        held = rest, own
        every = self._of_replicas(Kind.ALL_REDUCE, held, stack.reduced, layout, shares)
        part = self._of_replicas(Kind.REDUCE_SCATTER, held, stack.reduced, layout, shares)
        calls = self._calls(rest + own, stack.reduced, layout, shares)
        part = part + self._over_groups(held, stack.reduced, layout, calls)
        gather = self._of_replicas(Kind.ALL_GATHER, held, stack.element, layout, shares)
        reduced = (layout.replicas > 1) & (zero != 3)
        return (
            where(reduced, where(zero == 0, every, part), 0.0),
            where(reduced & (zero > 0), gather, 0.0),
            summed,
        )

    def _after(
        self, pipeline: Numbers, ranks: RankTimes, layout: Layout, shares: Shares
    ) -> dict[str, Numbers]:
        """Return the seconds of what follows the pipeline, in order.

        Gradients are reduced beside the last backward, under ZeRO-2 beside each; new weights are gathered beside the
        first forward, or after the update (`Stack.gathers_ahead`).
        """
        stack, m, zero, machine = self.stack, layout.microbatches, layout.zero, self.hardware
        reduce, gather, summed = self._reductions(layout, shares)
        reduce = where(zero == 2, m, 1) * reduce
        exposed = reduce + gather
        if stack.overlap:
            beside = _micro_batches_beside(layout)
            forward = beside * ranks.forward
            backward = larger(beside, where(zero == 2, m, 0)) * ranks.backward
            late = where(zero >= stack.gathers_ahead, overlapped_time(forward, gather) - forward, gather)
            hidden = overlapped_time(backward, reduce) - backward + late
            exposed = where((layout.pp == 1) | stack.staged_overlap, hidden, exposed)
        updated = shares.fullest.updated
        # Of states on the host, the way there and back and its Adam; ranks share the node's processors.
        adam = smaller(layout.ranks, machine.per_node) * updated / HOST_ADAM
        on_host = 2 * stack.element * updated / machine.device.host + adam
        optimizer = where(layout.offload == "none", self.move(ADAM * updated), on_host)
        doublings = log2(larger(1.0, layout.ranks / machine.per_node))
        late = (pipeline + exposed + summed + optimizer) * self.constants.straggle * doublings
        return {"replicas": exposed + summed, "optimizer": optimizer, "stragglers": late}


def _micro_batches_beside(layout: Layout) -> Numbers:
    """Return how many micro-batches' backwards the last gradients are reduced beside; as many forwards gather weights.

    Of one stage per rank that is the last one. Of v interleaved ones, the last stage's gradients are complete when pp
    micro-batches have still to go through each of the others.

    >>> _micro_batches_beside(Layout(pp=4, microbatches=8))
    1
    >>> _micro_batches_beside(Layout(pp=4, microbatches=8, virtual_stages=2, schedule="interleaved_1f1b"))
    2.5
    """
    v, schedule = layout.virtual_stages, layout.schedule
    if isinstance(schedule, Schedule):
        return 1
    looped = ((schedule == INTERLEAVED_1F1B) | (schedule == OVERLAPPED_1F1B)) & (v > 1)
    return where(looped, 1 / v + (v - 1) / v * smaller(layout.pp, layout.microbatches), 1)
