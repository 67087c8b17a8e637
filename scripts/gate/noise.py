"""How noisy the machine is: stalls, and the share of time that its host gave to others (steal)."""

from __future__ import annotations

import threading
import time
from pathlib import Path

__all__ = ["Noise"]

NAP = 0.02
"""Seconds between two looks."""

STALL = 0.3
"""A look that comes later than this many seconds is a stall."""


class Noise:
    """A thread that sleeps `NAP` again and again and notes each time it was not woken for `STALL` seconds."""

    def __init__(self) -> None:
        self.stalls: list[tuple[float, float]] = []  # (when, seconds)
        self._began, self._first = time.monotonic(), _times()
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        last = time.monotonic()
        while True:
            time.sleep(NAP)
            now = time.monotonic()
            if now - last > STALL:
                self.stalls.append((time.time(), now - last))
            last = now

    def words(self) -> str:
        """Return the figures since the start in one line."""
        busy, steal, whole = (now - then for now, then in zip(_times(), self._first, strict=True))
        load = Path("/proc/loadavg").read_text().split()[0]
        text = f"cores busy {busy / whole:.0%}, steal {steal / whole:.1%}, load {load}"
        if not self.stalls:
            return f"{text}, no stall over {STALL} s"
        when, longest = max(self.stalls, key=lambda stall: stall[1])
        at = time.strftime("%H:%M:%S", time.gmtime(when))
        return f"{text}, {len(self.stalls)} stalls over {STALL} s, the longest {longest:.1f} s at {at}"


def _times() -> tuple[int, int, int]:
    """Return the ticks of all cores: busy, stolen, all (proc(5): user nice system idle iowait irq softirq steal)."""
    fields = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return sum(fields) - fields[3] - fields[4], fields[7], sum(fields)
