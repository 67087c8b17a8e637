"""What the device's own allocator says beside the ledger: memory that no category named.

The ledger knows the tensors that something is said of: parameters, what autograd saved, buckets. It does not know an
operator's temporaries (the copies of the logits in a loss's backward), a library's workspace, or a batch. On the CPU
nobody counts these. On a GPU torch's caching allocator does, so there the ledger is brought up to it:

    look      what was allocated at most since the last look, beyond what is held, came and went: a spike of "buffers"
    settle    what is allocated now, beyond what the categories hold, stays in "buffers"

The largest total of a rank's records is then `torch.cuda.max_memory_allocated`.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from mpkit.trace.record.ledger import Ledger

__all__ = ["DeviceAllocator", "HasStats", "allocated_on"]


class HasStats(Protocol):
    """`torch.cuda`, `torch.xpu`: a device's module whose allocator keeps statistics."""

    def memory_stats_as_nested_dict(self, device: Any = None) -> dict[str, Any]:
        """Return the statistics."""

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """Let the peak be what is allocated now."""


class DeviceAllocator:
    """The allocator of a rank's device, and the ledger that is brought up to it."""

    def __init__(self, api: HasStats, device: torch.device, ledger: Ledger) -> None:
        self._api, self._device, self._ledger = api, device, ledger
        self._unnamed = 0

    def look(self) -> int:
        """Write what came and went since the last look; return the bytes that are allocated now."""
        told = self._api.memory_stats_as_nested_dict(self._device).get("allocated_bytes")
        if told is None:  # nothing has been allocated on this device yet
            return 0
        now, peak = told["all"]["current"], told["all"]["peak"]
        passed = peak - sum(self._ledger.held.values())
        if passed > 0:
            self._ledger.change(("buffers", passed), ("buffers", -passed))
        self._api.reset_peak_memory_stats(self._device)
        return int(now)

    def settle(self) -> None:
        """Write what came and went, and what is allocated now and in no category."""
        now, held = self.look(), self._ledger.held
        unnamed = min(self._unnamed, held["buffers"])  # less where the ledger has started anew
        by = max(now - sum(held.values()), -unnamed)
        self._ledger.change(("buffers", by))
        self._unnamed = unnamed + by


def allocated_on(device: torch.device | None, ledger: Ledger) -> DeviceAllocator | None:
    """Return the allocator of a device; None where it keeps no statistics, as on the CPU.

    >>> allocated_on(torch.device("cpu"), None) is None  # type: ignore[arg-type]
    True
    """
    api = None if device is None else getattr(torch, device.type, None)
    return DeviceAllocator(api, device, ledger) if hasattr(api, "memory_stats_as_nested_dict") else None  # type: ignore[arg-type]
