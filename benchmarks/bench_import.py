"""How fast traces of torch.profiler are imported, and in how much memory.

Writes a file of 1 GB, from the events of a training that this benchmark profiles itself, and imports it in a process of
its own; 60 s and 2 GB are wanted. The ratio is that of the import to `json.loads` of the same text, which needs several
times as much memory.

    python -m benchmarks import
    python -m benchmarks.bench_import [--megabytes 1000] [--trace FILE]     of a trace of one's own
"""

from __future__ import annotations

import argparse
import gzip
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def profiled(path: Path) -> list[dict[str, Any]]:
    """Profile a short training; return the events of its trace."""
    import torch
    from torch import nn
    from torch.profiler import ProfilerActivity, profile, schedule

    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU()) for _ in range(12)])
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with profile(
        activities=[ProfilerActivity.CPU], record_shapes=True, profile_memory=True,
        schedule=schedule(wait=0, warmup=1, active=3, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
    ) as profiler:  # fmt: skip
        for _ in range(4):
            model(torch.randn(8, 32)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    return read(path)


def read(path: Path) -> list[dict[str, Any]]:
    """Return a trace's events."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    events: list[dict[str, Any]] = json.loads(data)["traceEvents"]
    return events


def repeated(events: list[dict[str, Any]], path: Path, size: int) -> None:
    """Write the events again and again, each time later and with new ids, until the file is large enough."""
    timed = [event for event in events if "ts" in event and event.get("cat") != "Trace"]
    first = min(event["ts"] for event in timed)
    length = max(event["ts"] + event.get("dur", 0) for event in timed) - first
    ids = 1 + max(int(event.get("args", {}).get("External id", 0)) for event in timed)
    with path.open("w") as file:
        file.write('{"schemaVersion": 1, "traceEvents": [\n')
        for turn in range(10**6):
            for event in timed:
                event["ts"] += length * (turn > 0)
                for name in ("External id", "correlation"):
                    if name in event.get("args", {}):
                        event["args"][name] += ids * (turn > 0)
            file.write(",\n".join(map(json.dumps, timed)))
            if file.tell() > size:
                break
            file.write(",\n")
        file.write("]}")


def imported(path: Path) -> None:
    """Import the file in this process; print operations, seconds, and bytes of memory at the peak."""
    import mpkit as mk

    began = time.perf_counter()
    trace = mk.open(path)
    took = time.perf_counter() - began
    print(len(trace), took, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def parsed(path: Path) -> None:
    """Parse 200,000 of the file's events with `json.loads`; print the seconds that all would take."""
    with path.open() as file:
        next(file)  # the head
        lines = [line for _, line in zip(range(200_000), file, strict=False) if line.endswith(",\n")]
    began = time.perf_counter()
    for line in lines:
        json.loads(line.rstrip().rstrip(","))
    took = time.perf_counter() - began
    print(took * path.stat().st_size / sum(map(len, lines)))


def measure(megabytes: float = 1000, trace: Path | None = None) -> list[dict[str, Any]]:
    """Measure the import of a file of that size."""
    with tempfile.TemporaryDirectory() as folder:
        events = read(trace) if trace else profiled(Path(folder) / "one.json")
        path = Path(folder) / "many.json"
        repeated(events, path, int(megabytes * 1e6))
        del events
        (ops, seconds, peak), (plain,) = (_in_a_process(what, path) for what in ("imported", "parsed"))
        size = path.stat().st_size
    return [
        {
            "name": f"import: {size / 1e9:.2f} GB of JSON, {ops:,.0f} ops",
            "value": seconds,
            "unit": "s",
            "ratio": seconds / plain,
            "against": f"json.loads of each event: {plain:.1f} s",
        },
        {
            "name": "import: memory at the peak",
            "value": peak / 1e9,
            "unit": "GB",
            "ratio": peak / size,
            "against": "the file",
        },
    ]


def _in_a_process(what: str, path: Path) -> list[float]:
    code = (
        f"from pathlib import Path; from benchmarks.bench_import import {what}; {what}(Path({str(path)!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [float(word) for word in done.stdout.split()[-3:]]


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=float, default=1000)
    parser.add_argument(
        "--trace", type=Path, help="whose events are repeated; left out: a training profiled here"
    )
    options = parser.parse_args()
    for row in measure(options.megabytes, options.trace):
        print(f"{row['name']}: {row['value']:.2f} {row['unit']}, {row['ratio']:.2f} of {row['against']}")


if __name__ == "__main__":
    main()
