"""A network as separate operations, for puzzles: each is recorded with what it costs, and each tensor counts.

    Layers     load, inputs, empty, forward, loss, backward, update: real numbers, float64; `train_layers` is that of
               one device
    steps      the time on a machine where one forward of one micro-batch through one layer takes 1
    memory     the peak of a rank, in activations of one micro-batch
    left_out   forwards and backwards that nobody did with these operations

Sizes are such that a weight is as large as two activations of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mpkit.course.framework.exercise import Budget, Case
from mpkit.course.framework.measures import peak
from mpkit.course.framework.memory import Memory
from mpkit.course.framework.observation import Seen
from mpkit.devices.device import Device
from mpkit.devices.hardware import Hardware
from mpkit.devices.link import Link
from mpkit.timeline.timeline import Timeline
from mpkit.trace import Kind

if TYPE_CHECKING:
    from mpkit.strategies.rank_context import Context

__all__ = [
    "MEMORY",
    "TIME",
    "Layers",
    "budgets",
    "in_parts",
    "in_turn",
    "play",
    "staged_weights",
    "train_layers",
    "whole_batch",
]

ROWS, WIDTH = 8, 16
UNIT = ROWS * WIDTH * 8
"""Bytes of an activation of one micro-batch."""

RATE, MOMENTUM = 0.1, 0.9

HOP = 0.1
MACHINE = Hardware(
    "puzzles",
    Device("a layer's forward of a micro-batch in 1", {"float32": 1.0}, 1e30),
    Link("hops", HOP, 1e30),
)

TIME, MEMORY, LEFT_OUT = "time", "memory of a rank, in activations", "forwards and backwards left out"


class Layers:
    """A network of equal layers, y = tanh(x) Wᵀ, and a batch of micro-batches.

    Args:
        ctx: the rank's context, which records the operations; None: nothing is recorded.
        case: the case, with the sizes "layers" and "microbatches".

    Attributes:
        count: the number of layers.
        microbatches: the number of micro-batches in the whole batch, over all ranks.
    """

    def __init__(self, ctx: Context | None, case: Case) -> None:
        self.count: int = case["layers"]
        self.microbatches: int = case["microbatches"]
        self._record = ctx.record if ctx is not None else None
        draw = np.random.default_rng(case.seed)
        self._weights = draw.normal(size=(self.count, WIDTH, WIDTH)) / WIDTH**0.5
        self._momenta = draw.normal(size=(self.count, WIDTH, WIDTH)) / WIDTH
        self._inputs = draw.normal(size=(self.microbatches, ROWS, WIDTH))
        self._targets = draw.normal(size=(self.microbatches, ROWS, WIDTH))

    def load(self, layer: int, part: int = 0, parts: int = 1) -> tuple[Tensor, Tensor]:
        """Return a layer's weight and momentum, (width, width) each, or one of `parts` equal parts of their rows."""
        rows = slice(part * WIDTH // parts, (part + 1) * WIDTH // parts)
        return self._track_tensor(self._weights[layer, rows], "params"), self._track_tensor(
            self._momenta[layer, rows], "optimizer"
        )

    def inputs(self, numbers: Sequence[int]) -> Tensor:
        """Return the inputs of these micro-batches, one after the other."""
        return self._track_tensor(np.concatenate([self._inputs[i] for i in numbers]), "activations")

    def empty(self, count: int = 1) -> Tensor:
        """Return a tensor to receive the activations, or their gradients, of `count` micro-batches into."""
        return self._track_tensor(np.full((count * ROWS, WIDTH), np.nan), "activations")

    def forward(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        """Return the layer's output."""
        w = self._whole("forward", layer, weight)
        op = self._begin(Kind.FORWARD, layer, len(x) / ROWS)
        y = self._track_tensor(np.tanh(x.numpy()) @ w.T, "activations")
        self._end(op)
        return y

    def loss(self, y: Tensor, numbers: Sequence[int]) -> Tensor:
        """Return the gradient of the last output y, of the mean squared error over the whole batch of all ranks."""
        targets = np.concatenate([self._targets[i] for i in numbers])
        if targets.shape != tuple(y.shape):
            raise ValueError(
                f"loss: y is of {len(y) // ROWS} micro-batches, and numbers={list(numbers)} names {len(numbers)}"
            )
        return self._track_tensor(2 * (y.numpy() - targets) / self._targets.size, "activations")

    def backward(self, layer: int, x: Tensor, dy: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of the layer's weight and of its input x, from its output's."""
        w = self._whole("backward", layer, weight)
        if x.shape != dy.shape:
            raise ValueError(
                f"backward: x is {list(x.shape)}, and dy {list(dy.shape)}: of the same micro-batches?"
            )
        op = self._begin(Kind.BACKWARD, layer, 2 * len(x) / ROWS)
        hidden = np.tanh(x.numpy())
        dweight = self._track_tensor(dy.numpy().T @ hidden, "grads")
        dx = self._track_tensor((dy.numpy() @ w) * (1 - hidden**2), "activations")
        self._end(op)
        return dweight, dx

    def update(self, layer: int, weight: Tensor, momentum: Tensor, dweight: Tensor) -> None:
        """Update a weight, or a part of one, and its momentum in place."""
        if not weight.shape == momentum.shape == dweight.shape:
            shapes = ", ".join(str(list(each.shape)) for each in (weight, momentum, dweight))
            raise ValueError(
                f"update: weight, momentum and gradient are {shapes}; they have to be the same part"
            )
        op = self._begin(Kind.OPTIMIZER, layer, 0.5 * len(weight) / WIDTH)
        v, w = momentum.numpy(), weight.numpy()
        v *= MOMENTUM
        v += dweight.numpy()
        w -= RATE * v
        self._end(op)

    def _whole(self, what: str, layer: int, weight: Tensor) -> Any:
        if tuple(weight.shape) != (WIDTH, WIDTH):
            raise ValueError(
                f"{what} of layer {layer} needs the whole weight, {[WIDTH, WIDTH]}; given is {list(weight.shape)}"
            )
        return weight.numpy()

    def _track_tensor(self, array: Any, category: str) -> Tensor:
        tensor = torch.from_numpy(np.array(array))
        if self._record is not None:
            self._record.ledger.track(tensor, category)
        return tensor

    def _begin(self, kind: Kind, layer: int, cost: float) -> int:
        return self._record.begin(kind, stage=layer, flops=cost) if self._record is not None else -1

    def _end(self, op: int) -> None:
        if self._record is not None:
            self._record.end(op)


def train_layers(case: Case) -> list[Tensor]:
    """Return the weights of all layers after the step, as one device computes them on the whole batch."""
    layers, everything = Layers(None, case), range(case["microbatches"])
    xs, loaded = [layers.inputs(everything)], [layers.load(layer) for layer in range(case["layers"])]
    for layer, (weight, _) in enumerate(loaded):
        xs.append(layers.forward(layer, xs[-1], weight))
    dy = layers.loss(xs[-1], everything)
    for layer, (weight, momentum) in reversed(list(enumerate(loaded))):
        dweight, dy = layers.backward(layer, xs[layer], dy, weight)
        layers.update(layer, weight, momentum, dweight)
    return [weight for weight, _ in loaded]


def in_parts(case: Case) -> list[dict[int, Tensor]]:
    """Return, by rank, its equal part of the rows of each trained weight."""
    weights = train_layers(case)
    return [{i: w.chunk(case.ranks)[rank] for i, w in enumerate(weights)} for rank in range(case.ranks)]


def staged_weights(case: Case) -> list[dict[int, Tensor]]:
    """Return, by rank, the trained weights of its stage, an equal part of consecutive layers."""
    weights, k = train_layers(case), case["layers"] // case.ranks
    return [{i: weights[i] for i in range(rank * k, (rank + 1) * k)} for rank in range(case.ranks)]


def play(ctx: Context, answer: Any, case: Case) -> object:
    """Run the answer on its layers; return what it returns, the weights that this rank ends with."""
    with torch.no_grad(), Memory(ctx):
        return answer(ctx, Layers(ctx, case))


# ---- measures


def steps(seen: Seen) -> float:
    """Return the time from the first operation to the last, on the puzzles' machine."""
    assert seen.trace is not None, "nothing was recorded"
    return round(float(Timeline.of(seen.trace, MACHINE).step_time), 6)


def memory(seen: Seen) -> float:
    """Return the peak of the fullest rank, in activations of one micro-batch."""
    return peak()(seen) / UNIT


def left_out(seen: Seen) -> float:
    """Return how many forwards and backwards of a micro-batch through a layer are missing, over all ranks."""
    assert seen.trace is not None, "nothing was recorded"
    asked = seen.case["layers"] * seen.case["microbatches"]
    missing = 0.0
    for kind, cost in ((Kind.FORWARD, 1), (Kind.BACKWARD, 2)):
        done = sum(float(rank.ops["flops"][rank.ops["kind"] == kind].sum()) for rank in seen.trace.ranks)
        missing += max(0.0, asked - done / cost)
    return missing


def whole_batch(seen: Seen) -> bool:
    """Return whether some forward of rank 0 ran on more than one micro-batch."""
    assert seen.trace is not None
    ops = seen.trace.ranks[0].ops
    return bool((ops["flops"][ops["kind"] == Kind.FORWARD] > 1).any())


def in_turn(seen: Seen) -> bool:
    """Return whether rank 0 alternates forwards and backwards of micro-batches, one after the other."""
    assert seen.trace is not None
    ops = seen.trace.ranks[0].ops
    kinds = ops["kind"][np.isin(ops["kind"], (Kind.FORWARD, Kind.BACKWARD))]
    turns = int((kinds[1:] != kinds[:-1]).sum())
    return turns > 1 and not whole_batch(seen)


def budgets(time: Callable[[Case], float], activations: Callable[[Case], float]) -> tuple[Budget, ...]:
    """Return the budgets of a puzzle: its targets of time and memory, and that the operations do the work."""
    return (
        Budget(LEFT_OUT, left_out, 0),
        Budget(TIME, steps, time),
        Budget(MEMORY, memory, activations),
    )
