"""Step: the times of layers composed to the time of a step.

    stage        its layers, forward, recomputation and backward; the last one with the head. Under ZeRO-3 each layer
                 waits for its parameters, which are gathered beside the layer before
    pipeline     m times the slowest stage, and once the others: the bubble of the schedule
    replicas     gradients reduced beside the last backward, or after it; under ZeRO-1 and -2 new weights gathered
    optimizer    the bytes that Adam moves
    straggle     all wait for the slowest node

Communication slows the compute that hides it, by KAPPA of the time that they share: both need the memory's bandwidth,
and collectives occupy multiprocessors.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from mpkit.cost_model.architecture import Architecture
from mpkit.cost_model.communication import Network
from mpkit.cost_model.kernels import Kernels
from mpkit.cost_model.layer import CAUSES, LayerTime, head_time, layer_time
from mpkit.cost_model.layout import Layout
from mpkit.cost_model.shares import Shares
from mpkit.cost_model.stack import Constants, Stack
from mpkit.devices.hardware import Hardware
from mpkit.schedule.summary import bubble
from mpkit.trace import Kind

__all__ = ["KAPPA", "StepTime", "overlapped", "step_time"]

KAPPA = 0.3
"""How much of the time that communication shares with compute is lost; fitted to all published rows at once."""
HOST_ADAM = 4e9
"""Parameters per second that the processors of a node update; ZeRO-Offload (Ren et al. 2021), table 4: 1 B in .22 s,
10 B in 2.57 s."""
ADAM = 32
"""Bytes per parameter that the update moves: gradient, master weight and two states read; three of them written."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """The time of a step.

    Attributes:
        seconds: the whole.
        because: seconds by cause, in descending order; they add up to the whole.
        forward, backward: seconds per micro-batch of each stage; the backward with what is computed again.
        hop: seconds of a message between stages.
    """

    seconds: float
    because: dict[str, float]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    hop: float


def overlapped(compute: float, communication: float) -> float:
    """Return the seconds that both take side by side.

    >>> overlapped(1.0, 0.5), overlapped(1.0, 2.0)
    (1.15, 2.0)
    """
    return max(compute + KAPPA * min(compute, communication), communication)


def step_time(
    model: Architecture, layout: Layout, sequence: int, hardware: Hardware, stack: Stack, constants: Constants,
    shares: Shares | None = None,
) -> StepTime:  # fmt: skip
    """Return the time of a step.

    Args:
        model: the architecture.
        layout: how the step is divided.
        sequence: tokens per sample.
        hardware: the machine.
        stack, constants: what the software does with the plan, and how well.
        shares: the parameters of the ranks, if they are known already.
    """
    kernels, network = Kernels(hardware.device, stack, constants), Network(hardware)
    shares = shares or Shares(model, layout, stack)
    stages = _stages(model, layout, sequence, kernels, network, shares)
    m, pp, slowest = layout.microbatches, layout.pp, stages.slowest

    # ---- pipeline
    hop = _hop(model, layout, sequence, hardware, network, stack)
    steady = m * stages.times[slowest]
    fill = _fill(layout, stages.times) if pp > 1 else 0.0
    messages = (2 * (pp - 1) + _exposed_messages(layout, stack)) * hop if pp > 1 else 0.0

    # ---- replicas, optimizer
    last = stages.backward[slowest]
    reduced = _reduced(layout, shares, network, stack, last, m * last)
    optimizer = _optimizer(layout, shares, hardware, kernels)

    # ---- straggle
    whole = steady + fill + messages + reduced + optimizer
    late = whole * constants.straggle * log2(max(1.0, layout.ranks / hardware.per_node))

    causes = stages.causes(m) | {
        "replicas": reduced,
        "pipeline bubble": fill,
        "messages between stages": messages,
        "optimizer": optimizer,
        "stragglers": late,
    }
    causes["embedding"] = max(0.0, whole + late - sum(causes.values()))
    because = dict(sorted(((k, s) for k, s in causes.items() if s > 0), key=lambda item: -item[1]))
    return StepTime(whole + late, because, tuple(stages.forward), tuple(stages.backward), hop)


@dataclass(frozen=True, slots=True)
class _Stages:
    """Seconds per micro-batch of each stage, and what they consist of.

    Attributes:
        forward, backward: of each stage; the backward with what is computed again.
        layers: the number of layers of each stage.
        mean: seconds by cause of a layer in the mean, of its forward and then of its backward.
        again: seconds of a layer that are computed again.
        waited: what ZeRO-3 adds to a layer's forward and backward, and to a micro-batch.
        head: seconds of the head and the loss.
        last: the stage that has them.
    """

    forward: list[float]
    backward: list[float]
    layers: list[int]
    mean: list[float]
    again: float
    waited: tuple[float, float, float]
    head: float
    last: int

    @property
    def times(self) -> list[float]:
        """Seconds of each stage, forward and backward."""
        return [f + b for f, b in zip(self.forward, self.backward, strict=True)]

    @property
    def slowest(self) -> int:
        """The stage that paces the pipeline."""
        times = self.times
        return max(range(len(times)), key=times.__getitem__)

    def causes(self, microbatches: int) -> dict[str, float]:
        """Return the seconds by cause of the slowest stage."""
        n = microbatches * self.layers[self.slowest]
        found = {cause: n * (self.mean[i] + self.mean[len(CAUSES) + i]) for i, cause in enumerate(CAUSES)}
        return found | {
            "recomputation": n * self.again,
            "head and loss": microbatches * self.head if self.slowest == self.last else 0.0,
            "ZeRO-3 gathers": n * (self.waited[0] + self.waited[1]) + microbatches * self.waited[2],
        }


def _stages(
    model: Architecture, layout: Layout, sequence: int, kernels: Kernels, network: Network, shares: Shares
) -> _Stages:
    """Return the times of the stages: each kind of layer is priced once."""
    kinds = [
        (count, layer_time(model, first, layout, sequence, kernels, network))
        for first, count in model.kinds()
    ]
    mean = [sum(count * each for count, each in parts) / model.layers for parts in _by_cause(kinds)]
    again = sum(count * layer.again for count, layer in kinds) / model.layers
    forward, backward = sum(mean[: len(CAUSES)]), sum(mean[len(CAUSES) :]) + again
    waited = _gathers(forward, backward, layout, shares, network) if layout.zero == 3 else (0.0, 0.0, 0.0)
    head = head_time(model, layout, sequence, kernels)
    embed = kernels.move(12 * layout.microbatch * sequence / layout.cp * model.hidden)
    layers = layout.stage_layers(model.layers)
    f = [n * (forward + waited[0]) for n in layers]
    b = [n * (backward + waited[1]) for n in layers]
    f[0] += embed + waited[2]
    f[layout.last] += head / 3
    b[layout.last] += head * 2 / 3 + (waited[2] if layout.pp > 1 else 0.0)
    return _Stages(f, b, layers, mean, again, waited, head, layout.last)


def _optimizer(layout: Layout, shares: Shares, hardware: Hardware, kernels: Kernels) -> float:
    """Return the seconds of the update: Adam's traffic; of states on the host, the way there and back and its Adam."""
    if layout.offload == "none":
        return kernels.move(ADAM * shares.updated)
    beside = min(layout.ranks, hardware.per_node)  # they share the node's processors
    moved = 2 * kernels.stack.element * shares.updated / hardware.device.host
    return moved + beside * shares.updated / HOST_ADAM


def _by_cause(kinds: list[tuple[int, LayerTime]]) -> list[list[tuple[int, float]]]:
    """Return for each cause, of forwards and then of backwards, the count and the seconds of each kind of layer."""
    columns = range(2 * len(CAUSES))
    rows = [(count, layer.forward + layer.backward) for count, layer in kinds]
    return [[(count, row[i]) for count, row in rows] for i in columns]


def _gathers(
    forward: float, backward: float, layout: Layout, shares: Shares, network: Network
) -> tuple[float, float, float]:
    """Return what ZeRO-3 adds to a layer's forward and backward, and per micro-batch for what nothing hides.

    Each layer is gathered in the forward and again in the backward, where its gradients are reduced too (FSDP; Zhao et
    al. 2023, section 4). The first gather of a micro-batch has nothing to hide behind.
    """
    stack = shares.stack
    n, inside = layout.replicas, layout.per_node("replicas", network.per_node)
    across = 0.0
    if stack.shard_within and n > inside:  # HSDP: nodes are replicas of each other
        across = network.time(Kind.ALL_REDUCE, stack.reduced * shares.layer / inside, n // inside, 1)
        n = inside
    gather = network.time(Kind.ALL_GATHER, stack.element * shares.layer, n, inside)
    reduce = network.time(Kind.REDUCE_SCATTER, stack.reduced * shares.layer, n, inside) + across
    edge = network.time(Kind.ALL_GATHER, stack.element * shares.edge, n, inside)
    if not stack.overlap:
        return gather, gather + reduce, edge
    waits = overlapped(forward, gather) - forward, overlapped(backward, gather + reduce) - backward
    return *waits, gather + edge


def _fill(layout: Layout, stages: list[float]) -> float:
    """Return the seconds that ranks idle while a pipeline fills and drains, as the schedule's bubble has it."""
    share = bubble(layout.schedule, layout.pp, layout.microbatches, layout.virtual_stages)
    ideal = share / (1 - share) * layout.microbatches  # in times of a stage
    return (sum(stages) - max(stages)) * ideal / (layout.pp - 1)


def _hop(
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


def _exposed_messages(layout: Layout, stack: Stack) -> float:
    """Return how many messages a step waits for beside those that fill the pipeline.

    A rank sends each micro-batch once per virtual stage, forward and backward; interleaving makes v times as many
    messages (Narayanan et al. 2021, section 2.2.2). A stack whose sends block waits for all of them.
    """
    m, v = layout.microbatches, layout.virtual_stages
    if stack.blocking_p2p:
        return 2.0 * m * v
    return 2.0 * m * (v - 1) / v


def _reduced(
    layout: Layout, shares: Shares, network: Network, stack: Stack, last: float, backwards: float
) -> float:
    """Return the exposed seconds in which replicas make their gradients, and then their weights, equal.

    Args:
        layout, shares, network, stack: as for the step.
        last: seconds of the last micro-batch's backward, beside which gradients are reduced.
        backwards: seconds of all backwards, beside which ZeRO-2 reduces each micro-batch's.
    """
    n, inside = layout.replicas, layout.per_node("replicas", network.per_node)
    if n < 2 or layout.zero == 3:
        return 0.0
    gradients = stack.reduced * shares.parameters * layout.trainable
    calls = shares.calls(gradients, layout)
    if layout.zero == 0:
        reduce, gather = network.time(Kind.ALL_REDUCE, gradients, n, inside, calls), 0.0
    else:
        times = layout.microbatches if layout.zero == 2 else 1
        last = backwards if layout.zero == 2 else last
        reduce = times * network.time(Kind.REDUCE_SCATTER, gradients, n, inside, calls)
        weights = stack.element * shares.parameters * layout.trainable
        gather = network.time(Kind.ALL_GATHER, weights, n, inside, shares.calls(weights, layout))
    if not stack.overlap or (layout.pp > 1 and not stack.staged_overlap):
        return reduce + gather
    return overlapped(last, reduce) - last + gather
