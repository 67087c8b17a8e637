"""How fast traces of torch.profiler are imported, and in how much memory.

Writes a file of the size asked for, from the events of a training that this benchmark profiles itself (or of a given
trace), imports it in a process of its own, and prints seconds and memory, also as they would be for 1 GB of JSON.

    python benchmarks/bench_import.py [--megabytes 300] [--trace FILE]
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
            file.write(",\n".join(json.dumps(event) for event in timed))
            if file.tell() > size:
                break
            file.write(",\n")
        file.write("]}")


def measured(path: Path) -> None:
    import mpkit as mk

    began, cpu = time.perf_counter(), time.process_time()
    trace = mk.open(path)
    took, worked = time.perf_counter() - began, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    size = path.stat().st_size
    print(
        f"{size / 1e6:,.0f} MB of JSON, {len(trace):,} ops: {took:.1f} s ({worked:.1f} s of CPU time), peak "
        f"{peak / 1e9:.2f} GB; at this rate 1 GB takes {took / size * 1e9:.0f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=float, default=300)
    parser.add_argument(
        "--trace", type=Path, help="whose events are repeated; left out: a training profiled here"
    )
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measured(options.measure)
        return
    with tempfile.TemporaryDirectory() as folder:
        events = read(options.trace) if options.trace else profiled(Path(folder) / "one.json")
        path = Path(folder) / "many.json"
        repeated(events, path, int(options.megabytes * 1e6))
        del events
        subprocess.run([sys.executable, __file__, "--measure", str(path)], check=True)


if __name__ == "__main__":
    main()
