"""Kernels: how long a matrix product, an attention and elementwise operators take on a device.

    product        F / (e peak) + bytes / bandwidth: two terms that add up fit 183 products measured on an A100 to 4 %.
                   Where the products of a device were measured by shape (`kernels.csv`), its table is used instead:
                   on B200 the share of the peak is between .39 and .66 for like shapes, which no formula gives
    attention      F / (e peak) + s tau: a tile visits all keys one after the other, however few heads there are
    elementwise    bytes / bandwidth

Sources: Calculon (Isaev et al., SC 2023) adds the two terms; shapes measured by MooreThreads/SimuMax.
"""

from __future__ import annotations

import csv
from functools import cache, lru_cache
from importlib.resources import files
from math import log

from mpkit.devices.hardware import Device
from mpkit.prediction.cost_model.stack import Constants, Stack

__all__ = ["CONVERTED", "LAUNCH", "Kernels", "kernels_of", "measured_share", "peak_of"]

STREAM = 0.8
"""The share of the memory's bandwidth that streaming kernels reach."""
TILE = 25e-9
"""Seconds per key that a tile of attention takes at least; fitted to attention with few heads on A100 and B200."""
LAUNCH = 8e-6
"""Seconds per product of a group that is run one after the other: experts."""
CONVERTED = {"tensor": 2.5, "row": 7.0, "block": 2.0, "block128": 2.0}
"""What converting an operand moves, in units of its bytes, by what shares a scale. For a tensor its largest value is
read before its values, which are written in half as many bytes. A block is scaled as it is read, and written for both
directions in which products read it. Rows differ by direction, so they are converted twice; 7 instead of 5 is fitted
to one comparison, Llama 3 8B on 8 H100, where rowwise is 11.5 % faster than 16 bits (torchtitan at 7a04053)."""
PACE = {"block128": (1.66 / 2, 1.34 / 2)}
"""Of the rate without scales, what products reach by what shares a scale: with a weight, and of a weight's gradient,
both of whose operands have scales along the sum. Hopper's tensor cores know no scales of blocks, so CUDA cores add the
partial sums up. Measured on H100 with 16,640 tokens, 5,120 and 8,192: 1.66 times as fast as 16 bits (608 and 1,009
TFLOP/s; pytorch/ao, pull request 2784) and 1.34 times (433 and 580; pull request 3342)."""


class Kernels:
    """The kernels of a stack on a device.

    Args:
        device: the device; its `peak` by dtype counts, not the rate that its best shape reaches.
        stack, constants: what the stack does, and how well.
        microbatches: of a step.
    """

    def __init__(self, device: Device, stack: Stack, constants: Constants, microbatches: int = 1) -> None:
        dtype = "bfloat16" if stack.element == 2 else "float32"
        self.peak = peak_of(device, dtype)
        self.narrow = stack.fp8 or stack.fp4
        self.narrow_peak = device.peak.get("float4" if stack.fp4 else "float8", self.peak)
        self.stack, self.constants = stack, constants
        self._pace = PACE.get(stack.scaling, (1.0, 1.0))
        self._conversions = 1 / microbatches if stack.converts_once else 1.0  # of a weight, per micro-batch
        self.bandwidth = STREAM * device.bandwidth
        self._table = device.name if device.name in _measured_shapes() else ""
        self._better = constants.matmul / 0.72

    def product(self, tokens: float, k: int, n: int, *, can_narrow: bool = False) -> tuple[float, float]:
        """Return the seconds of the forward, and of the backward's two products.

        Args:
            tokens, k, n: the product is of [tokens, k] and [k, n].
            can_narrow: whether it runs in 8 or 4 bits, if the stack does that. Its operands are converted before.
        """
        flops = 2.0 * tokens * k * n
        narrow = can_narrow and self.narrow
        size = self.stack.element
        moved = size * (tokens * k + k * n + tokens * n) / self.bandwidth * STREAM
        if self._table and not narrow:
            at_peak, shares = flops / self.peak / self._better, (tokens, k, n)
            forward = at_peak / measured_share(self._table, "TN", *shares)
            back = at_peak / measured_share(self._table, "NN", tokens, n, k)
            return forward, back + at_peak / measured_share(self._table, "NT", n, tokens, k)
        accumulated = self.stack.gradient * k * n / self.bandwidth * STREAM
        if not narrow:
            forward = flops / (self.peak * self.constants.matmul) + moved
            return forward, 2 * forward + accumulated
        converted = CONVERTED[self.stack.scaling] * size / self.bandwidth
        at_rate, (pace, back_pace) = flops / (self.narrow_peak * self.constants.matmul), self._pace
        forward, of_weight = at_rate / pace + moved / 2, at_rate / back_pace + moved / 2
        return (
            forward + converted * (tokens * k + k * n * self._conversions),
            forward + of_weight + accumulated + converted * tokens * n,
        )

    def attention(self, flops: float, scores: float, sequence: int) -> tuple[float, float]:
        """Return the seconds of the forward and of the backward of an attention without its weights.

        Args:
            flops: of the forward; the half of it if the attention is causal and fused.
            scores: elements of its s x s scores, all heads and samples of this rank.
            sequence: keys per query, s.
        """
        if self.stack.fused:
            forward, tiles = flops / (self.peak * self.constants.attention), sequence * TILE
            return forward + tiles, 2.5 * forward + tiles  # the backward computes the scores again
        forward = flops / (self.peak * self.constants.matmul) + self.constants.attention * self.move(
            13 * scores
        )
        return forward, 2 * forward

    def move(self, nbytes: float) -> float:
        """Return the seconds that streaming kernels take for so many bytes."""
        return nbytes / self.bandwidth

    def elementwise(self, nbytes: float) -> float:
        """Return the seconds of elementwise operators that would move so many bytes if they were well fused."""
        return self.constants.traffic * nbytes / self.bandwidth


def kernels_of(device: Device, stack: Stack, constants: Constants, microbatches: int = 1) -> Kernels:
    """Return the kernels of a stack on a device, for a step of so many micro-batches; equal ones are one object."""
    return _kernels(device, stack, constants, microbatches if stack.converts_once else 1)


@lru_cache(64)
def _kernels(device: Device, stack: Stack, constants: Constants, microbatches: int) -> Kernels:
    return Kernels(device, stack, constants, microbatches)


def peak_of(device: Device, dtype: str) -> float:
    """Return the published peak in FLOP/s; the rate that is known where no peak is."""
    return device.peak.get(dtype) or device.rate(dtype)


@cache
def _measured_shapes() -> dict[str, dict[str, list[tuple[float, float, float, float]]]]:
    """Return by device and layout the measured shapes, as logarithms, and their share of the peak."""
    out: dict[str, dict[str, list[tuple[float, float, float, float]]]] = {}
    with files("mpkit.prediction.cost_model").joinpath("kernels.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            shape = log(int(row["m"])), log(int(row["k"])), log(int(row["n"])), float(row["share"])
            out.setdefault(row["device"], {}).setdefault(row["layout"], []).append(shape)
    return out


@cache
def measured_share(device: str, layout: str, m: float, k: int, n: int) -> float:
    """Return the share of the peak that a product reaches: that of its shape, or of the three nearest, weighted.

    Args:
        device: a device of `kernels.csv`.
        layout: "TN" (forward), "NN" (gradient of the input) or "NT" (gradient of the weight).
        m, k, n: the product is of [m, k] and [k, n].

    >>> round(measured_share("B200 SXM", "TN", 4096, 8192, 10240), 3)
    0.645
    """
    at = log(m), log(k), log(n)
    near = sorted(
        (abs(at[0] - m) + abs(at[1] - k) + abs(at[2] - n), share)
        for m, k, n, share in _measured_shapes()[device][layout]
    )
    same = [share for distance, share in near if distance < 1e-9]
    if same:
        return sum(same) / len(same)
    weights = [(1 / (distance + 0.05), share) for distance, share in near[:3]]
    return sum(w * share for w, share in weights) / sum(w for w, _ in weights)
