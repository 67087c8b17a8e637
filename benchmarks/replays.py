"""Traces of the same programs on two devices, each replayed on the other's: `python -m benchmarks.replays ONE OTHER`.

ONE and OTHER are folders with files of the same names. The steps of each file's replay on the other's machine are
compared with the steps that were measured there. Host and device are one step: a host that is slower shows as an error.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import mpkit as mk


def replays(one: Path, other: Path) -> list[tuple[str, str, float, float]]:
    """Return, for each file and direction, the machine, and the seconds of a step as replayed and as measured there."""
    rows = []
    for path in sorted(one.glob("*.json*")):
        traces = [mk.open(path), mk.open(other / path.name)]
        for here, there in (traces, traces[::-1]):
            machine = str(there.meta["hardware"])
            rows.append((path.name, machine, here.timeline(machine).step_time, there.timeline().step_time))
    return rows


def main() -> None:
    """Print a line per replay, and the mean of their errors."""
    rows = replays(*map(Path, sys.argv[1:3]))
    for name, machine, replayed, measured in rows:
        print(f"{name[:44]:44} on {machine:16} {1e3 * replayed:9.2f} ms, measured {1e3 * measured:9.2f}, "
              f"{replayed / measured - 1:+6.1%}")  # fmt: skip
    errors = np.array([abs(replayed / measured - 1) for *_, replayed, measured in rows])
    print(f"mean error {errors.mean():.1%}, largest {errors.max():.1%}, of {len(rows)} replays")


if __name__ == "__main__":
    main()
