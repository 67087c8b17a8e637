"""Step: the times of layers composed to the time of a step, of one plan or of many.

ranks        their layers, forward, recomputation and backward; embedding on the first stage, head and loss on the last
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

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from mpkit.common.arrays import Numbers, at_largest, larger, log2, smaller, where
from mpkit.plan.schedule import catalogue
from mpkit.plan.schedule.catalogue import INTERLEAVED_1F1B, LONG, OVERLAPPED_1F1B, pairs_by_stage, stage_ranks
from mpkit.plan.schedule.core import Schedule
from mpkit.plan.schedule.play import BESIDE
from mpkit.prediction.cost_model.layer import LayerModel, MicroBatchTime, is_zero, overlapped_time
from mpkit.prediction.cost_model.layout import Layout, Shares, Stage, shares_of, stages_of
from mpkit.trace import Kind

HOST_ADAM = 4e9
"""Parameters per second that the processors of a node update; ZeRO-Offload (Ren et al. 2021), table 4: 1 B in .22 s,
10 B in 2.57 s."""
ADAM = 32  # bytes per parameter that the update moves: it reads gradient, master and two states, writes three


class PipelineTimes(NamedTuple):
    """A pipeline as it is played."""

    schedule: str | Schedule
    p: int  # ranks
    m: int  # micro-batches
    v: int  # stages per rank
    forward: tuple[float, ...]  # seconds per micro-batch of each stage
    backward: tuple[float, ...]  # with what is computed again
    beside: tuple[float, ...]  # what a forward of each stage adds to a backward with which it runs as one
    hop: float = 0.0  # seconds of a message between stages

    def with_messages(self, hop: float, *, blocking: bool) -> PipelineTimes:
        """Return these times with messages; if sends block, a stage waits for them."""
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
    return catalogue.makespan(schedule, p, m, v, slots, hop, longest)


class RankTimes(NamedTuple):
    """Seconds per micro-batch of the layers of a pipeline, and of the rank that paces it."""

    microbatch: MicroBatchTime
    again: Numbers  # what a layer's backward computes again
    waits: tuple[Numbers, Numbers, Numbers]  # of a layer under ZeRO-3, both ways; and what nothing hides
    layer: tuple[Numbers, Numbers]  # a layer's forward and backward, with all that
    ends: tuple[Numbers, Numbers, Numbers]  # beside layers: first stage's forward, last one's both
    slowest: tuple[Numbers, Numbers, Numbers]  # the rank that paces: number, layers, if last
    forward: Numbers  # of that rank
    backward: Numbers  # of that rank


@dataclass(frozen=True)
class StepTime:
    """The time of a step of one plan."""

    free: PipelineTimes  # without messages
    played: PipelineTimes  # with them
    longest: int  # the most actions of a schedule that are played
    after: dict[str, float]  # seconds of "replicas", "optimizer" and "stragglers", which follow the pipeline
    ranks: RankTimes

    @cached_property
    def seconds(self) -> float:
        """Seconds per step."""
        return _play(self.played, self.longest) + sum(self.after.values())

    @cached_property
    def because(self) -> dict[str, float]:
        """Seconds by cause, in descending order; they add up to the whole."""
        pipeline, free = _play(self.played, self.longest), _play(self.free, self.longest)
        steady = self._steady()
        bubble, messages = free - sum(steady.values()), pipeline - free
        causes = steady | {"pipeline bubble": bubble, "messages between stages": messages} | self.after
        # What rounding leaves of 0 is no cause.
        there = [(cause, time) for cause, time in causes.items() if time > 1e-12 * self.seconds]
        return dict(sorted(there, key=lambda each: -each[1]))

    def _steady(self) -> dict[str, float]:
        """Return the seconds by cause of the work of the rank with most."""
        ranks, (schedule, p, m, v, forward, _, beside, _) = self.ranks, self.free
        (slowest, layers, last), kind = ranks.slowest, ranks.microbatch.kind
        layer = {cause: kind.forward[cause] + kind.backward[cause] for cause in kind.forward}
        layer |= {"recomputation": ranks.again, "ZeRO-3 gathers": ranks.waits[0] + ranks.waits[1]}
        found = {cause: m * layers * took for cause, took in layer.items()}
        found["ZeRO-3 gathers"] += m * ranks.waits[2]
        if last:
            found["head and loss"] = m * ranks.microbatch.head
        found["embedding"] = m * (ranks.forward + ranks.backward) - sum(found.values())
        if beside != forward:
            places = stage_ranks(schedule, p, v)
            hidden = zip(places, pairs_by_stage(schedule, p, m, v), forward, beside, strict=True)
            found["experts"] -= sum(n * (one - less) for at, n, one, less in hidden if at == slowest)
        return found


@dataclass(frozen=True)
class StepModel(LayerModel):
    """A model, a machine and a software stack, priced for whole steps."""

    def step(self, layout: Layout, longest: int = LONG) -> StepTime:
        """Return the time of a step of one layout; `longest` is that of `makespan`."""
        stages = stages_of(self.model, layout)
        shares = shares_of(self.model, layout, stages)
        ranks = self._ranks(layout, stages, shares)
        places = stage_ranks(layout.schedule, layout.pp, layout.virtual_stages)
        layers = [stages[rank].layers / places.count(rank) for rank in places]
        f, b = ([n * took for n in layers] for took in ranks.layer)
        f[0] += ranks.ends[0]
        f[-1] += ranks.ends[1]
        b[-1] += ranks.ends[2]
        beside = f
        exchanged = ranks.microbatch.kind.forward["experts"]  # of a layer
        if exchanged and self.stack.overlaps_pairs:
            both = zip(f, b, layers, strict=True)
            beside = [one - self._hidden_in_pair(one, two, n * exchanged) for one, two, n in both]
        shape = layout.schedule, layout.pp, layout.microbatches, layout.virtual_stages
        free = PipelineTimes(*shape, tuple(f), tuple(b), tuple(beside))
        played = free.with_messages(self._hop(layout), blocking=self.stack.blocks(layout.virtual_stages))
        after = self._after(_play(played, longest), ranks, layout, shares)
        return StepTime(free, played, longest, after, ranks)

    def seconds(self, layout: Layout) -> Numbers:
        """Return the approximate seconds per step of many layouts."""
        stages = stages_of(self.model, layout)
        shares = shares_of(self.model, layout, stages)
        ranks = self._ranks(layout, stages, shares)
        idle, hops, pairs = self._ask_schedules(layout)
        f, b = ranks.forward, ranks.backward
        whole = self.model.layers * (ranks.layer[0] + ranks.layer[1]) + sum(ranks.ends)
        pipeline = layout.microbatches * (f + b) + (whole - f - b) * idle + hops * self._hop(layout)
        if self.stack.overlaps_pairs:
            exchanged = ranks.slowest[1] * ranks.microbatch.kind.forward["experts"]
            pipeline = pipeline - pairs * self._hidden_in_pair(f, b, exchanged)
        return pipeline + sum(self._after(pipeline, ranks, layout, shares).values())

    def _ask_schedules(self, layout: Layout) -> Numbers:
        """Return of many layouts: the bubble in a rank's times, exposed messages, forwards per stage run in pairs."""

        def facts(schedule: str, pp: int, v: int, m: int) -> tuple[float, float, float]:
            pairs = pairs_by_stage(schedule, pp, m, v) if self.stack.overlaps_pairs else (0,)
            if pp == 1:
                return 0.0, 0.0, sum(pairs) / len(pairs)
            share = catalogue.bubble(schedule, pp, m, v)
            # A rank sends each micro-batch once per virtual stage, forward and backward; interleaving makes v times as
            # many messages (Narayanan et al. 2021, section 2.2.2). A stack whose sends block waits for all of them.
            exposed = 2.0 * m * v if self.stack.blocks(v) else 2.0 * m * (v - 1) / v
            return share / (1 - share) * m / (pp - 1), 2 * (pp - 1) + exposed, sum(pairs) / len(pairs)

        shapes, which = layout.shapes
        return np.array([facts(*shape) for shape in shapes])[which].T

    # ---- ranks

    def _ranks(self, layout: Layout, stages: Sequence[Stage], shares: Shares) -> RankTimes:
        one = self.microbatch(layout)
        again = one.kind.again(layout.recompute)
        forward, backward = one.forward, one.backward + again
        waits = self._gathers(layout, shares, forward, backward)
        forward, backward = forward + waits[0], backward + waits[1]
        ends = one.embedding + waits[2], one.head / 3, one.head * 2 / 3 + where(layout.pp > 1, waits[2], 0.0)
        ranks = []
        for rank, stage in enumerate(stages):
            f = stage.layers * forward + stage.first * ends[0] + stage.last * ends[1]
            ranks.append((rank, stage.layers, stage.last, f, stage.layers * backward + stage.last * ends[2]))
        *slowest, f, b = at_largest([f + b for *_, f, b in ranks], *zip(*ranks, strict=True))
        return RankTimes(one, again, waits, (forward, backward), ends, tuple(slowest), f, b)

    def _hidden_in_pair(self, forward: Numbers, backward: Numbers, exchanged: Numbers) -> Numbers:
        """Return the seconds that a pair saves: all-to-alls, `exchanged` seconds each, hide in the other's compute."""
        ways = (overlapped_time(each - exchanged, exchanged) for each in (backward, forward))
        return forward + backward - sum(ways)

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

        Experts have replicas of their own, ep apart: where ep fills a node, each of these is on another one. An
        all-reduce is among all replicas, other collectives among those that ZeRO shards among. `parameters` are those
        of a rank without its experts, and of these. Without `shares` one call sends everything.
        """
        if is_zero(parameters[0] + parameters[1]):
            return 0.0
        whole, own = kind == Kind.ALL_REDUCE, where(layout.ep > 1, parameters[1], 0.0)

        def send(held: Numbers, axis: str, n: Numbers = None) -> Numbers:
            calls = self._calls(held, element, layout, shares) if shares else 1
            return self.collective(kind, element * held, layout, axis, n, calls)

        took = send(sum(parameters) - own, "replicas" if whole else "shards")
        if is_zero(own):
            return took
        return took + send(own, "edp", layout.expert_shards * (layout.groups if whole else 1))

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
        """Return what a layer's forward and backward wait for under ZeRO-3, and what nothing hides per micro-batch.

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
            beside_forward = overlapped_time(forward, gather) - forward
            beside_backward = overlapped_time(backward, beside) - backward
            first = where(ahead, beside_forward, gather)
            waits = first, beside_backward + where(ahead, 0.0, gather), gather + edge
        waited, waited_backward, alone = (where(zero == 3, each, 0.0) for each in waits)
        return waited, waited_backward, alone

    def _reductions(self, layout: Layout, shares: Shares) -> tuple[Numbers, Numbers, Numbers]:
        """Return the seconds of reducing all gradients once, of gathering new weights, and of what nothing runs beside.

        The last: ranks along tp that hold the same experts sum the gradients of these, each of its part of the
        sequence, before the update; under ZeRO these are shards.
        """
        stack, zero = self.stack, layout.zero
        own = shares.fullest.experts * layout.trainable
        rest = shares.fullest.weights * layout.trainable - own
        alike = layout.alike & layout.sequence_parallel & (layout.tp > 1)
        shard = own / where(zero > 0, layout.expert_shards, 1)
        summed = self.collective(Kind.ALL_REDUCE, where(alike, stack.reduced * shard, 0.0), layout, "tp")
        # What a layout's stage of ZeRO does not send is 0 bytes, which take no time.
        several = layout.replicas > 1
        sent = several & (zero == 0), several & (zero > 0) & (zero < 3)
        every, part = ((rest * each, own * each) for each in sent)
        reduce = self._of_replicas(Kind.ALL_REDUCE, every, stack.reduced, layout, shares)
        reduce = reduce + self._of_replicas(Kind.REDUCE_SCATTER, part, stack.reduced, layout, shares)
        calls = self._calls(rest + own, stack.reduced, layout, shares)
        reduce = reduce + self._over_groups(part, stack.reduced, layout, calls)
        return reduce, self._of_replicas(Kind.ALL_GATHER, part, stack.element, layout, shares), summed

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
    """Return how many micro-batches' backwards hide the last reduction; as many forwards hide the gather of weights.

    With v interleaved stages, the last one's gradients are complete when pp micro-batches still have to go through each
    of the others; otherwise with the last micro-batch.
    """
    v, schedule = layout.virtual_stages, layout.schedule
    if isinstance(schedule, Schedule):
        return 1
    looped = ((schedule == INTERLEAVED_1F1B) | (schedule == OVERLAPPED_1F1B)) & (v > 1)
    return where(looped, 1 / v + (v - 1) / v * smaller(layout.pp, layout.microbatches), 1)
