"""Files of Linux: memory, the limits that a container sets, ports, load."""

from __future__ import annotations

import re

__all__ = ["parse_cpu_limit", "parse_load", "parse_memory", "parse_memory_limit", "parse_ports"]


def parse_memory(text: str) -> tuple[int, int]:
    r"""Return the bytes of memory in all, and those available, from /proc/meminfo.

    >>> parse_memory("MemTotal:       16384 kB\nMemFree: 1 kB\nMemAvailable:    8192 kB\n")
    (16777216, 8388608)

    Raises:
        ValueError: the text does not say.
    """
    found: dict[str, str] = dict(re.findall(r"^(\w+): +(\d+) kB", text, re.MULTILINE))
    if "MemTotal" not in found:
        raise ValueError("/proc/meminfo does not say MemTotal")
    return int(found["MemTotal"]) << 10, int(found.get("MemAvailable", found["MemTotal"])) << 10


def parse_memory_limit(text: str) -> int | None:
    r"""Return the bytes that the container may use, from memory.max; None: as many as there are.

    >>> parse_memory_limit("max\n"), parse_memory_limit("1073741824\n")
    (None, 1073741824)
    """
    return int(text) if text.strip().isdecimal() else None


def parse_cpu_limit(text: str) -> float | None:
    r"""Return how many CPUs' time the container may use, from cpu.max; None: as many as there are.

    >>> parse_cpu_limit("150000 100000\n"), parse_cpu_limit("max 100000\n")
    (1.5, None)
    """
    quota, _, period = text.strip().partition(" ")
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() and int(period) else None


def parse_ports(text: str) -> int:
    r"""Return how many ports outgoing connections may use, from ip_local_port_range.

    >>> parse_ports("32768\t60999\n")
    28232

    Raises:
        ValueError: the text is no range.
    """
    first, last = map(int, text.split())
    return last - first + 1


def parse_load(text: str) -> float:
    r"""Return the load of the last minute, from /proc/loadavg.

    >>> parse_load("0.52 0.58 0.59 1/389 12345\n")
    0.52

    Raises:
        ValueError: the text has no such number.
    """
    first, _, _ = text.partition(" ")
    return float(first)
