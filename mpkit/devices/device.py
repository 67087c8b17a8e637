"""Device: how long an op takes, by the roofline.

A device runs an op in the time of its arithmetic or of its memory traffic, whichever is longer.

Source: Williams, Waterman and Patterson 2009.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mpkit.common.tracebacks import public

__all__ = ["Device"]


@public
@dataclass(frozen=True)
class Device:
    """A device that computes: a GPU, or a core of a CPU.

    Attributes:
        name: the name of the device, such as "H100 SXM".
        flops: floating-point operations per second that large matrix products really reach, by dtype.
        bandwidth: bytes per second to and from its memory.
        memory: bytes of its memory; 0 if unknown.
        host: bytes per second between it and the host's memory.
        sources: by attribute, where its value is from: published, fitted or assumed.
        peak: published floating-point operations per second, by dtype: the unit of model FLOPs utilization.
        half: the precision of 16 bits that its matrix units have: "bf16", or "fp16" alone (Volta, Turing).
        blocked_convolutions: whether its convolutions are oneDNN's, whose kernels take memory for blocked copies
            (`mpkit.trace.record.workspace`).
    """

    name: str
    flops: Mapping[str, float] = field(hash=False)
    bandwidth: float
    memory: int = 0
    host: float = 10e9
    sources: Mapping[str, str] = field(default_factory=dict, hash=False, compare=False)
    peak: Mapping[str, float] = field(default_factory=dict, hash=False, compare=False)
    blocked_convolutions: bool = False
    half: str = "bf16"

    def rate(self, dtype: str = "float32") -> float:
        """Return the FLOPs per second in a dtype; a dtype for which the device has no units runs as float32.

        >>> Device("toy", {"float32": 1e12, "bfloat16": 8e12}, bandwidth=1e11).rate("bfloat16") / 1e12
        8.0
        """
        return self.flops.get(dtype, self.flops["float32"])

    def time(self, flops: float, nbytes: float = 0.0, dtype: str = "float32") -> float:
        """Return the seconds that an op takes: its arithmetic or its memory traffic, whichever is longer.

        >>> Device("toy", {"float32": 1e12}, bandwidth=1e11).time(flops=1e12, nbytes=2e11)
        2.0
        """
        return max(flops / self.rate(dtype), nbytes / self.bandwidth)
