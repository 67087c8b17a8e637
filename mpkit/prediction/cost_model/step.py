"""Step: the times of layers composed to the time of a step.

    stages       what their layers take, forward, recomputation and backward (`mpkit.prediction.cost_model.stages`)
    pairs        of a forward and a backward that run as one each computes while the other's tokens travel to experts
    pipeline     the schedule played with these times, message by message
    replicas     gradients reduced beside the last backward, or after it; under ZeRO-1 and -2 new weights
                 gathered, beside the next forward or before it
    optimizer    the bytes that Adam moves
    stragglers   all wait for the slowest node

Communication slows the compute that hides it, by KAPPA of the time that they share: both need the memory's bandwidth,
and collectives occupy multiprocessors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import log2

from mpkit.devices.hardware import Hardware
from mpkit.plan.schedule.catalogue import INTERLEAVED_1F1B, OVERLAPPED_1F1B
from mpkit.plan.schedule.core import Schedule
from mpkit.plan.schedule.play import BESIDE
from mpkit.plan.schedule.summary import LONG, makespan, pairs_by_stage, stage_ranks
from mpkit.prediction.cost_model.architecture import Architecture
from mpkit.prediction.cost_model.communication import Network, T, network_of, overlapped_time
from mpkit.prediction.cost_model.kernels import Kernels, kernels_of
from mpkit.prediction.cost_model.layout import Layout, ParameterShares
from mpkit.prediction.cost_model.stack import Constants, Stack
from mpkit.prediction.cost_model.stages import StageTimes, stages_of, time_of_replicas, time_over_groups
from mpkit.trace import Kind

__all__ = [
    "StepTime", "hidden_in_pair", "hop_time", "micro_batches_beside", "optimizer_time", "reductions_of", "step_time",
]  # fmt: skip

HOST_ADAM = 4e9
"""Parameters per second that the processors of a node update; ZeRO-Offload (Ren et al. 2021), table 4: 1 B in .22 s,
10 B in 2.57 s."""
ADAM = 32
"""Bytes per parameter that the update moves: gradient, master weight and two states read; three of them written."""


@dataclass(frozen=True)
class StepTime:
    """The time of a step.

    Attributes:
        layout: how the step is divided.
        forward, backward: seconds per micro-batch of each stage; the backward with what is computed again.
        hop: seconds of a message between stages.
        blocking: whether a stage waits until its messages have been sent.
        pipeline: seconds of all micro-batches.
        after: seconds of what follows these, in order: "replicas", "optimizer" and "stragglers".
        steady: seconds by cause of the work of the rank with most.
        beside: seconds per micro-batch that a forward of each stage adds to a backward with which it runs as one.
        longest: the most actions of a schedule that are played.
    """

    layout: Layout
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    hop: float
    blocking: bool
    pipeline: float
    after: dict[str, float]
    steady: dict[str, float]
    beside: tuple[float, ...]
    longest: int = LONG

    @property
    def seconds(self) -> float:
        """The whole."""
        return self.pipeline + sum(self.after.values())

    @cached_property
    def because(self) -> dict[str, float]:
        """Seconds by cause, in descending order; they add up to the whole."""
        work = sum(self.steady.values())
        free = self.pipeline
        if self.hop:
            times = self.forward, self.backward, self.beside
            free = _play_pipeline(*_shape(self.layout), *times, 0.0, self.longest)
        bubble = {"pipeline bubble": free - work, "messages between stages": self.pipeline - free}
        causes = self.steady | bubble | self.after
        # What rounding leaves of 0 is no cause.
        there = [(cause, time) for cause, time in causes.items() if time > 1e-12 * self.seconds]
        return dict(sorted(there, key=lambda each: -each[1]))

    @property
    def played_times(self) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...], float]:
        """Seconds of each stage's forward, backward and forward beside one, and of a message, as they are played."""
        return _with_sends(self.forward, self.backward, self.beside, self.hop, self.blocking)


def step_time(
    model: Architecture, layout: Layout, sequence: int, hardware: Hardware, stack: Stack, constants: Constants,
    shares: ParameterShares | None = None, longest: int = LONG,
) -> StepTime:  # fmt: skip
    """Return the time of a step.

    Args:
        model: the architecture.
        layout: how the step is divided.
        sequence: tokens per sample.
        hardware: the machine.
        stack, constants: what the software does with the plan, and how well.
        shares: the parameters of the ranks, if they are known already.
        longest: the most actions of a schedule that are played, as for `makespan`.
    """
    kernels, network = (
        kernels_of(hardware.device, stack, constants, layout.microbatches),
        network_of(hardware),
    )
    shares = shares or ParameterShares(model, layout, stack)
    stages = stages_of(model, layout, sequence, kernels, network, shares)
    hop = hop_time(model, layout, sequence, hardware, network, stack)

    # ---- pipeline
    ranks = stage_ranks(layout.schedule, layout.pp, layout.virtual_stages)
    forward, backward = stages.of_stages(ranks)
    beside = _times_beside(stages, ranks, layout, stack)
    blocking = stack.blocks(layout.virtual_stages)
    pipeline = _play_pipeline(
        *_shape(layout), *_with_sends(forward, backward, beside, hop, blocking), longest
    )

    # ---- replicas, optimizer, stragglers
    after = _times_after(pipeline, stages, layout, hardware, kernels, network, shares)
    steady = stages.causes(layout.microbatches)
    if beside != forward:
        pairs = pairs_by_stage(*_shape(layout))
        hidden = zip(ranks, pairs, forward, beside, strict=True)
        steady["experts"] -= sum(n * (f - less) for rank, n, f, less in hidden if rank == stages.slowest)
    return StepTime(layout, forward, backward, hop, blocking, pipeline, after, steady, beside, longest)


def _times_beside(
    stages: StageTimes, ranks: tuple[int, ...], layout: Layout, stack: Stack
) -> tuple[float, ...]:
    """Return the seconds that a forward of each stage adds to a backward with which it runs as one.

    The forward's all-to-alls travel while the backward computes, and the backward's while the forward computes.
    """
    forward, backward = stages.of_stages(ranks)
    exchanged = stages.causes_of[0]["experts"] / 2  # of a layer, either way
    if not exchanged or not stack.overlaps_pairs:
        return forward
    return tuple(
        f - hidden_in_pair(f, b, n * exchanged)
        for f, b, n in zip(forward, backward, stages.layers_by_stage(ranks), strict=True)
    )


def hidden_in_pair(forward: T, backward: T, exchanged: T) -> T:
    """Return the seconds that a pair of a forward and a backward saves, of a stage or of an array of them.

    Args:
        forward, backward: seconds of each alone.
        exchanged: those of either in which its tokens travel.
    """
    beside = overlapped_time(backward - exchanged, exchanged) + overlapped_time(
        forward - exchanged, exchanged
    )
    return forward + backward - beside


def _times_after(
    pipeline: float, stages: StageTimes, layout: Layout, hardware: Hardware, kernels: Kernels, network: Network,
    shares: ParameterShares,
) -> dict[str, float]:  # fmt: skip
    """Return the seconds of what follows the pipeline, in order."""
    forward, backward = stages.of_rank(stages.slowest)
    reduced = _reduction_time(layout, shares, network, kernels.stack, forward, backward)
    optimizer = optimizer_time(layout, shares, hardware, kernels)
    doublings = log2(max(1.0, layout.ranks / hardware.per_node))
    late = (pipeline + reduced + optimizer) * kernels.constants.straggle * doublings
    return {"replicas": reduced, "optimizer": optimizer, "stragglers": late}


def _with_sends(
    forward: tuple[float, ...],
    backward: tuple[float, ...],
    beside: tuple[float, ...],
    hop: float,
    blocking: bool,
) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...], float]:
    """Return the seconds of each stage's forward, backward and forward beside one, and of a message; a stage waits for
    sends that block.
    """
    if not blocking:
        return forward, backward, beside, hop
    # The last stage sends no output, and the first no gradient.
    sent, less = ((*(time + hop for time in each[:-1]), each[-1]) for each in (forward, beside))
    return sent, (backward[0], *(time + hop for time in backward[1:])), less, 0.0


def _shape(layout: Layout) -> tuple[str | Schedule, int, int, int]:
    return layout.schedule, layout.pp, layout.microbatches, layout.virtual_stages


@lru_cache(4096)  # plans that differ in what follows the pipeline share it
def _play_pipeline(
    schedule: str | Schedule, p: int, m: int, v: int, forward: tuple[float, ...], backward: tuple[float, ...],
    beside: tuple[float, ...], hop: float, longest: int,
) -> float:  # fmt: skip
    """Return the seconds of a schedule in which the two halves of a backward take equally long."""
    if p == 1:
        pairs = pairs_by_stage(schedule, p, m, v)
        hidden = sum(n * (f - less) for n, f, less in zip(pairs, forward, beside, strict=True))
        return m * (sum(forward) + sum(backward)) - hidden
    halves = [time / 2 for time in backward]
    slots = {"F": forward, "B": backward, "I": halves, "W": halves, BESIDE: beside}
    return makespan(schedule, p, m, v, slots, hop, longest)


def optimizer_time(layout: Layout, shares: ParameterShares, hardware: Hardware, kernels: Kernels) -> float:
    """Return the seconds of the update: Adam's traffic; of states on the host, the way there and back and its Adam."""
    if layout.offload == "none":
        return kernels.move(ADAM * shares.updated)
    beside = min(layout.ranks, hardware.per_node)  # they share the node's processors
    moved = 2 * kernels.stack.element * shares.updated / hardware.device.host
    return moved + beside * shares.updated / HOST_ADAM


def hop_time(
    model: Architecture, layout: Layout, sequence: int, hardware: Hardware, network: Network, stack: Stack
) -> float:
    """Return the seconds of a message between stages, forward or backward."""
    if layout.pp == 1:
        return 0.0
    nbytes = stack.element * layout.microbatch * sequence / layout.cp * model.hidden
    apart = layout.tp * layout.replicas  # ranks from one stage to the next
    parts = layout.tp if layout.sequence_parallel or stack.scatter_gather else 1
    hop = network.message(nbytes / parts, apart >= hardware.per_node)
    if parts > 1 and not layout.sequence_parallel:
        inside = layout.per_node("tp", network.per_node)
        hop += network.time(Kind.ALL_GATHER, nbytes, parts, inside)
    return hop


def _reduction_time(
    layout: Layout, shares: ParameterShares, network: Network, stack: Stack, forward: float, backward: float
) -> float:  # fmt: skip
    """Return the exposed seconds in which replicas make their gradients, and then their weights, equal.

    Args:
        layout, shares, network, stack: as for the step.
        forward, backward: seconds of a micro-batch. Gradients are reduced beside the last backward, under ZeRO-2 beside
            each; new weights are gathered beside the first forward, or after the update (`Stack.gathers_ahead`).
    """
    reduce, gather, summed = reductions_of(layout, shares, network, stack)
    each = layout.microbatches if layout.zero == 2 else 1
    if not stack.overlap or (layout.pp > 1 and not stack.staged_overlap):
        return each * reduce + gather + summed
    beside = micro_batches_beside(layout)
    forward, backward = beside * forward, max(beside, layout.microbatches * (layout.zero == 2)) * backward
    if layout.zero >= stack.gathers_ahead:
        gather = overlapped_time(forward, gather) - forward
    return overlapped_time(backward, each * reduce) - backward + gather + summed


def reductions_of(
    layout: Layout, shares: ParameterShares, network: Network, stack: Stack
) -> tuple[float, float, float]:
    """Return the seconds of collectives that keep replicas equal, whatever runs beside them.

    They are: to reduce all gradients once; to gather new weights; and what nothing runs beside: ranks along tp that
    hold the same experts sum the gradients of these, each of its part of the sequence. They do that before the update,
    so that under ZeRO it is their shards.
    """
    own = shares.own * layout.trainable
    reduce = gather = summed = 0.0
    if layout.summed_experts:
        updated = own / (layout.expert_shards if layout.zero else 1)
        inside = layout.per_node("tp", network.per_node)
        summed = network.time(Kind.ALL_REDUCE, stack.reduced * updated, layout.tp, inside)
    if layout.replicas < 2 or layout.zero == 3:
        return reduce, gather, summed
    held = shares.parameters * layout.trainable - own, own
    if not layout.zero:
        reduce = time_of_replicas(Kind.ALL_REDUCE, held, stack.reduced, layout, network, shares)
    else:  # ZeRO reduces to shards
        calls = shares.calls(sum(held), stack.reduced, layout)
        reduce = time_of_replicas(Kind.REDUCE_SCATTER, held, stack.reduced, layout, network, shares)
        reduce += time_over_groups(held, stack.reduced, layout, network, calls)
        gather = time_of_replicas(Kind.ALL_GATHER, held, stack.element, layout, network, shares)
    return reduce, gather, summed


def micro_batches_beside(layout: Layout) -> float:
    """Return how many micro-batches' backwards the last gradients are reduced beside; as many forwards gather weights.

    Of one stage per rank that is the last one. Of v interleaved ones, the last stage's gradients are complete when pp
    micro-batches have still to go through each of the others.

    >>> micro_batches_beside(Layout(pp=4, microbatches=8))
    1
    >>> micro_batches_beside(Layout(pp=4, microbatches=8, virtual_stages=2, schedule="interleaved_1f1b"))
    2.5
    """
    v = layout.virtual_stages
    if v == 1 or layout.schedule not in (INTERLEAVED_1F1B, OVERLAPPED_1F1B):
        return 1
    return 1 / v + (v - 1) / v * min(layout.pp, layout.microbatches)
