"""Programs of other systems, watched: what each sends, hides, holds, and whether it trains as one process does.

    python -m tests.systems                      all that is installed
    python -m tests.systems fsdp2 pipelining     these scripts
    python -m tests.systems --draw DIR           with each timeline as SVG and as an interactive page in DIR

Each script of examples/systems is watched on 2 (or 4) processes, unchanged. Its table:

    calls       communications of rank 0 in a step, by kind
    bytes       payload per rank and step, beside the papers' formula (P: parameters, x: activations of the
                whole batch between blocks, n: ranks)
    bubble      idle share of the step, on the virtual clock; hidden: share of the communication under compute
    memory      peak of rank 0 in MB, and each category at its own peak; and by how much torch.profiler's peak of the
                same script, unwatched, differs on the worst rank: at most 3 % (benchmarks/allocator.py)
    serial      the largest relative difference of a loss from serial training, and of the norm of a weight

The exit status is 0 if every script that could run trains as one process does, with the bytes of its formula and the
memory of the profiler. What cannot run is listed with its reason; where CI is set, everything has to run.
tests/systems is not part of `make test`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from pathlib import Path

import torch

import mpkit as mk
from tests.systems.measure import Measured, Serial, measure, missing
from tests.systems.systems import SYSTEMS, System

CATEGORIES = ("params", "grads", "optimizer", "activations", "buffers")


def main() -> int:
    """Print the table; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.systems", description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help="scripts, or a script and its variant in quotes; none: all")
    parser.add_argument("--draw", type=Path, help="the folder for each timeline's picture and page")
    options = parser.parse_args()
    names = {name for system in SYSTEMS for name in (system.script, system.name)}
    if unknown := [name for name in options.names if name not in names]:
        print(f"No system {', '.join(unknown)}. There are: {', '.join(sorted(names))}")
        return 2
    chosen = [one for one in SYSTEMS if not options.names or {one.script, one.name} & {*options.names}]
    _quiet()
    begun = time.monotonic()
    clusters: dict[int, mk.Cluster] = {}
    serial = Serial()
    failed: list[str] = []
    left_out: list[str] = []
    print(f"{'system':24}{'calls, bytes beside the formula':58}{'bubble':>7}{'hidden':>7}  serial")
    for system in chosen:
        if lacks := missing(system):
            left_out.append(f"{system.name}: {', '.join(lacks)} not installed (see scripts/systems.sh)")
            continue
        if system.ranks not in clusters:
            clusters[system.ranks] = mk.Cluster(system.ranks, device="cpu")
        try:
            measured = measure(clusters[system.ranks], system, serial)
        except Exception as error:  # a verdict of its own, that fails the run
            failed.append(f"{system.name}: {type(error).__name__}: {error}")
            print(f"{system.name:24}ERROR, below", flush=True)
            continue
        failed += [f"{system.name}: {what}" for what in measured.wrong(system)]
        print("\n".join(_row(system, measured)), flush=True)
        if options.draw:
            _draw(options.draw, system, measured)
    for cluster in clusters.values():
        cluster.close()
    print(f"\n{len(chosen) - len(left_out)} systems, {time.monotonic() - begun:.0f} s")
    for said, lines in (("not run", left_out), ("FAILED", failed)):
        print("\n".join(f"{said}: {line}" for line in lines))
    return 1 if failed else 0


def _quiet() -> None:
    """Leave out what libraries say, in this process and on ranks; one thread per process."""
    warnings.simplefilter("ignore")
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "KINETO_LOG_LEVEL": "9", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    os.environ |= {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)


def _row(system: System, measured: Measured) -> list[str]:
    """Return a system's lines: one per kind of communication, and one for memory."""
    kinds = sorted(measured.calls, key=lambda kind: -measured.sent.get(kind, 0))
    lines = []
    for i, kind in enumerate(kinds):
        sent = measured.sent.get(kind, 0)
        text = f"{measured.calls[kind]:3} {kind:15}{sent:12,.0f} B"
        if measured.expected is not None and kind in measured.expected:
            text += f"  {sent / measured.expected[kind]:.3f} of the formula"
        lines.append(f"{system.name if not i else '':24}{text:58}")
    step = measured.step
    loss, norm = measured.differs
    equal = "yes" if loss <= system.rtol else "NO"
    lines[0] += (
        f"{step.bubble:7.3f}{step.overlap:7.0%}  {equal}: losses {loss:.0e}, {measured.compared} weights {norm:.0e}"
    )
    held = step.peak_memory[0]
    parts = ", ".join(f"{name} {held[name] / 1e6:.2f}" for name in CATEGORIES)
    memory = (
        f"{held['total'] / 1e6:.2f} MB at its peak ({parts}); the profiler {measured.memory_differs:+.1%}"
        if system.allocates
        else "memory: not torch's, and not seen"
    )
    lines.append(f"{'':24}{memory}" + (f"; formula: {system.words}" if system.words else ""))
    return lines


def _draw(folder: Path, system: System, measured: Measured) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    name = system.name.replace(" ", "_")
    measured.step.to_svg(folder / f"{name}.svg")
    measured.timeline.to_html(folder / f"{name}.html")


if __name__ == "__main__":
    sys.exit(main())
